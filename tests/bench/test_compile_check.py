"""The compile check: what it plans, what it asks of an outcome, and that it goes on where it stopped."""

import collections
import json

import pytest

from shapetune.autotune import aot
from shapetune.autotune.aot import Compilation
from shapetune.bench import compile_check, compile_plan
from shapetune.kernels import get_op


def test_a_draw_is_of_the_space_and_the_same_each_time():
    checks = compile_plan.plan("attention-candidates")
    assert collections.Counter(c.target.key for c in checks) == dict.fromkeys(
        compile_plan.TARGETS, compile_plan.DRAWN
    )
    assert [c.key for c in checks] == [c.key for c in compile_plan.plan("attention-candidates")]
    for check in checks[::10]:
        one = get_op("attention").implementation(check.candidate.implementation)
        assert one.refusal(check.problem, check.target.device, check.candidate.config) is None
    for name in ("dim", "dtype", "mode", "causal"):
        assert len({getattr(c.problem, name) for c in checks}) > 1


@pytest.mark.parametrize("op", ["attention", "linear"])
def test_what_is_refused_lacks_shared_memory_and_nothing_else(op):
    checks = compile_plan.plan(f"{op}-refused")
    assert len(checks) == 3 * compile_plan.REFUSED
    for check in checks:
        space = get_op(check.problem.op).implementation(check.candidate.implementation).space
        device = check.target.device
        assert space(check.problem, device).refusal(check.candidate.config) is not None
        roomy = compile_plan.dataclasses.replace(device, shared_memory=2**30)
        assert space(check.problem, roomy).refusal(check.candidate.config) is None


def test_every_row_of_the_card_with_a_figure_is_planned():
    checks = compile_plan.plan("attention-memory")
    assert collections.Counter(c.candidate.implementation for c in checks) == {
        "pallas_mha": 108, "pallas_flex": 108, "xla": 102,
    }  # fmt: skip
    assert all(check.file["temp_mb"] >= 0 for check in checks)


@pytest.mark.parametrize(
    ("part", "row", "right"),
    [
        ("attention-refused", {"status": "out_of_memory"}, True),
        ("attention-refused", {"status": "ok"}, False),
        ("attention-candidates", {"status": "compile_error"}, False),
        ("attention-memory", {"temp_mb": 8.0, "at_most": {"temp_mb": 8.0}}, True),
        ("attention-memory", {"temp_mb": 8.1, "at_most": {"temp_mb": 8.0}}, False),
        ("attention-memory", {"temp_mb": 1.0, "problem": "fwd", "at_most": {"temp_mb": 8.0}}, False),
        ("attention-memory", {"temp_mb": 7.0, "candidate": "xla", "at_most": {"temp_mb": 8.0}}, False),
        ("linear-peak", {"temp_mb": 1.0, "all_mb": 9.0, "at_most": {"all_mb": 8.0}}, False),
    ],
)  # fmt: skip
def test_an_outcome_is_held_against_what_its_part_asks(part, row, right):
    base = {"status": "ok", "candidate": "pallas_mha()", "problem": "attention fwd_bwd"}
    row = base | row | {"problem": f"attention {row.get('problem', 'fwd_bwd')}"}
    assert compile_check.holds(part, row) is right


def test_a_run_goes_on_where_it_stopped_and_drops_what_is_no_longer_asked(tmp_path, monkeypatch):
    checks = compile_plan.plan("attention-memory")[:6]
    output, compiled = tmp_path / "out.json", []

    def compile_all(tasks, jobs, heard, work):
        for target, problem, candidate in tasks:
            compiled.append(problem)
            heard(Compilation(target.key, problem, candidate, "ok", 0.1, 1024, 0.0, 1.0, 1.0))

    monkeypatch.setattr(aot, "compile_all", compile_all)
    assert compile_check.run(output, checks, seconds=-1.0, jobs=1) is False
    assert len(compiled) == 1
    assert compile_check.run(output, checks, seconds=60.0, jobs=1) is True
    assert compiled == [check.problem for check in checks]
    assert compile_check.run(output, checks[:4], seconds=60.0, jobs=1) is True
    found = json.loads(output.read_text())
    assert len(compiled) == 6
    assert len(found["parts"]["attention-memory"]) == 4
    assert found["summary"]["attention-memory"]["of"] == 4
