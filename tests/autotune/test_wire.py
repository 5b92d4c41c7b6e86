import os

import pytest

from shapetune.autotune import wire
from shapetune.cache import Candidate, Trial, Verification


def test_messages_arrive_whole_and_in_order():
    ours, theirs = os.pipe()
    try:
        wire.send(theirs, "trial", {"implementation": "xla"}, None)
        wire.send(theirs, "close")
        inbox = wire.Inbox()
        assert wire.receive(ours, inbox) == ["trial", {"implementation": "xla"}, None]
        assert wire.receive(ours, inbox) == ["close"]
        os.close(theirs)
        theirs = -1
        assert wire.receive(ours, inbox) is None
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def test_a_message_in_pieces_is_put_together():
    ours, theirs = os.pipe()
    wire.send(theirs, "times", [1.5, 2.5])
    data = os.read(ours, 1000)
    inbox = wire.Inbox()
    for byte in data[:-1]:
        inbox.feed(bytes([byte]))
        assert inbox.take() is None
    inbox.feed(data[-1:])
    assert inbox.take() == ["times", [1.5, 2.5]]
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("body", [b"\xc1", b"\x93", b"\x81\x01\x02", b"\x90", b"\x91\x01"])
def test_what_is_not_a_message_is_refused(body):
    inbox = wire.Inbox()
    inbox.feed(len(body).to_bytes(4, "little") + body)
    with pytest.raises(wire.WireError):
        inbox.take()


def test_a_message_that_claims_too_much_is_refused():
    inbox = wire.Inbox()
    inbox.feed(b"\xff\xff\xff\xff")
    with pytest.raises(wire.WireError, match="4294967295"):
        inbox.take()


@pytest.mark.parametrize(
    "outcome",
    [
        Trial(Candidate("a", {"b": 1}), "ok", 1.0, 0.9, 1.1, 5, 2, rel_err=1e-7, version=3),
        Trial(Candidate("a"), "crashed", note="gone"),
        Verification(1e-7, 1e-6, ("normal", "heavy_tail")),
    ],
)
def test_outcomes_travel_unchanged(outcome):
    assert wire.outcome_from_wire(wire.outcome_to_wire(outcome)) == outcome


@pytest.mark.parametrize("value", [None, 3, ["trial", []], ["trial", [1]], ["code", "x"], ["verification", [1]]])  # fmt: skip
def test_what_is_no_outcome_is_refused(value):
    with pytest.raises(wire.WireError):
        wire.outcome_from_wire(value)
