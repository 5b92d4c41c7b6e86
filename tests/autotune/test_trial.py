import jax
import pytest

from shapetune.autotune import plausible
from shapetune.autotune.measure import Effort
from shapetune.autotune.outcome import best_of
from shapetune.autotune.targets import target
from shapetune.autotune.trial import Bench
from shapetune.cache import Candidate, Trial, Verification
from shapetune.kernels import current_device, get_op

from ..samples import problem
from . import faulty

QUICK = Effort(seconds=0.02, least=3, most=4)


def bench(**fields):
    about = problem(**{"seq": 65, "dim": 32, "heads": 2, **fields})
    return Bench(get_op("attention"), about, current_device(), effort=QUICK)


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_a_good_candidate_is_ok_and_timed(mode):
    trial = bench(mode=mode).trial(Candidate("xla"))
    assert trial.status == "ok", trial.note
    assert 0 < trial.q1_ms <= trial.median_ms <= trial.q3_ms
    assert trial.compile_s > 0
    assert 0 < trial.rel_err < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_cancels_may_carry_the_rounding_of_its_terms(causal, seed):
    about = problem(seq=128, dim=16, heads=8, causal=causal, mode="fwd_bwd")
    one = Bench(get_op("attention"), about, current_device(), seed, QUICK)
    config = get_op("attention").implementation("blockwise").default_config(about, one.device)
    found = one.verify_hard(Candidate("blockwise", config))
    assert isinstance(found, Verification), found.note
    # Even so a tenth of a per mille off would not pass.
    assert found.tolerance < 1e-4


# One of those left out is right, if slow; two are wrong only on hard inputs or when run again.
@pytest.mark.parametrize(
    "name", [n for n in faulty.KINDS if n not in ("overflows", "changes_its_mind", "dawdles")]
)
def test_a_faulty_candidate_has_its_typed_outcome(name):
    with faulty.registered(name):
        trial = bench(mode="fwd_bwd").trial(Candidate(name))
    assert trial.status == faulty.KINDS[name][1]
    assert trial.note
    assert trial.median_ms is None


def test_a_config_outside_the_space_is_not_run():
    trial = bench().trial(Candidate("blockwise", {"block_q": 3}))
    assert trial.status == "compile_error"
    assert "block_q" in trial.note


def test_hard_inputs_catch_what_tame_ones_hide():
    about = bench(dtype="bfloat16", seq=257)
    with faulty.registered("overflows"):
        assert about.trial(Candidate("overflows")).status == "ok"
        verdict = about.verify_hard(Candidate("overflows"))
    assert isinstance(verdict, Trial)
    assert verdict.status == "wrong_result"
    assert "large_logits" in verdict.note


def test_a_good_candidate_passes_the_hard_inputs():
    verdict = bench().verify_hard(Candidate("xla"))
    assert isinstance(verdict, Verification)
    assert verdict.rel_err <= verdict.tolerance
    assert set(verdict.inputs) == {"normal", *get_op("attention").hard_inputs}


def test_running_out_of_memory_is_told_from_other_failures(monkeypatch):
    about = bench()

    def exhausted(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes")

    monkeypatch.setattr(about, "_compile", exhausted)
    assert about.trial(Candidate("xla")).status == "out_of_memory"


def test_a_time_below_what_the_device_allows_is_not_believed(monkeypatch):
    asked = []
    monkeypatch.setattr(plausible, "measure_again", asked.append)
    monkeypatch.setattr(plausible, "floor_ms", lambda op, problem, device: 1e6)
    trial = bench().trial(Candidate("xla"))
    assert trial.status == "implausible"
    assert "1e+06 ms" in trial.note
    assert asked == ["float32"]


def test_the_bound_of_the_device_is_below_what_is_measured():
    about = bench(seq=257)
    assert plausible.floor_ms(about.op, about.problem, about.device) > 0
    assert (
        plausible.floor_ms(about.op, about.problem, about.device)
        < about.trial(Candidate("xla")).median_ms
    )


def test_the_bound_of_a_known_card_comes_from_its_figures():
    card = target("h100")
    about = problem(seq=4096, dim=128, dtype="bfloat16", batch=4, heads=16)
    op = get_op("attention")
    floor = plausible.floor_ms(op, about, card.device)
    # The makers' dense rate for bfloat16 is 989 Tflop/s; nothing reaches it.
    assert 0 < floor < op.flops(about) / 989e12 * 1e3


def test_what_needs_too_much_memory_is_not_run_but_for_the_heuristic(monkeypatch):
    about = problem(seq=257, dim=32, heads=2)
    op, device = get_op("attention"), current_device()
    limited = Bench(op, about, device, effort=QUICK, max_temp_mb=0.01)
    default = op.implementation("blockwise").default_config(about, device)
    trial = limited.trial(Candidate("blockwise", default))
    assert (trial.status, trial.median_ms) == ("over_limit", None)
    assert trial.temp_mb > 0.01
    assert "allowed 0.01" in trial.note
    assert limited.trial(op.heuristic(about, device)).status == "ok"


def test_a_candidate_whose_two_runs_differ_is_nondeterministic():
    with faulty.registered("changes_its_mind"):
        trial = bench().trial(Candidate("changes_its_mind"))
    assert trial.status == "nondeterministic"
    assert "two runs" in trial.note


def test_the_time_of_a_trial_is_told_by_phase():
    about = bench()
    entered = []
    about._entered = entered.append
    trial = about.trial(Candidate("xla"))
    assert list(dict.fromkeys(entered)) == ["prepare", "compile", "verify", "screen", "time"]
    for seconds in (trial.compile_s, trial.verify_s, trial.screen_s, trial.time_s):
        assert seconds > 0
    assert trial.version == get_op("attention").implementation("xla").version


def test_the_best_is_the_fastest_that_passed():
    a, b = Candidate("a"), Candidate("b")
    trials = [Trial(a, "ok", 2.0), Trial(b, "wrong_result", 1.0), Trial(b, "ok", 3.0)]
    assert best_of(trials) == trials[0]
    assert best_of(trials[1:2]) is None
