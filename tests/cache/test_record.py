import dataclasses
import math

import msgpack
import pytest

from shapetune.cache import Candidate
from shapetune.cache.errors import RecordError
from shapetune.cache.record import read_record, record_id

from ..samples import problem, record


def test_a_record_survives_its_bytes():
    one = record()
    assert read_record(one.to_bytes()) == one
    assert one.id == record_id(one.to_bytes())


def test_the_order_of_a_config_does_not_change_the_id():
    a = record(chosen=Candidate("blockwise", {"block_q": 1, "block_k": 2}))
    b = record(chosen=Candidate("blockwise", {"block_k": 2, "block_q": 1}))
    assert a.id == b.id


def _repacked(change):
    """The bytes of a record whose body was changed."""
    parts = msgpack.unpackb(record().to_bytes())
    body = msgpack.unpackb(parts[-1])
    change(body)
    parts[-1] = msgpack.packb(body)
    return msgpack.packb(parts)


CHANGES = {
    "nan ratio": lambda b: b["comparison"].update(ratio=math.nan),
    "negative time": lambda b: b["comparison"].update(chosen_ms=-1.0),
    "infinite time": lambda b: b["comparison"].update(chosen_ms=math.inf),
    "interval beside its ratio": lambda b: b["comparison"].update(low=9.0),
    "zero ratio": lambda b: b["comparison"].update(ratio=0.0, low=0.0),
    "unknown field": lambda b: b["comparison"].update(more=1),
    "missing field": lambda b: b["provenance"].pop("jax"),
    "wrong type": lambda b: b["provenance"].update(jax=3),
    "bool for a number": lambda b: b["comparison"].update(pairs=True),
    "huge config": lambda b: b["chosen"].update(config={str(i): i for i in range(100)}),
    "float in a config": lambda b: b["chosen"]["config"].update(block_q=1.5),
    "list in a config": lambda b: b["chosen"]["config"].update(block_q=[1]),
    "long name": lambda b: b["chosen"].update(implementation="x" * 1000),
    "negative size": lambda b: b["problem"].update(seq=-5),
    "another problem than the head's": lambda b: b["problem"].update(seq=2048),
    "another device than the head's": lambda b: b["device"].update(name="other"),
    "trials of something else": lambda b: b.update(trials=b"\x93\x01\x02\x03"),
    "trials with a status unknown": lambda b: b.update(
        trials=msgpack.packb(
            [[{"implementation": "xla", "config": {}}, "great", 1.0, 1.0, 1.0, 1, 1, 0.0, 0.0, None, False, ""]]
        )
    ),
    "no device": lambda b: b.pop("device"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_body_that_is_not_right_is_refused(name):
    with pytest.raises(RecordError):
        read_record(_repacked(CHANGES[name]))


def test_an_unchanged_body_is_accepted():
    assert read_record(_repacked(lambda body: None)) == record()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([99, "tuning", "", "", "", b""]),
        msgpack.packb([1, "other", "", "", "", b""]),
        msgpack.packb([1, "tuning", 1, 2, 3, b""]),
        msgpack.packb([1, "tuning", "", "", "", b"\xff"]),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([1, "tuning", "", "", "", msgpack.ExtType(5, b"x")]),
    ],
)
def test_bytes_of_something_else_are_refused(payload):
    with pytest.raises(RecordError):
        read_record(payload)


def test_an_oversized_payload_is_refused_before_it_is_unpacked():
    with pytest.raises(RecordError, match="more than a record may have"):
        read_record(b"\x00" * (5 * 2**20))


def test_heuristic_is_best_says_so():
    best = record(chosen=Candidate("xla", {}), ratio=1.0)
    assert best.heuristic_is_best
    assert not record().heuristic_is_best
    assert dataclasses.replace(best, problem=problem(seq=7)).heuristic_is_best
