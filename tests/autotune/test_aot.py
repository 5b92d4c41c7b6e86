"""Compiling for GPUs that are not there: outcomes, and memory against a real card's."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from shapetune.autotune import aot, check
from shapetune.autotune.targets import target
from shapetune.cache import Candidate, Problem
from shapetune.cache.errors import ShapetuneError, TargetError, UnknownNameError, UnsupportedError
from shapetune.cli import main
from shapetune.kernels import get_op

FILE = Path(__file__).parent.parent / "data" / "rtx3090_attention.json"
CARD = target("rtx3090")
OURS = {"probjax_mha": "pallas_mha", "probjax_flex": "pallas_flex", "jax_xla": "xla"}


def _problem(**fields):
    base = {"seq": 1024, "dim": 64, "dtype": "bfloat16", "batch": 4, "causal": True}
    return Problem.make("attention", **{**base, **fields})


def _default(problem, name, on=CARD):
    one = get_op("attention").implementation(name)
    return Candidate(name, one.default_config(problem, on.device))


def test_outcomes_are_typed_and_tell_the_memory(compiler):
    about = _problem()
    good = _default(about, "pallas_mha")
    tasks = [
        (CARD, about, good),
        (target("h100"), about, _default(about, "pallas_mha", target("h100"))),
        (CARD, about, Candidate("cudnn")),
        (CARD, about, Candidate("pallas_mha", {**good.config, "block_q": 7})),
    ]
    heard = []
    found = aot.compile_all(tasks, 2, heard.append)
    assert [one.status for one in found] == ["ok", "ok", "unsupported", "compile_error"]
    for one in found[:2]:
        assert one.temp_mb == 0
        assert 0 < one.shared_bytes <= 232448
    assert all(one.note for one in found[2:])
    assert {id(one) for one in heard} == {id(one) for one in found}
    assert json.loads(json.dumps(found[0].to_map()))["shared_bytes"] == found[0].shared_bytes


def test_too_much_shared_memory_is_out_of_memory_with_the_figure(compiler, tmp_path):
    about = _problem(dim=128)
    small = tmp_path / "small.toml"
    table = (
        (Path(aot.__file__).parent / "targets.toml").read_text().split("[a100]")[1].split("[")[0]
    )
    table = table.replace("166912", "20000")
    small.write_text(f"[small]{table}")
    card = target("small", small)
    # The space offers nothing that large there; compiling does not ask it.
    roomy = target("a100").device
    config = get_op("attention").implementation("pallas_mha").default_config(about, roomy)
    space = get_op("attention").implementation("pallas_mha").space(about, card.device)
    assert space.refusal(config) is not None
    (found,) = aot.compile_all([(card, about, Candidate("pallas_mha", config))], 1)
    assert found.status == "out_of_memory"
    assert found.shared_bytes > 20000


def _rows():
    """A dozen rows of the file: aligned and ragged, both modes, all three kernels."""
    wanted = [
        ("jax_xla", "fwd", "bfloat16", 64, 1024, False), ("jax_xla", "fwd", "float32", 64, 600, True),
        ("jax_xla", "fwd_bwd", "bfloat16", 128, 512, True), ("jax_xla", "fwd", "bfloat16", 64, 3000, True),
        ("probjax_mha", "fwd", "bfloat16", 64, 1024, True), ("probjax_mha", "fwd", "float32", 64, 1500, False),
        ("probjax_mha", "fwd_bwd", "bfloat16", 64, 600, True), ("probjax_mha", "fwd_bwd", "float32", 64, 4096, False),
        ("probjax_flex", "fwd", "bfloat16", 128, 2048, True), ("probjax_flex", "fwd", "float32", 64, 600, False),
        ("probjax_flex", "fwd_bwd", "bfloat16", 64, 1500, True), ("probjax_flex", "fwd_bwd", "bfloat16", 128, 1024, False),
    ]  # fmt: skip
    rows = json.loads(FILE.read_text())["results"]
    for impl, mode, dtype, dim, seq, causal in wanted:
        (row,) = [
            r for r in rows
            if (r["impl"], r["mode"], r["dtype"], r["head_dim"], r["seq"], r["causal"])
            == (impl, mode, dtype, dim, seq, causal)
        ]  # fmt: skip
        yield row


def test_temporary_memory_is_that_of_the_real_card_or_less(compiler):
    rows = list(_rows())
    tasks = []
    for row in rows:
        about = _problem(
            seq=row["seq"], dim=row["head_dim"], dtype=row["dtype"], causal=row["causal"],
            mode=row["mode"],
        )  # fmt: skip
        tasks.append((CARD, about, _default(about, OURS[row["impl"]])))
    for row, one in zip(rows, aot.compile_all(tasks, 2), strict=True):
        told = (row["impl"], row["mode"], row["dtype"], row["head_dim"], row["seq"], one)
        assert one.status == "ok", told
        if row["impl"] == "jax_xla" and row["mode"] == "fwd":
            assert one.temp_mb == pytest.approx(row["xla_temp_mb"], rel=1e-3), told
        elif row["mode"] == "fwd":
            assert one.temp_mb == 0, told
        else:
            assert one.temp_mb <= row["xla_temp_mb"] * 1.001, told


def test_a_guard_stops_what_does_not_compile_and_lets_the_rest_pass(compiler):
    about = _problem()
    good = _default(about, "pallas_mha")
    guard = aot.Guard(CARD)
    try:
        assert guard(about, good) is None
        failed = guard(about, Candidate("pallas_mha", {**good.config, "block_q": 7}))
    finally:
        guard.close()
    assert failed.status == "compile_error"
    assert "rtx3090" in failed.note


def test_a_plan_spans_targets_and_can_be_sampled():
    about = [_problem(), _problem(seq=1500)]
    tasks = check.plan(about, ["rtx3090", "h100"], sample=7, seed=1)
    assert len(tasks) == 14
    assert tasks == check.plan(about, ["rtx3090", "h100"], sample=7, seed=1)
    with pytest.raises(TargetError, match="b200"):
        check.plan(about, ["b200"])
    with pytest.raises(UnknownNameError, match="zzz"):
        check.plan(about, ["a100"], only=["zzz"])
    with pytest.raises(UnsupportedError, match="mosaic"):
        check.plan(about, ["a100"], only=["mosaic"])
    with pytest.raises(ShapetuneError, match="sample"):
        check.plan(about, ["a100"], sample=0)


def test_failures_are_grouped_by_reason():
    candidates = [Candidate("pallas_mha", {"block_q": n}) for n in (1, 2, 3)]
    found = [
        aot.Compilation("a100", _problem(), one, "compile_error", note=f"no {n} blocks")
        for n, one in enumerate(candidates)
    ]
    (line,) = check.failures(found)
    assert "3 × compile_error: no 0 blocks" in line


def test_the_command_prints_a_table(compiler):
    args = [
        "check",
        "attention",
        "--seq",
        "256",
        "--dim",
        "64",
        "--dtype",
        "bfloat16",
        "--target",
        "a100",
    ]
    done = CliRunner().invoke(main, [*args, "--implementation", "pallas_mha", "--sample", "2"])
    assert done.exit_code == 0, done.output
    assert "2 of 2" in done.stdout


@pytest.mark.parametrize("package", [None, types.SimpleNamespace(__path__=[])])
def test_without_the_compiler_the_remedy_is_named(monkeypatch, package):
    """Neither where jax has no plugins at all, nor where it has others."""
    monkeypatch.delitem(sys.modules, "jax_plugins.xla_cuda13", raising=False)
    monkeypatch.setitem(sys.modules, "jax_plugins", package)
    about = _problem()
    with pytest.raises(TargetError, match=r"shapetune\[aot\]"):
        aot.compile_all([(CARD, about, _default(about, "blockwise"))], 1)


def test_a_compiler_that_dies_costs_the_one_candidate(tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(
        "import os\n"
        "from shapetune.autotune.aot import Compilation\n"
        "def work(target, problem, candidate):\n"
        "    if problem.seq == 384:\n"
        "        os._exit(1)\n"
        "    return Compilation(target.key, problem, candidate, 'ok')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(aot, "require_compiler", lambda: None)
    work = importlib.import_module("mortal").work
    about = [_problem(seq=128 * n) for n in range(1, 5)]
    found = aot.compile_all([(CARD, one, Candidate("xla")) for one in about], 1, work=work)
    assert [one.status for one in found] == ["ok", "ok", "crashed", "ok"]
    assert [one.problem for one in found] == about


@pytest.mark.parametrize(
    ("impl", "mode", "dtype", "dim", "seq"),
    [
        ("chunked", "fwd", "float32", 64, 8192),
        ("chunked", "fwd_bwd", "bfloat16", 32, 2048),
        ("pallas", "fwd", "bfloat16", 32, 512),
        ("pallas", "fwd_bwd", "bfloat16", 32, 512),
    ],
)
def test_the_recurrence_needs_no_more_memory_than_the_card_showed(
    compiler, impl, mode, dtype, dim, seq
):
    (row,) = [
        r for r in json.loads(FILE.with_name("rtx3090_linear_attention.json").read_text())["results"]
        if (r["suite"], r["impl"], r["mode"], r.get("dtype"), r["dim"], r["seq"])
        == ("kernel", impl, mode, dtype, dim, seq)
    ]  # fmt: skip
    about = Problem.make(
        "linear_attention", seq=seq, dim=dim, dtype=dtype, causal=True, window=64,
        batch=row["batch"], heads=row["heads"], mode=mode, features=("state",),
    )  # fmt: skip
    one = get_op("linear_attention").implementation(impl)
    candidate = Candidate(impl, one.default_config(about, CARD.device))
    (found,) = aot.compile_all([(CARD, about, candidate)], 1)
    assert found.status == "ok", found
    assert found.temp_mb <= row["xla_temp_mb"] * 1.001, found
