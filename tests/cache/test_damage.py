"""Damaged and hostile caches: never a crash, a hang or much memory; never used, and nothing else lost."""

import functools
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache import RecordSet, segment
from shapetune.cache.envelope import read_head
from shapetune.kernels import current_device, get_op
from shapetune.kernels.decision import Settings, decide

from ..samples import problem, record
from . import light

HERE = Path(__file__).parent
MUTATIONS = 5_000


def _children(*commands):
    """Runs programs side by side, and gives what they print."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for command in commands
    ]  # fmt: skip
    told = [child.communicate(timeout=300)[0] for child in started]
    assert all(child.returncode == 0 for child in started)
    return told


def test_ten_thousand_mutations_cost_no_crash_no_hang_and_little_memory():
    program = str(HERE / "mutate.py")
    told = _children(*([program, str(MUTATIONS), str(seed)] for seed in (1, 2)))
    figures = [json.loads(one) for one in told]
    assert sum(one["mutations"] for one in figures) == 2 * MUTATIONS
    assert max(one["peak_mb"] for one in figures) < 200
    # Of the processor's time, so that a busy machine does not count.
    assert max(one["slowest_s"] for one in figures) < 5


@functools.cache
def _originals():
    """The program of mutations as a module, the records it damages, and their segment."""
    sys.modules.setdefault("light", light)
    sys.path.insert(0, str(HERE))
    try:
        import mutate
    finally:
        sys.path.remove(str(HERE))
    payloads = tuple(mutate.originals())
    return mutate, payloads, segment.pack_segment(list(payloads))


@settings(max_examples=14_000, deadline=None)
@given(st.randoms(use_true_random=False))
def test_mutations_that_hypothesis_drives_hold_the_same(rng):
    mutate, payloads, packed = _originals()
    mutate.mutate(list(payloads), packed, rng)


def test_bytes_that_are_all_marks_are_given_up_soon_and_without_much_work():
    mark = struct.pack("<4sI16s", b"\xc1rec", 2**20, b"\0" * 16)
    bomb = segment.MAGIC + b"\xff\xff\xff\xff" + (mark * 100 + b"\xc1rec" * 10_000) * 80
    good = segment.pack_segment([record(problem()).to_bytes()])
    frames = list(segment.read_frames(good + bomb))
    assert sum(frame is not None for frame in frames) == 1
    assert len(frames) < 20_000


def _resealed(change):
    """A tuning record with another body, under a right checksum and head."""
    about = problem()
    parts = msgpack.unpackb(record(about).to_bytes())
    body = msgpack.unpackb(parts[-1])
    change(body)
    return msgpack.packb([*parts[:-1], msgpack.packb(body)])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["xla", "blockwise", "cudnn", "pallas_mha", "../../xla", "", "nothing"]),
    st.dictionaries(
        st.sampled_from(["block_q", "block_k", "block_q_bwd", "more"]),
        st.integers(-(2**40), 2**40)
        | st.sampled_from([256, 512, "512", "../x", 512.0, True, None]),
        max_size=4,
    ),
)
def test_no_config_outside_its_space_is_ever_dispatched(name, config):
    bad = _resealed(lambda body: body.update(chosen={"implementation": name, "config": config}))
    one = decide(get_op("attention"), problem(), current_device(), RecordSet([bad]), Settings())
    chosen = get_op("attention").implementation(one.implementation)
    assert chosen.refusal(problem(), current_device(), one.config) is None
    assert chosen.automatic(problem(), current_device())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_decision_rests_on_whole_records_alone(seed):
    rng = random.Random(seed)
    good = [record(problem(seq=512 * n), ratio=1.1 + n / 10) for n in (1, 2, 3)]
    data = bytearray(segment.pack_segment([one.to_bytes() for one in good]))
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    frames = segment.read_frames(bytes(data))
    left = RecordSet([frame[1] for frame in frames if frame is not None])
    for asked in good:
        one = decide(get_op("attention"), asked.problem, current_device(), left, Settings())
        assert set(one.record_ids) <= {record.id for record in good}
        assert (one.tier == "exact") == (asked.id in left.ids)


def test_a_head_that_lies_about_its_body_is_not_used():
    honest = read_head(record(problem(seq=2048)).to_bytes())
    target = read_head(record(problem()).to_bytes())
    liar = target.__class__(
        honest.schema,
        honest.kind,
        honest.device_key,
        target.family,
        target.problem_key,
        honest.body,
    )
    found = RecordSet([liar.seal()])
    assert found.exact(current_device(), problem()) == []
    assert "names another problem" in found.damage[0].reason
