"""The worker that tunes the problems behind a point before its rows are measured.

Run as ``python -m shapetune.bench.tune_point``, by the benchmark alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..autotune import Options, tune
from ..cache.key import Problem
from . import isolate


def main() -> None:
    """Tunes what is not tuned as thoroughly already."""
    told, memory = Path(sys.argv[1]), float(sys.argv[2])
    isolate.limit_memory(memory)
    request = json.load(sys.stdin)
    options = Options(trials=request["trials"], budget=request["budget"])
    for fields in request["problems"]:
        problem = Problem.from_map(fields)
        records = tune(problem.op, problem, cache=request["cache"], options=options)
        with told.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"tuned": [record.chosen.key for record in records]}) + "\n")


if __name__ == "__main__":
    main()
