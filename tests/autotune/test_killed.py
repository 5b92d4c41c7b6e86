"""A run that is killed with SIGKILL, and the one that goes on; the long version is bench/trust.py."""

import dataclasses
import json
import subprocess
import sys

import shapetune
from shapetune.autotune import Listener, Options
from shapetune.autotune.measure import Effort
from shapetune.bench import stand_ins
from shapetune.cache import load

PROBLEMS = [{"seq": 40, "dim": 16, "heads": 1}, {"seq": 65, "dim": 16, "heads": 1}]
QUICK = Options(
    trials=6, pairs=6, rounds=6, effort=Effort(0.01, 3, 3), implementations=("many",),
    modules=(stand_ins.__name__,), isolation="process",
)  # fmt: skip
SCRIPT = f"""
import json
import shapetune
from shapetune.autotune import Limits, Listener, Options
from shapetune.autotune.measure import Effort

class Log(Listener):
    def trial_done(self, trial, best):
        print(json.dumps(["trial", trial.candidate.key]), flush=True)
    def problem_done(self, index, record, fresh):
        print(json.dumps(["record", record.id]), flush=True)

shapetune.tune("attention", {PROBLEMS!r}, options={QUICK!r}, listener=Log())
"""


class Notes(Listener):
    def __init__(self):
        self.made = []

    def trial_done(self, trial, best):
        self.made.append(trial.candidate.key)


def test_a_killed_run_loses_nothing_and_the_next_measures_nothing_twice(own_cache):
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    record, measured = None, []
    for line in run.stdout:
        kind, what = json.loads(line)
        if kind == "record":
            record, measured = what, []
        else:
            measured.append(what)
        if record and len(measured) == 3:
            break
    run.kill()
    run.wait()
    run.stdout.close()
    found = load([own_cache])
    assert found.damage == []
    assert record in found.ids
    kept = {t.candidate.key for one in found.of_kind("trials") for t in one.trials}
    assert kept >= set(measured)
    notes = Notes()
    options = dataclasses.replace(QUICK, isolation="none")
    first, second = shapetune.tune("attention", PROBLEMS, options=options, listener=notes)
    assert first.id == record
    assert kept.isdisjoint(notes.made)
    assert {t.candidate.key for t in second.trials} == kept | set(notes.made)
    assert load([own_cache]).ids == {first.id, second.id}
