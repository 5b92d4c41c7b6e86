"""Calls without a record of their own are counted, written on request, and ranked by their cost."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import shapetune
from shapetune.cache import load, miss, publish
from shapetune.kernels import current_device, default, get_op, misses
from shapetune.kernels.misses import costliest

from ..samples import problem, record


@pytest.fixture(autouse=True)
def own_counts(monkeypatch):
    monkeypatch.setattr(misses, "_kept", [])
    shapetune.reload()


def _arrays(seq=16):
    return [jnp.ones((1, seq, 2, 8))] * 3


def _taken():
    return {(one.problem.seq, one.problem.mode): one.calls for one in default.state().misses.take()}


def test_eager_calls_are_counted_each():
    for _ in range(5):
        shapetune.attention(*_arrays())
    shapetune.attention(*_arrays(24))
    assert _taken() == {(16, "fwd"): 5, (24, "fwd"): 1}
    assert _taken() == {}


def test_a_compiled_program_counts_once_and_a_gradient_as_training():
    call = jax.jit(lambda x: shapetune.attention(x, x, x))
    for _ in range(3):
        call(_arrays()[0])
    assert _taken() == {(16, "fwd"): 1}
    train = jax.jit(jax.grad(lambda x: shapetune.attention(x, x, x).sum()))
    train(_arrays(24)[0])
    assert _taken() == {(24, "fwd_bwd"): 1}


def test_a_tuned_problem_and_a_disabled_dispatcher_count_nothing(own_cache, monkeypatch):
    for mode in ("fwd", "fwd_bwd"):
        publish(own_cache, [record(problem(seq=16, dim=8, heads=2, mode=mode))])
    shapetune.reload()
    shapetune.attention(*_arrays())
    assert _taken() == {}
    monkeypatch.setenv("SHAPETUNE_DISABLE", "1")
    shapetune.reload()
    shapetune.attention(*_arrays(24))
    assert _taken() == {}


def test_the_number_of_problems_is_bounded(monkeypatch):
    monkeypatch.setattr(misses, "MAX_PROBLEMS", 2)
    for seq in (16, 17, 18, 16):
        shapetune.attention(*_arrays(seq))
    assert _taken() == {(16, "fwd"): 2}  # the two of them are fwd and fwd_bwd of the first


def test_what_is_written_is_no_record_and_is_read_on_request(own_cache):
    shapetune.attention(*_arrays())
    misses.write_all()
    assert len(load([own_cache])) == 0
    found, damage = miss.read([own_cache], current_device())
    assert [(one.problem.seq, one.calls, one.tier) for one in found] == [(16, 1, "heuristic")]
    assert not damage
    assert miss.forget(own_cache, current_device()) == 1


def test_a_process_leaves_its_misses_at_exit(own_cache):
    script = (
        "import shapetune, jax.numpy as jnp\n"
        "x = jnp.ones((1, 16, 2, 8))\n"
        "[shapetune.attention(x, x, x) for _ in range(4)]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    found, _ = miss.read([own_cache], current_device())
    assert [(one.problem.seq, one.calls) for one in found] == [(16, 4)]


def _miss(seq, calls, process="a", **fields):
    about = problem(seq=seq, **fields)
    return miss.Miss(about, current_device(), calls, "heuristic", process, 1.0)


def test_many_files_are_folded_and_no_count_is_lost(own_cache):
    for number in range(70):
        miss.write(own_cache, [_miss(64, 1, process=str(number))])
    found, _ = miss.read([own_cache], current_device())
    assert sum(one.calls for one in found) == 70
    assert len(list(own_cache.rglob("*.msgpack"))) < 10


def test_the_costliest_come_first_and_the_tuned_are_left_out(own_cache):
    publish(
        own_cache,
        [record(problem(seq=1024), ratio=2.0), record(problem(seq=77, dim=32), ratio=1.0)],
    )
    records = load([own_cache], current_device())
    found = [
        _miss(1024, 10**6),
        _miss(2048, 10), _miss(2048, 10, process="b"), _miss(2048, 10, process="b"),
        _miss(512, 10),
        _miss(80, 10**6, dim=32),
    ]  # fmt: skip
    ranked = costliest(found, records, current_device())
    assert [(one.problem.seq, one.calls, one.processes) for one in ranked] == [
        (2048, 20, 2), (512, 10, 1), (80, 10**6, 1),
    ]  # fmt: skip
    first, second, last = ranked
    flops = get_op("attention").flops
    assert first.call_ms / second.call_ms == pytest.approx(
        flops(first.problem) / flops(second.problem)
    )
    assert last.gain_ms == 0.0  # its kind gains nothing by tuning
    json.dumps([one.to_map() for one in ranked])
