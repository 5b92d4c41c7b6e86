"""The dispatcher: tiers, transformations, and what is left in the compiled program."""

import logging
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shapetune
from shapetune.cache import Candidate, publish
from shapetune.cache.errors import (
    CacheError,
    ConfigError,
    ProblemError,
    UnknownNameError,
    UntunedError,
)
from shapetune.kernels import current_device, default, get_op

from ..samples import problem, record

SEQ, DIM, HEADS = 1024, 32, 2
CONFIG = {"block_q": 512, "block_k": 512}


def _blocks(mode="fwd", **config):
    """A blockwise candidate that differs from the default config."""
    about = problem(seq=SEQ, dim=DIM, heads=HEADS, mode=mode)
    one = get_op("attention").implementation("blockwise")
    chosen = {**one.default_config(about, current_device()), **config}
    assert one.space(about, current_device()).refusal(chosen) is None
    return Candidate("blockwise", chosen)


def _tuned(cache, mode="fwd", chosen=None, **fields):
    about = problem(**{"seq": SEQ, "dim": DIM, "heads": HEADS, "mode": mode, **fields})
    one = record(about, chosen=chosen or _blocks(mode, block_k=256))
    publish(cache, [one])
    return one


def _arrays(seq=SEQ, batch=1):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (batch, seq, HEADS, DIM)) for k in keys]


def _explain(**fields):
    return shapetune.explain("attention", **{"seq": SEQ, "dim": DIM, "heads": HEADS, **fields})


def test_nothing_tuned_gives_the_heuristic():
    decision = _explain()
    assert decision.tier == "heuristic"
    assert decision.candidate == get_op("attention").heuristic(decision.problem, current_device())


def test_a_record_of_the_problem_is_exact(own_cache):
    one = _tuned(own_cache)
    decision = _explain()
    assert (decision.tier, decision.candidate) == ("exact", one.chosen)
    assert decision.speedup == one.comparison.ratio
    assert decision.record_ids == (one.id,)


def test_a_record_of_another_batch_stands_in(own_cache):
    one = _tuned(own_cache)
    for fields in ({"batch": 3}, {"heads": 16}):
        decision = _explain(**fields)
        assert (decision.tier, decision.candidate) == ("other-batch", one.chosen)
        assert decision.speedup is None


def test_the_nearest_length_stands_in_with_a_config_that_fits(own_cache):
    _tuned(
        own_cache, seq=2048, chosen=Candidate("blockwise", {**_blocks().config, "block_q": 1024})
    )
    decision = _explain(seq=1100)
    assert decision.tier == "nearest"
    one = get_op("attention").implementation("blockwise")
    assert one.space(decision.problem, current_device()).refusal(decision.config) is None
    assert _explain(seq=400).tier == "heuristic"


def test_what_differs_in_anything_else_does_not_stand_in(own_cache):
    _tuned(own_cache)
    for fields in ({"causal": True}, {"dtype": "bfloat16"}, {"dim": 64}, {"mode": "fwd_bwd"},
                   {"window": (8, 8)}, {"kv_heads": 1}):  # fmt: skip
        assert _explain(**fields).tier == "heuristic", fields


def test_a_config_outside_the_space_or_an_unknown_implementation_is_passed_over(own_cache):
    _tuned(own_cache, chosen=Candidate("blockwise", {"block_q": 5}))
    _tuned(own_cache, chosen=Candidate("from_the_future", {}))
    decision = _explain()
    assert decision.tier == "heuristic"
    assert sum("passed over" in step for step in decision.steps) == 2


def test_a_parameter_of_one_choice_may_be_missing_from_a_record(own_cache):
    """As one is that came with a later version."""
    whole = _blocks(block_k=256)
    older = {name: value for name, value in whole.config.items() if name != "shift"}
    _tuned(own_cache, chosen=Candidate("blockwise", older))
    decision = _explain()
    assert (decision.tier, decision.candidate) == ("exact", whole)


def test_records_of_another_device_are_not_used(own_cache):
    foreign = current_device().__class__("cpu", "Another Processor", cores=64)
    publish(own_cache, [record(problem(seq=SEQ, dim=DIM, heads=HEADS), device=foreign)])
    assert _explain().tier == "heuristic"


def test_heuristic_is_best_is_an_exact_answer(own_cache):
    about = problem(seq=SEQ, dim=DIM, heads=HEADS)
    best = get_op("attention").heuristic(about, current_device())
    one = record(about, chosen=best)
    object.__setattr__(one, "heuristic", best)
    publish(own_cache, [one])
    assert (_explain().tier, _explain().candidate) == ("exact", best)


def test_a_stale_record_is_used_with_a_warning_and_not_under_strict(own_cache, monkeypatch, caplog):
    publish(own_cache, [record(problem(seq=SEQ, dim=DIM, heads=HEADS), jax_version="0.1.0")])
    with caplog.at_level(logging.WARNING, "shapetune"):
        assert _explain().tier == "exact"
    assert "stale" in caplog.text
    monkeypatch.setenv("SHAPETUNE_STALE", "strict")
    shapetune.reload()
    assert _explain().tier == "heuristic"


def test_disable_and_on_miss(own_cache, monkeypatch, caplog):
    arrays = _arrays(64)
    monkeypatch.setenv("SHAPETUNE_ON_MISS", "warn")
    shapetune.reload()
    with caplog.at_level(logging.WARNING, "shapetune"):
        for _ in range(3):
            shapetune.attention(*arrays)
    assert len([r for r in caplog.records if "not tuned" in r.message]) == 1
    monkeypatch.setenv("SHAPETUNE_ON_MISS", "error")
    shapetune.reload()
    with pytest.raises(UntunedError, match="shapetune tune"):
        shapetune.attention(*arrays)
    monkeypatch.setenv("SHAPETUNE_DISABLE", "1")
    shapetune.reload()
    assert shapetune.attention(*arrays).shape == arrays[0].shape
    monkeypatch.setenv("SHAPETUNE_ON_MISS", "explode")
    with pytest.raises(ConfigError, match=r"SHAPETUNE_ON_MISS='explode'.*heuristic"):
        shapetune.reload()
    monkeypatch.setenv("SHAPETUNE_ON_MISS", "heuristic")
    monkeypatch.setenv("SHAPETUNE_DISABLE", "maybe")
    with pytest.raises(ConfigError, match="SHAPETUNE_DISABLE='maybe' is neither 1 nor 0"):
        shapetune.reload()


def test_a_call_whose_own_mode_is_tuned_is_no_miss(own_cache, monkeypatch):
    _tuned(own_cache)
    monkeypatch.setenv("SHAPETUNE_ON_MISS", "error")
    shapetune.reload()
    arrays = _arrays()
    assert shapetune.attention(*arrays).shape == arrays[0].shape
    with pytest.raises(UntunedError, match="fwd_bwd"):
        jax.grad(lambda q: shapetune.attention(q, *arrays[1:]).sum())(arrays[0])


def _text(function, *args):
    """StableHLO without the names of the module and of locations."""
    text = jax.jit(function).lower(*args).as_text()
    return re.sub(r"module @\S+", "module", text)


def _direct(candidate, mode="fwd"):
    op = get_op("attention")
    call = op.bind(problem(seq=SEQ, dim=DIM, heads=HEADS, mode=mode), candidate)
    return lambda q, k, v: call(q, k, v, None, None, None, None)


@pytest.mark.parametrize("tuned_backward", [False, True])
def test_a_jitted_call_compiles_to_the_chosen_call_alone(own_cache, tuned_backward):
    one = _tuned(own_cache)
    if tuned_backward:
        _tuned(own_cache, "fwd_bwd")
    arrays = _arrays()
    got = _text(lambda q, k, v: shapetune.attention(q, k, v), *arrays)
    assert got == _text(lambda q, k, v: _direct(one.chosen)(q, k, v), *arrays)


def test_a_gradient_uses_the_decision_of_fwd_bwd(own_cache):
    _tuned(own_cache)
    training = _tuned(own_cache, "fwd_bwd", _blocks("fwd_bwd", block_q=256))
    arrays = _arrays()

    def optimized(call):
        grad = jax.grad(lambda q, k, v: call(q, k, v).sum(), argnums=(0, 1, 2))
        text = jax.jit(grad).lower(*arrays).compile().as_text()
        return sorted(re.findall(r"= (\S+\[[\d,]*\])\S* (dot|while|exponential|fusion)", text))

    want = optimized(_direct(training.chosen, "fwd_bwd"))
    assert optimized(shapetune.attention) == want
    assert optimized(_direct(_blocks("fwd_bwd"), "fwd_bwd")) != want


@pytest.mark.parametrize("tuned", [False, True])
def test_transformations_agree_with_jax_nn(own_cache, tuned):
    if tuned:
        _tuned(own_cache)
        _tuned(own_cache, "fwd_bwd", _blocks("fwd_bwd", block_q=256))
    arrays = _arrays()
    ours, theirs = shapetune.attention, jax.nn.dot_product_attention

    def loss(attend, q, k, v):
        return jnp.sin(attend(q, k, v)).sum()

    stack = [jnp.stack([a, 2 * a]) for a in arrays]
    transformed = {
        "eager": (lambda f: f, arrays),
        "jit": (jax.jit, arrays),
        "grad": (lambda f: jax.grad(partial(loss, f), argnums=(0, 1, 2)), arrays),
        "jit grad": (lambda f: jax.jit(jax.grad(partial(loss, f), argnums=(0, 1, 2))), arrays),
        "checkpoint": (lambda f: jax.grad(partial(loss, jax.checkpoint(f)), argnums=1), arrays),
        "vmap": (lambda f: jax.jit(jax.vmap(f)), stack),
        "vmap grad": (lambda f: jax.jit(jax.vmap(jax.grad(partial(loss, f)))), stack),
    }
    for name, (transform, args) in transformed.items():
        got = jax.tree.leaves(transform(lambda q, k, v: ours(q, k, v))(*args))
        want = jax.tree.leaves(transform(lambda q, k, v: theirs(q, k, v))(*args))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=name)


def test_forward_mode_works_where_the_decision_is_plain():
    arrays = _arrays(16)
    tangents = [jnp.ones_like(a) for a in arrays]
    got = jax.jvp(shapetune.attention, arrays, tangents)[1]
    want = jax.jvp(jax.nn.dot_product_attention, arrays, tangents)[1]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_use_cache_is_in_force_inside_its_block_only(tmp_path):
    one = _tuned(tmp_path / "other")
    with shapetune.use_cache(tmp_path / "other"):
        assert _explain().candidate == one.chosen
    assert _explain().tier == "heuristic"


def test_load_and_reload_count_the_records(own_cache, tmp_path):
    assert shapetune.reload() == 0
    _tuned(own_cache)
    assert shapetune.reload() == 1
    assert shapetune.load([tmp_path / "none"]) == 0
    assert shapetune.load(own_cache) == 1
    assert _explain().tier == "exact"


def test_a_place_that_is_something_else_is_refused(tmp_path):
    other = tmp_path / "file"
    other.write_text("x")
    with pytest.raises(CacheError, match="file"):
        shapetune.load(other)
    with pytest.raises(CacheError, match="file"), shapetune.use_cache(other):
        pass


def test_an_unreadable_cache_never_stops_a_call(own_cache):
    folder = own_cache / current_device().folder
    folder.mkdir(parents=True)
    (folder / "broken.msgpack").write_bytes(b"\x00" * 1000)
    assert shapetune.attention(*_arrays(16)).shape == (1, 16, HEADS, DIM)


def test_explain_refuses_what_is_no_problem():
    with pytest.raises(UnknownNameError, match="nothing"):
        shapetune.explain("nothing", seq=1, dim=1)
    with pytest.raises(ProblemError, match="dim"):
        shapetune.explain("attention", seq=1, dim=0)
    with pytest.raises(shapetune.ShapetuneError, match="sequence"):
        shapetune.explain("attention", sequence=1, dim=1)


def test_a_prepared_call_is_found_again_without_a_decision(own_cache, monkeypatch):
    arrays = _arrays(64)
    shapetune.attention(*arrays)
    monkeypatch.setattr(default, "prepare", lambda *a: pytest.fail("decided again"))
    shapetune.attention(*arrays)
    with pytest.raises(pytest.fail.Exception):
        shapetune.attention(*_arrays(65))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"local_window_size": (1, 0)}, {"local_window_size": (1.0, 0.0)}),
        (
            {"implementation": "blockwise", "config": {"block_q": 64}},
            {"implementation": "blockwise", "config": {"block_q": 64.0}},
        ),
    ],
)
def test_a_value_of_another_type_is_refused_after_the_right_one_was_served(right, wrong):
    arrays = _arrays(64)
    shapetune.attention(*arrays, **right)
    with pytest.raises(shapetune.ShapetuneError):
        shapetune.attention(*arrays, **wrong)


def test_a_quarantined_candidate_is_passed_over(own_cache):
    from shapetune.cache.quarantine import Quarantine

    one = _tuned(own_cache)
    version = get_op("attention").implementation("blockwise").version
    harm = Quarantine(
        one.problem, one.device, one.chosen, "crashed", "signal 11", version,
        "0.1.0", jax.__version__, jax.__version__, "00", 1.0,
    )  # fmt: skip
    publish(own_cache, [harm])
    decision = _explain()
    assert decision.candidate != one.chosen
    assert any("quarantined, crashed: signal 11" in step for step in decision.steps)


def test_a_quarantined_heuristic_gives_way_to_another_default():
    from shapetune.kernels.decision import versions
    from shapetune.kernels.tiers import Case

    op, about, here = get_op("attention"), problem(seq=SEQ, dim=DIM, heads=HEADS), current_device()
    first = op.heuristic(about, here)
    case = Case(op, about, here, versions(op), "warn")
    case.quarantined = {first: type("Word", (), {"status": "wrong_result", "note": ""})}
    other = case.heuristic()
    assert other != first
    assert op.implementation(other.implementation).refusal(about, here, other.config) is None


def _like(**changes):
    """A device of this platform and product with more cores, as it may be in a fleet."""
    import dataclasses

    here = current_device()
    return dataclasses.replace(here, **{"cores": here.cores + 1, **changes})


def test_a_device_of_the_same_class_stands_in_and_says_so(own_cache, caplog):
    one = record(problem(seq=SEQ, dim=DIM, heads=HEADS), device=_like())
    publish(own_cache, [one])
    with caplog.at_level(logging.WARNING, "shapetune"):
        decision = _explain()
    assert (decision.tier, decision.candidate) == ("other-device", one.chosen)
    assert decision.record_ids == (one.id,)
    assert "using a record of" in caplog.text
    assert decision.speedup is None


def test_own_records_come_before_those_of_other_devices(own_cache):
    publish(own_cache, [record(problem(seq=SEQ, dim=DIM, heads=HEADS), device=_like(), ratio=9.0)])
    _tuned(own_cache, seq=SEQ + 100)
    assert _explain().tier == "nearest"


def test_what_of_another_device_does_not_fit_here_is_passed_over(own_cache):
    odd = Candidate("blockwise", {"block_q": 5, "block_z": 7})
    cards = Candidate("pallas_mha", {})
    for chosen in (odd, cards):
        publish(
            own_cache,
            [record(problem(seq=SEQ, dim=DIM, heads=HEADS), device=_like(), chosen=chosen)],
        )
    decision = _explain()
    assert decision.tier == "heuristic"
    assert sum("passed over" in step for step in decision.steps) == 2


def test_only_devices_of_the_same_class_count():
    from shapetune.cache.choice import same_class
    from shapetune.cache.key import Device

    here = Device("cuda", "NVIDIA A", "8.6", 82)
    twin, smaller = Device("cuda", "NVIDIA A", "8.6", 80), Device("cuda", "NVIDIA B", "8.6", 60)
    others = [
        here, Device("cuda", "NVIDIA C", "9.0", 82), Device("cuda", "NVIDIA D", "8.6", 16),
        Device("rocm", "NVIDIA A", "8.6", 82), Device("cpu", "NVIDIA A", "8.6", 82),
    ]  # fmt: skip
    assert same_class([smaller, *others, twin], here) == [twin, smaller]
    assert same_class([Device("cpu", "X", "", 8)], Device("cpu", "Y", "", 8)) == []


def test_places_are_one_set_and_the_first_is_written(tmp_path, monkeypatch):
    site = tmp_path / "site"
    one = record(problem(seq=SEQ, dim=DIM, heads=HEADS))
    publish(site, [one])
    monkeypatch.setenv("SHAPETUNE_SITE_CACHE", str(site))
    shapetune.reload()
    assert _explain().record_ids == (one.id,)
