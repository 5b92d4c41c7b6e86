"""The worker of a benchmark, in this process: which rows it tells of."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shapetune.bench import row as worker
from shapetune.bench import schema, suites
from shapetune.bench.row import JaxRunner, Point, Request, Session
from shapetune.cache import Candidate
from shapetune.cache.errors import UnsupportedError
from shapetune.kernels import current_device, get_op

GRID = {"seq": (100,), "dim": (8,), "dtype": ("float32",), "batch": 1, "heads": 2}


def point(suite, impl, mode="fwd"):
    plan = suites.plan("linear_attention", (suite,), impls=(impl,), grid={**GRID, "mode": (mode,)})
    return Point(Request(rows=plan.rows, config=plan.config, seconds=0.1))


def told(about):
    events = []
    Session(about, events.append).run()
    return [event["row"] for event in events if "row" in event]


@pytest.mark.parametrize(
    "wrong",
    [lambda array: array[:, :-1], lambda array: array[..., :1], lambda array: array * np.inf],
    ids=["short", "narrow", "infinite"],
)
def test_wrong_results_are_an_error_in_a_file_that_can_be_read(monkeypatch, tmp_path, wrong):
    right = JaxRunner.first

    def first(self):
        return {**right(self), "output": wrong(right(self)["output"])}

    monkeypatch.setattr(JaxRunner, "first", first)
    rows = told(point("kernel", "scan"))
    assert ["output" in row["error"] for row in rows] == [True]
    path = tmp_path / "a.json"
    schema.write(path, schema.BenchFile({}, {}, json.loads(json.dumps(rows))))
    assert schema.read(path).results == rows


@pytest.mark.parametrize(("mode", "arrays"), [("fwd", 4), ("fwd_bwd", 6)])
def test_peak_memory_has_no_array_that_the_program_does_not_take(monkeypatch, mode, arrays):
    about = point("peak", "scan", mode)
    # A device that counts its memory, as this one does not.
    about.device = dataclasses.replace(about.device, platform="cuda")
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**20})
    placed, put = [], jax.device_put

    def count(array):
        placed.append(array.nbytes)
        return put(array)

    monkeypatch.setattr(about.op, "make_inputs", lambda *_: pytest.fail("holds the weights"))
    monkeypatch.setattr(worker.jax, "device_put", count)
    monkeypatch.setattr(worker.jax, "devices", lambda: [device])
    (found,) = told(about)
    assert schema.faults(found) == []
    assert (found["peak_mb"], len(placed)) == (3.0, arrays)
    assert sum(placed) / 2**20 == pytest.approx(found["inputs_mb"])
    assert "since its process began" in found["memory_note"]


def test_a_rival_runs_with_its_own_config_and_without_one_says_why():
    plan = suites.plan(
        "attention", impls=("rival_blockwise", "rival_xla"), grid={**GRID, "seq": (600,)}
    )
    problem = suites.problem_of(plan.rows[0], plan.config)
    op, device = get_op("attention"), current_device()
    space = op.implementation("blockwise").space(problem, device)
    config = next(iter(space))
    assert config != op.implementation("blockwise").default_config(problem, device)
    point = Point(Request(rows=plan.rows, config=plan.config, rivals={"blockwise": config}))
    _, about = point.runner(plan.rows[0])
    assert about["chosen"] == Candidate("blockwise", config).key
    with pytest.raises(UnsupportedError, match=r"timed no xla.*--tune-budget"):
        point.runner(plan.rows[1])
