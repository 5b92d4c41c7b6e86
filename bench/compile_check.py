"""What compiles for an RTX 3090, an A100 and an H100, without having one: a table in one JSON.

Run as ``python -m shapetune.bench.compile_check OUTPUT.json [--seconds N] [--part NAME]``.
It goes on where an earlier run of the same output stopped.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..autotune import aot
from ..autotune.aot import Compilation
from .compile_plan import Check, plan

#: How each figure was come by; printed with the results.
METHOD = {
    "candidates": "drawn from the spaces by a seeded generator over head sizes, dtypes, modes, "
    "lengths (ragged too), grouped heads, windows, bias, mask and lengths; ok if XLA compiles it",
    "refused": "configs that a space leaves out on this card and would offer if shared memory had "
    "no limit; none may compile",
    "spills": "the default configs, compiled with xla_gpu_fail_ptx_compilation_on_register_spilling: "
    "ok if ptxas reports no spilled register in any kernel of the program",
    "memory": "memory_analysis of the compiled program, against xla_temp_mb of a real RTX 3090",
    "peak": "arguments, outputs and temporaries (all_mb), or temporaries of a whole layer (temp_mb)",
}
#: A temporary may be this much above the file's: rounding of buffers to 256 bytes.
_ROUNDING = 1.001
#: The plain implementation needs what it did on the real card, or this much more or
#: less: another version of XLA lays its smallest buffers out anew.
_PLAIN_CLOSE = 0.005


class _TimeIsUp(Exception):
    pass


def row(check: Check, found: Compilation) -> dict[str, Any]:
    """The outcome of a task as JSON."""
    target, problem, candidate = check.key
    out: dict[str, Any] = {
        "target": target, "problem": problem, "candidate": candidate, "status": found.status,
        "seconds": round(found.seconds, 1), "shared_bytes": found.shared_bytes,
    }  # fmt: skip
    if found.temp_mb is not None and found.arg_mb is not None and found.out_mb is not None:
        out["temp_mb"] = found.temp_mb
        if "all_mb" in check.file:
            out["all_mb"] = found.temp_mb + found.arg_mb + found.out_mb
    if found.note:
        out["note"] = re.sub(r"\s+", " ", found.note)[:200]
    if check.file:
        out["at_most"] = dict(check.file)
    return out


def holds(part: str, row: Mapping[str, Any]) -> bool:
    """Whether an outcome is what its part asks for."""
    ok = row["status"] == "ok"
    if part.endswith("refused"):
        return not ok
    limits: Mapping[str, float] = row.get("at_most", {})
    if not (ok and limits):
        return ok
    if row["candidate"] == "xla":
        return abs(row["temp_mb"] - limits["temp_mb"]) <= _PLAIN_CLOSE * limits["temp_mb"]
    if part == "attention-memory" and row["problem"].endswith(" fwd"):
        return bool(row["temp_mb"] == 0)
    return all(row[name] <= most * _ROUNDING for name, most in limits.items())


def summary(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """For each part, target and implementation: how many hold, and what the others say."""
    out: dict[str, Any] = {}
    for part, rows in parts.items():
        groups: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
        for one in rows:
            groups[f"{one['target']} {one['candidate'].partition('(')[0]}"].append(one)
        out[part] = {"held": sum(holds(part, one) for one in rows), "of": len(rows)}
        for name, group in sorted(groups.items()):
            kept = [holds(part, one) for one in group]
            out[part][name] = f"{sum(kept)} of {len(group)}"
        failed = collections.Counter(
            f"{one['target']} {one['problem']} {one['candidate']}: {one['status']} "
            f"{one.get('note', '')} {one.get('temp_mb', '')} {one.get('at_most', '')}".strip()
            for one in rows
            if not holds(part, one)
        )
        out[part]["not"] = sorted(failed)
    return out


def run(output: Path, checks: Sequence[Check], seconds: float, jobs: int) -> bool:
    """Compiles what is not in ``output`` yet, for at most some seconds; True once all is there."""
    parts: dict[str, list[dict[str, Any]]] = {}
    if output.exists():
        parts = json.loads(output.read_text())["parts"]
    ended, total = time.monotonic() + seconds, len(checks)
    wanted: dict[str, dict[tuple[str, str, str], Check]] = collections.defaultdict(dict)
    for check in checks:
        wanted[check.part][check.key] = check
    done = 0
    try:
        for part, tasks in wanted.items():
            rows = parts.setdefault(part, [])
            # What is no longer asked for is dropped: a default or a space has changed.
            rows[:] = [r for r in rows if (r["target"], r["problem"], r["candidate"]) in tasks]
            there = {(r["target"], r["problem"], r["candidate"]) for r in rows}
            left = [check for key, check in tasks.items() if key not in there]
            done += len(there)

            def heard(found: Compilation, part: str = part, rows: list[Any] = rows) -> None:
                nonlocal done
                key = (found.target, found.problem.label, found.candidate.key)
                rows.append(row(wanted[part][key], found))
                done += 1
                if done % 10 == 0:
                    _write(output, parts)
                    print(f"{done} of {total} {part}", file=sys.stderr, flush=True)
                if time.monotonic() > ended:
                    raise _TimeIsUp

            if left:
                tuples = [(check.target, check.problem, check.candidate) for check in left]
                aot.compile_all(tuples, jobs, heard, left[0].work)
    except _TimeIsUp:
        return False
    finally:
        _write(output, parts)
    return True


def _write(output: Path, parts: Mapping[str, list[dict[str, Any]]]) -> None:
    """Whole or not at all; a row a line, so that a change of one is a line of a diff."""
    lines = []
    for part, rows in parts.items():
        body = ",\n".join(f"  {json.dumps(one)}" for one in sorted(rows, key=json.dumps))
        lines.append(f" {json.dumps(part)}: [\n{body}\n ]")
    head = json.dumps(
        {"jax": jax.__version__, "method": METHOD, "summary": summary(parts)}, indent=1
    )
    text = f'{head[:-2]},\n "parts": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    partial = output.with_name(output.name + ".partial")
    partial.write_text(text)
    os.replace(partial, output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line; 0 if everything holds, 1 if something does not, 2 if unfinished."""
    parser = argparse.ArgumentParser(prog="python -m shapetune.bench.compile_check")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many; run again")
    parser.add_argument("--part", default="", help="only parts whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    given = parser.parse_args(arguments)
    finished = run(given.output, plan(given.part), given.seconds, given.jobs)
    found = json.loads(given.output.read_text())["summary"]
    found = {part: one for part, one in found.items() if part.startswith(given.part)}
    print(json.dumps(found, indent=1))
    if not finished:
        print("not done: run the same command again", file=sys.stderr)
        return 2
    return 0 if all(one["held"] == one["of"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
