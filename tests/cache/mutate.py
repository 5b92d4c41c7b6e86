"""Damages caches in every way, and checks what a reader then sees; run as a program without jax.

Usage: ``python mutate.py COUNT SEED``; prints JSON: mutations done, seconds of the
slowest, and the peak memory of the process.
"""

import json
import math
import random
import re
import resource
import sys
import time
from pathlib import Path

import msgpack
from light import DEVICE, record

from shapetune.cache import RecordSet, envelope, imported, miss, partial, pin, quarantine, segment
from shapetune.cache.key import Candidate
from shapetune.cache.record import Trial
from shapetune.cache.store import read_bytes

SOURCE = Path("memory")


def originals():
    """The bytes of a cache of every kind of record."""
    records = [record(64 * n, pad=n % 3) for n in range(1, 4)]
    about = records[0].problem
    found = [one.to_bytes() for one in records]
    found.append(pin.Pin(about, DEVICE, records[0].chosen, True, 1, 1.0).to_bytes())
    times = (imported.Time("xla", 1.0, 0.0), imported.Time("blockwise", 2.0, 0.0))
    found.append(imported.Imported(about, DEVICE, times, "f.json", "0.1", 1.0).to_bytes())
    found.append(miss.Miss(about, DEVICE, 3, "heuristic", "ab", 1.0).to_bytes())
    origin = ("0.1", "0.1", "0.1", "00", 1.0)
    found.append(
        quarantine.Quarantine(
            about, DEVICE, records[0].chosen, "crashed", "", 1, *origin
        ).to_bytes()
    )
    trials = (Trial(Candidate("xla", {}), "ok", 1.0, 1.0, 1.0),)
    found.append(partial.Trials(about, DEVICE, trials, *origin).to_bytes())
    return found


# ── Damage to bytes: a checksum finds it, and only what it hits is lost ──────────────────


def flip(data, rng):
    """Some bits change."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(data, rng):
    """The end is lost."""
    return data[: rng.randrange(len(data))]


def splice(data, rng):
    """A stretch is written over another one."""
    size = rng.randrange(1, len(data))
    a, b = rng.randrange(len(data) - size + 1), rng.randrange(len(data) - size + 1)
    return data[:a] + data[b : b + size] + data[a + size :]


def insert(data, rng):
    """Strange bytes come in between: noise, marks, lengths without bounds."""
    at = rng.randrange(len(data))
    noise = rng.choice(
        (rng.randbytes(rng.randrange(1, 200)), b"\xc1rec" * rng.randrange(1, 300),
         b"\xc1rec\xff\xff\xff\xff" + rng.randbytes(16), b"\xdd\xff\xff\xff\xff", b"\x00" * 5000)
    )  # fmt: skip
    return data[:at] + noise + data[at:]


def swap(data, rng):
    """Two halves change places."""
    at = rng.randrange(len(data))
    return data[at:] + data[:at]


BYTES = (flip, truncate, splice, insert, swap)


# ── Damage below the checksum: well framed, and still not to be believed ────────────────

HOSTILE = (
    None, True, False, -1, 0, 2**63, -(2**63), 1.5, math.nan, math.inf, -math.inf, -0.5, 1e300,
    "", "x" * 5000, "../../etc/passwd", "/etc/passwd", "a\0b", "fwd", [], [[]], {}, {"a": {}}, b"",
    b"\xff" * 3, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), ["x"] * 60, {str(n): n for n in range(60)},
)  # fmt: skip


def _walk(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _walk(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _walk(value[index], (*path, index))


def _change(value, rng):
    """One value, key or item of a tree becomes something else."""
    path = rng.choice(list(_walk(value)))
    if not path:
        return rng.choice(HOSTILE)
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    last, kind = path[-1], rng.randrange(4)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("more", "", "../x", "seq"))] = rng.choice(HOSTILE)
    elif kind == 2 and isinstance(holder, list):
        holder.extend([rng.choice(HOSTILE)] * rng.randrange(1, 40))
    else:
        holder[last] = rng.choice(HOSTILE)
    return value


def reseal(payloads, rng):
    """A record is changed inside, or replaced by hostile msgpack, under a right checksum."""
    at = rng.randrange(len(payloads))
    kind = rng.randrange(10)
    if kind == 0:
        new = rng.choice((b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\x80" * 10**6, b"\xc1", b"",
                          b"\xdc\x13\x88" * 1000 + b"\xc0" * 9000, b"\xdd\x00\x01\x00\x00" * 300))  # fmt: skip
        if rng.random() < 0.5:
            head = msgpack.unpackb(payloads[at])
            new = msgpack.packb([*head[:-1], new[: envelope.MAX_RECORD_BYTES - 3000]])
    elif kind == 1:
        new = msgpack.packb(_change(msgpack.unpackb(payloads[at]), rng))
    else:
        head = msgpack.unpackb(payloads[at])
        body = msgpack.unpackb(head[-1])
        if isinstance(body.get("trials"), bytes) and rng.random() < 0.3:
            body["trials"] = msgpack.packb(_change(msgpack.unpackb(body["trials"]), rng))
        else:
            body = _change(body, rng)
        new = msgpack.packb([*head[:-1], msgpack.packb(body)])
    return [*payloads[:at], new, *payloads[at + 1 :]], payloads[at]


def look(data):
    """All that a reader sees of a segment's bytes: the bytes of records, and their objects."""
    found = RecordSet()
    read_bytes(data, SOURCE, found)
    found.decode_all()
    objects = [one for kind in found.kinds for one in found.of_kind(kind)]
    return found, objects


def sane(one):
    """Whether a record that was accepted keeps to every bound."""
    problem = one.problem
    assert 1 <= problem.seq < 2**31
    assert problem.mode in ("fwd", "fwd_bwd")
    assert "/" not in one.device.folder
    assert ".." not in one.device.folder
    if hasattr(one, "comparison"):
        assert 0 < one.comparison.low <= one.comparison.ratio <= one.comparison.high < 1e15
        assert all(t.median_ms is None or 0 <= t.median_ms < 1e15 for t in one.trials)
    for value in getattr(getattr(one, "chosen", None), "config", {}).values():
        assert type(value) in (int, str)
    repr(one)


def mutate(payloads, whole, rng):
    """One mutation, and what must hold after it."""
    if rng.random() < 0.5:
        data = whole
        for _ in range(rng.choice((1, 1, 3))):
            data = rng.choice(BYTES)(data, rng)
            if len(data) < 2:
                break
        found, objects = look(data)
        assert set(found.payloads) <= set(payloads), "damage was taken for a record"
    else:
        changed, lost = reseal(payloads, rng)
        found, objects = look(segment.pack_segment(changed))
        assert set(payloads) - {lost} <= set(found.payloads), "a whole record was lost"
    for one in objects:
        sane(one)


def main(count, seed):
    """Mutates so often, and prints the figures."""
    rng = random.Random(seed)
    payloads = originals()
    whole = segment.pack_segment(payloads)
    slowest = 0.0
    for _ in range(count):
        start = time.process_time()
        mutate(payloads, whole, rng)
        slowest = max(slowest, time.process_time() - start)
    print(json.dumps({"mutations": count, "slowest_s": slowest, "peak_mb": _peak_mb()}))


def _peak_mb():
    """Most memory that this program held, MiB."""
    try:
        (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except (OSError, ValueError):
        # Counts from before the program began too: that of whoever started it.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(line) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
