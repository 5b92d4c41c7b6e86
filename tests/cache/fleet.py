"""What one process of a fleet does to a shared cache folder; run as a program without jax.

Usage: ``python fleet.py ROLE FOLDER NUMBER COUNT SLOW``. With SLOW the file system is
slow, refuses locks, and shows listings that are out of date.
"""

import os
import random
import sys
import time
from pathlib import Path

from light import DEVICE, record

from shapetune.cache import load, merge, publish
from shapetune.cache.choice import Versions, rank
from shapetune.cache.errors import CacheError

#: Problems that the writers share, so that their records compete.
PROBLEMS = 10
VERSIONS = Versions("0.10.2", lambda name: 1)


def written(writer, number):
    """The record that a writer makes as its so-and-so-many-th."""
    return record(64 + number % PROBLEMS, writer * 1000 + number)


def write(folder, writer, count):
    """Publishes records one by one."""
    for number in range(count):
        publish(folder, [written(writer, number)])


def read(folder, writers, count):
    """Reads until all is there; every record is one that somebody wrote, and none goes again."""
    known = {written(w, n).id: (w, n) for w in range(writers) for n in range(count)}
    seen = set()
    deadline = time.monotonic() + 240
    while len(seen) < len(known) and time.monotonic() < deadline:
        found = load([folder])
        assert not found.damage, found.damage
        assert found.ids <= set(known), "a record that nobody wrote"
        assert seen <= found.ids, f"{len(seen - found.ids)} records were missed"
        for number in range(PROBLEMS):
            records = found.exact(DEVICE, written(0, number).problem)
            best = rank(records, VERSIONS)[:1]
            assert all(one == written(*known[one.id]) for one in best)
        seen = set(found.ids)
        time.sleep(0.05)
    print(len(seen))


def compact(folder, rounds):
    """Compacts again and again, until it is told to stop."""
    for _ in range(rounds):
        merge.compact(folder)
        time.sleep(0.05)
        if (folder.parent / "stop").exists():
            break


def make_slow():
    """Every call on the folder takes its time, listings lag, locks are refused."""
    import fcntl

    def refuse(*args):
        raise OSError(37, "No locks available")

    fcntl.flock = fcntl.lockf = fcntl.fcntl = refuse

    def slowed(function):
        def call(*args, **kwargs):
            time.sleep(random.random() * 0.004)
            return function(*args, **kwargs)

        return call

    for name in ("replace", "listdir", "scandir", "unlink", "fsync", "stat"):
        setattr(os, name, slowed(getattr(os, name)))
    Path.open = slowed(Path.open)
    listed = Path.iterdir

    def late(self):
        # The listing was taken a while ago: names in it may be gone, new ones are not in it.
        names = list(listed(self))
        time.sleep(random.random() * 0.02)
        return iter(names)

    Path.iterdir = late


def main(role, folder, number, count, slow):
    """Plays one role."""
    if slow:
        make_slow()
    if role == "write":
        write(folder, number, count)
    elif role == "read":
        read(folder, number, count)
    else:
        compact(folder, count)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
    except CacheError as error:
        sys.exit(f"{type(error).__name__}: {error}")
