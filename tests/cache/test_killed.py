"""Processes that are killed at random moments: nothing that was published is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shapetune.cache import load, merge, publish

from .light import record
from .serving import served

HERE = Path(__file__).parent
KILLS = 25


def _killed(role, folder, other, delay):
    """Runs a worker, kills it so long after it is ready, and gives what it reported."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), role, str(folder), str(other)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    time.sleep(delay)
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    reported = child.stdout.read().split("\n")
    child.wait()
    child.stdout.close()
    return set(reported[:-1])  # what follows the last line break is a line cut off


def _delays(seed):
    rng = random.Random(seed)
    return [rng.random() * 0.05 for _ in range(KILLS)]


def test_a_killed_writer_loses_nothing_that_it_reported(tmp_path):
    reported = set()
    for delay in _delays(1):
        reported |= _killed("write", tmp_path / "c", "", delay)
    found = load([tmp_path / "c"])
    assert reported
    assert reported <= found.ids
    assert not found.damage


def test_a_killed_compaction_loses_nothing(tmp_path):
    folder = tmp_path / "c"
    published = [record(n) for n in range(1, 60)]
    for one in published:
        publish(folder, [one])
    for delay in _delays(2):
        _killed("compact", folder, "", delay)
        found = load([folder])
        assert {one.id for one in published} <= found.ids
        assert not found.damage
    merge.compact(folder)
    assert len(load([folder])) >= len(published)


def _pair(tmp_path):
    source = tmp_path / "source"
    for n in range(1, 41):
        publish(source, [record(n)])
    return source, tmp_path / "target", load([source]).ids


def test_a_killed_push_leaves_whole_segments_and_is_taken_up_again(tmp_path):
    from shapetune.cache.remote import push

    source, target, ids = _pair(tmp_path)
    for delay in _delays(3):
        _killed("push", source, target, delay)
        there = load([target])
        assert there.ids <= ids
        assert not there.damage
        assert load([source]).ids == ids
    push(source, target)
    assert load([target]).ids == ids


def test_a_killed_pull_leaves_whole_segments_and_is_taken_up_again(tmp_path):
    pytest.importorskip("aiohttp")
    from shapetune.cache.places import as_place
    from shapetune.cache.remote import pull

    source, target, ids = _pair(tmp_path)
    own = record(500)
    publish(target / "own", [own])
    with served(source) as url:
        for delay in _delays(4):
            _killed("pull", target, url, delay * 4)
            here = load([target])
            assert here.ids <= ids
            assert not here.damage
            assert load([target / "own"]).ids == {own.id}
        pull(as_place(url), target)
    assert load([target]).ids == ids
