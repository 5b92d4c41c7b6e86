"""The RAttention layer: what it sees, its gradients, and decoding equal to the full pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shapetune.cache.errors import ProblemError
from shapetune.kernels import rattention
from shapetune.kernels.rattention import RAttentionConfig

BASE = {"width": 24, "heads": 4, "head_dim": 8, "window": 6}
CONFIGS = {
    "both": {},
    "grouped-query, meta tokens, scales": {"kv_heads": 2, "meta_tokens": 3, "qk_scales": True},
    "local": {"branches": "local"},
    "global, relu": {"branches": "global", "feature_map": "relu", "meta_tokens": 2},
    "longer window than sequence": {"window": 50},
}


def layer(length=21, **options):
    cfg = RAttentionConfig(**{**BASE, **options})
    params = rattention.init(jax.random.key(0), cfg)
    # Away from the start values, so that no parameter could be left out unseen.
    for i, name in enumerate(sorted(params)):
        noise = jax.random.normal(jax.random.key(i), params[name].shape)
        params[name] = params[name] + 0.1 * noise
    x = jax.random.normal(jax.random.key(99), (2, length, cfg.width))
    return cfg, params, x


@pytest.mark.parametrize("options", list(CONFIGS.values())[1:4], ids=list(CONFIGS)[1:4])
def test_decoding_token_by_token_is_the_full_pass(options):
    cfg, params, x = layer(**options)
    whole = jax.jit(rattention.apply, static_argnums=2)(params, x, cfg)
    step = jax.jit(rattention.decode, static_argnums=3)
    state = rattention.start(params, cfg, batch=2)
    for t in range(x.shape[1]):
        row, state = step(params, state, x[:, t], cfg)
        np.testing.assert_allclose(row, whole[:, t], atol=2e-5, err_msg=f"token {t}")


@pytest.mark.parametrize(
    ("name", "split"),
    [("grouped-query, meta tokens, scales", 14), ("local", 3), ("global, relu", 14), ("both", 3)],
)
def test_decoding_goes_on_from_a_prefill(name, split):
    options = CONFIGS[name]
    cfg, params, x = layer(**options)
    whole = jax.jit(rattention.apply, static_argnums=2)(params, x, cfg)
    step = jax.jit(rattention.decode, static_argnums=3)
    rows, state = jax.jit(rattention.prefill, static_argnums=2)(params, x[:, :split], cfg)
    np.testing.assert_allclose(rows, whole[:, :split], atol=2e-5)
    for t in range(split, x.shape[1]):
        row, state = step(params, state, x[:, t], cfg)
        np.testing.assert_allclose(row, whole[:, t], atol=2e-5, err_msg=f"token {t}")


def test_the_state_does_not_grow():
    cfg, params, x = layer(length=40)
    _, short = rattention.prefill(params, x[:, :9], cfg)
    _, long = rattention.prefill(params, x, cfg)
    assert [a.shape for a in short] == [a.shape for a in long]


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_gradients_are_those_of_finite_differences(options):
    cfg, params, x = layer(**options)
    weights = jax.random.normal(jax.random.key(7), x.shape)

    @jax.jit
    def loss(params, x):
        return jnp.sum(rattention.apply(params, x, cfg) * weights)

    arguments = (params, x)
    slopes = jax.jit(jax.grad(loss, (0, 1)))(*arguments)
    flat, tree = jax.tree.flatten(arguments)
    for i, (leaf, grad) in enumerate(zip(flat, jax.tree.leaves(slopes), strict=True)):
        along = jax.random.normal(jax.random.key(i), leaf.shape)
        along = along / jnp.linalg.norm(along)

        def at(step, i=i, along=along):
            return loss(
                *jax.tree.unflatten(tree, [*flat[:i], flat[i] + step * along, *flat[i + 1 :]])
            )

        measured = float(at(1e-2) - at(-1e-2)) / 2e-2
        size = float(jnp.linalg.norm(grad))
        assert size > 0 or options == {"window": 50}, i  # there the recurrence sees nothing
        assert abs(measured - float(jnp.vdot(grad, along))) < 0.03 * max(size, 1e-2), i


def test_a_layer_sees_all_of_the_past_and_nothing_of_the_future():
    cfg, params, x = layer()
    seen = jax.jit(jax.grad(lambda x: rattention.apply(params, x, cfg)[0, 15].sum()))(x)
    reached = np.abs(np.asarray(seen)).max(axis=(0, 2)) > 0
    assert reached[:16].all()
    assert not reached[16:].any()


def test_the_local_branch_sees_only_its_window():
    cfg, params, x = layer(branches="local")
    seen = jax.jit(jax.grad(lambda x: rattention.apply(params, x, cfg)[0, 15].sum()))(x)
    reached = np.abs(np.asarray(seen)).max(axis=(0, 2)) > 0
    assert reached.tolist() == [15 - cfg.window <= t <= 15 for t in range(21)]


def test_the_recurrence_knows_no_positions():
    """Only what leaves the window, not where it was, reaches the recurrence."""
    cfg, params, x = layer(branches="global")
    swapped = x.at[:, jnp.array([2, 3])].set(x[:, jnp.array([3, 2])])
    first, second = (rattention.apply(params, a, cfg)[:, -1] for a in (x, swapped))
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_output_has_the_dtype_of_the_input(dtype):
    cfg, params, x = layer(kv_heads=2)

    def run(params, x):
        state = rattention.start(params, cfg, 2, dtype)
        return rattention.apply(params, x, cfg), *rattention.decode(params, state, x[:, 0], cfg)

    rows, row, state = jax.eval_shape(run, params, x.astype(dtype))
    assert (rows.dtype, row.dtype) == (dtype, dtype)
    assert (state.keys.dtype, state.memory.dtype) == (dtype, "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"kv_heads": 0}, "kv_heads must be an integer of at least 1, got 0"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"window": -1}, "window must be an integer of at least 0, got -1"),
        ({"window": None}, "window must be an integer of at least 0, got None"),
        ({"branches": "none"}, "branches must be one of"),
        ({"feature_map": "exp"}, "feature_map must be one of"),
        ({"heads": 0}, "heads must be an integer of at least 1, got 0"),
        ({"heads": True}, "heads must be an integer"),
        ({"width": 24.0}, "width must be an integer"),
        ({"head_dim": "8"}, "head_dim must be an integer of at least 1, got '8'"),
        ({"eps": 0}, "eps must be a number above 0, got 0"),
        ({"eps": float("nan")}, "eps must be a number above 0, got nan"),
        ({"rope_base": -5.0}, "rope_base must be a number above 0"),
        ({"qk_scales": "no"}, "qk_scales must be True or False, got 'no'"),
        ({"branches": "local", "meta_tokens": 3}, "meta_tokens=3 belongs to the recurrence"),
        ({"branches": "local", "qk_scales": True}, "qk_scales=True belongs to the recurrence"),
    ],
)
def test_bad_fields_are_named(options, message):
    with pytest.raises(ProblemError, match=message):
        RAttentionConfig(**{**BASE, **options})


@pytest.mark.parametrize(
    ("made", "used", "message"),
    [
        ({"meta_tokens": 3}, {}, "params has besides meta for this config"),
        ({}, {"meta_tokens": 3}, "params lacks meta for this config"),
        ({}, {"qk_scales": True}, "params lacks key_scale, query_scale"),
        ({"branches": "local"}, {}, "params lacks global_norm"),
        ({}, {"heads": 2}, r"params\['query'\] has shape \[24, 4, 8\].*\[24, 2, 8\]"),
        ({}, {"kv_heads": 2}, r"params\['key'\] has shape \[24, 4, 8\].*\[24, 2, 8\]"),
    ],
)
def test_parameters_of_another_layer_are_refused(made, used, message):
    _, params, x = layer(**made)
    cfg = RAttentionConfig(**{**BASE, **used})
    _, fitting, _ = layer(**used)
    state = rattention.start(fitting, cfg, 2)
    for call in (
        lambda: rattention.apply(params, x, cfg),
        lambda: rattention.prefill(params, x, cfg),
        lambda: rattention.start(params, cfg, 2),
        lambda: rattention.decode(params, state, x[:, 0], cfg),
    ):
        with pytest.raises(ProblemError, match=message):
            call()


def test_what_are_no_parameters_is_refused():
    cfg, _params, x = layer()
    with pytest.raises(ProblemError, match="params must be a mapping as init returns it"):
        rattention.apply(None, x, cfg)
    with pytest.raises(ProblemError, match="params lacks global_norm, key"):
        rattention.apply({}, x, cfg)


def test_a_state_of_another_layer_or_batch_is_refused():
    cfg, params, x = layer()
    state = rattention.start(params, cfg, 2)

    def decode(state=state, x=x[:, 0]):
        return rattention.decode(params, state, x, cfg)

    for other in ({"window": 3}, {"branches": "global"}):
        theirs, their_params, _ = layer(**other)
        with pytest.raises(ProblemError, match=r"state.keys has shape \[2, [04], 4, 8\]"):
            decode(rattention.start(their_params, theirs, 2))
    with pytest.raises(ProblemError, match="x of batch 1"):
        decode(x=x[:1, 0])
    for nothing in (None, tuple(state)):
        with pytest.raises(ProblemError, match="state must come from start, prefill or decode"):
            decode(nothing)
    for rows, message in (
        (x[:, :1], r"x must be \[B, 24\].*got shape \[2, 1, 24\]"),
        (x[:, 0, :23], r"got shape \[2, 23\]"),
        (x[:, 0].astype(int), "x must be floating, got int32"),
        ([1.0], "x must be an array"),
    ):
        with pytest.raises(ProblemError, match=message):
            decode(x=rows)


@pytest.mark.parametrize(
    ("batch", "dtype", "message"),
    [
        (-1, "float32", "batch must be an integer of at least 1, got -1"),
        (1.5, "float32", "batch must be an integer"),
        (1, "int32", "dtype must be a floating dtype such as 'float32', got 'int32'"),
        (1, "zzz", "dtype must be a floating dtype"),
    ],
)
def test_a_start_that_cannot_be_is_refused(batch, dtype, message):
    cfg, params, _ = layer()
    with pytest.raises(ProblemError, match=message):
        rattention.start(params, cfg, batch, dtype)


def test_a_recurrence_is_not_named_where_there_is_none():
    cfg, params, x = layer(branches="local")
    with pytest.raises(ProblemError, match="implementation='scan' is of the recurrence"):
        rattention.apply(params, x, cfg, implementation="scan")


def test_a_bad_input_is_named():
    cfg, params, x = layer()
    with pytest.raises(
        ProblemError, match=r"x must be \[B, T, 24\], no axis empty, got shape \[2, 21, 23\]"
    ):
        rattention.apply(params, x[..., :23], cfg)
