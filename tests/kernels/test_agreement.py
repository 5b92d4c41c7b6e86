"""Processes of one job compare what they would run, and stop with the difference."""

import os
import socket
import subprocess
import sys

import pytest

import shapetune
from shapetune.cache import Candidate, publish
from shapetune.kernels import agreement, current_device, get_op

from ..samples import problem, record

BLOCKWISE = get_op("attention").implementation("blockwise")
#: Not what the heuristic is for the problem that is asked for.
OTHER = Candidate(
    "blockwise", {**BLOCKWISE.default_config(problem(), current_device()), "block_k": 256}
)

JOB = """
import os, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import shapetune
from shapetune.cache.errors import DivergenceError
asked = [shapetune.Problem.make("attention", seq=1024, dim=64)]
for place in sys.argv[3:]:
    shapetune.load(place)
    try:
        shapetune.require_agreement(asked)
        print("agreed", flush=True)
    except DivergenceError as error:
        print(" ".join(str(error).split()), flush=True)
"""


def test_two_processes_agree_or_are_told_what_differs(tmp_path):
    same, other = tmp_path / "same", tmp_path / "other"
    one = record(problem(), chosen=OTHER)
    publish(same, [one])
    (tmp_path / "none").mkdir()
    publish(other, [one, record(problem(seq=7777))])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    places = [(same, same, same), (same, other, tmp_path / "none")]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, address, str(index), *map(str, places[index])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]  # fmt: skip
    told = [job.communicate(timeout=120) for job in jobs]
    assert all(job.returncode == 0 for job in jobs), told[0][1][-2000:]
    for out, _ in told:
        first, second, third = out.splitlines()[-3:]
        assert (first, second) == ("agreed", "agreed")
        assert "process 1 would run other kernels than process 0" in third
        assert "process 0: attention" in third
        assert "block_k=256" in third


def test_digests_tell_sets_and_decisions_apart(own_cache):
    asked = [problem()]
    assert shapetune.explain("attention", seq=1024, dim=64).candidate != OTHER
    before = shapetune.digest(asked)
    publish(own_cache, [record(problem(seq=7777))])
    shapetune.reload()
    more = shapetune.digest(asked)
    assert more["records"] != before["records"]
    assert more["decisions"] == before["decisions"]
    publish(own_cache, [record(problem(), chosen=OTHER)])
    shapetune.reload()
    assert shapetune.digest(asked)["decisions"] != before["decisions"]


def test_one_process_always_agrees():
    agreement.require_agreement([problem()])


def test_a_long_difference_is_cut():
    told = [["aa"], ["bb", *(f"problem {n} → xla" for n in range(100))]]
    text = agreement._difference(told)
    assert text.count("\n") == 11
    assert "90 more" in text


@pytest.mark.parametrize("line", ["records aa and bb", "SHAPETUNE_DISABLE=1"])
def test_the_difference_names_the_digests_and_a_remedy(line):
    assert line in agreement._difference([["aa"], ["bb", "x → y"]])
