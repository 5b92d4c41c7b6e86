"""One operation on a cache, again and again until killed; run as a program without jax.

Usage: ``python worker.py write|compact|push|pull FOLDER OTHER``. Prints ``ready``, then
the id of every record whose publication was reported as done.
"""

import sys
from pathlib import Path

from light import record

from shapetune.cache import merge, publish
from shapetune.cache.places import as_place
from shapetune.cache.remote import pull, push


def main(role, folder, other):
    """Goes on until it is killed."""
    number = 0
    print("ready", flush=True)
    while True:
        number += 1
        if role == "write":
            one = record(number, pad=40)
            publish(folder, [one])
            print(one.id, flush=True)
        elif role == "compact":
            publish(folder, [record(2000 + number % 50)])
            merge.compact(folder)
        elif role == "push":
            for path in list(other.glob("*/*.msgpack"))[::2]:
                path.unlink()
            push(folder, other)
        else:
            for path in list(folder.glob("*/*.msgpack"))[::2]:
                path.unlink()
            pull(as_place(str(other)), folder)


if __name__ == "__main__":
    where = sys.argv[3] if sys.argv[1] == "pull" else Path(sys.argv[3])
    main(sys.argv[1], Path(sys.argv[2]), where)
