"""What is known of a problem before its search, and is kept as the search goes on.

Trials are on disk as soon as they are made, so that a run that is killed measures
nothing twice; what did harm is remembered beyond the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from .._version import __version__
from ..cache import partial, quarantine, store
from ..cache.choice import Versions
from ..cache.key import Candidate, Device, Problem
from ..cache.partial import Trials
from ..cache.quarantine import Quarantine
from ..cache.record import Trial
from ..cache.record_set import RecordSet
from .options import Options


def origin() -> dict[str, Any]:
    """The software, the host and the time, as records name them."""
    return {
        "shapetune": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "host": hashlib.blake2b(platform.node().encode(), digest_size=6).hexdigest(),
        "time": round(time.time(), 3),
    }


class Knowledge:
    """What is known of one problem on this device.

    Args:
        place: The cache folder to keep it in.
        records: What is in the caches.
        device: The device.
        problem: The problem.
        versions: The versions in use.
        options: How to tune.
    """

    def __init__(
        self,
        place: Path,
        records: RecordSet,
        device: Device,
        problem: Problem,
        versions: Versions,
        options: Options,
    ) -> None:
        self._place = place
        self._device = device
        self._problem = problem
        self._kept = len(records.about(partial.KIND, device, problem))
        warned = quarantine.in_force(records, device, problem, versions)
        self._warned = warned
        measured = () if options.again else _measured(records, device, problem, versions)
        self._trials = {
            t.candidate: t
            for t in measured
            if t.candidate not in warned
            and t.status not in quarantine.HARMFUL
            and _valid(t, options)
        }
        if not options.retry_quarantined:
            self._trials.update({c: _as_trial(one) for c, one in warned.items()})

    @property
    def trials(self) -> list[Trial]:
        """The trials that need not be made again."""
        return list(self._trials.values())

    def get(self, candidate: Candidate) -> Trial | None:
        """The trial of a candidate, if it need not be made again."""
        return self._trials.get(candidate)

    def keep(self, trial: Trial, sure: bool = True) -> None:
        """Puts a trial on disk, and a candidate that did harm into quarantine.

        ``sure`` is False where someone else may have killed its worker.
        """
        about: dict[str, Any] = {"problem": self._problem, "device": self._device}
        found: list[Any] = [Trials(**about, trials=(trial,), **origin())]
        harmful = trial.status in quarantine.HARMFUL
        if sure and (harmful or (trial.status == "ok" and trial.candidate in self._warned)):
            found.append(
                Quarantine(
                    **about,
                    candidate=trial.candidate,
                    status=trial.status if harmful else quarantine.LIFTED,
                    note=trial.note,
                    version=trial.version,
                    **origin(),
                )
            )
        if harmful:
            # The warning holds all there is to know, and outlives the trials.
            found = found[1:]
        for one in found:
            store.publish(self._place, [one])
            self._kept += 1

    def discard(self) -> None:
        """Removes the trials from the disk: the problem's record holds them now."""
        if self._kept:
            partial.discard(self._place, self._device, self._problem)


def _measured(
    records: RecordSet, device: Device, problem: Problem, versions: Versions
) -> Iterable[Trial]:
    """Trials made with the versions in use; of a candidate's, the newest comes last."""
    found: list[tuple[float, tuple[Trial, ...]]] = [
        (one.time, one.fresh(versions)) for one in records.about(partial.KIND, device, problem)
    ]
    for record in records.exact(device, problem):
        made_by = record.provenance
        found.append((made_by.time, partial.fresh(record.trials, made_by.jax, versions)))
    return [trial for _, trials in sorted(found, key=lambda one: one[0]) for trial in trials]


def _valid(trial: Trial, options: Options) -> bool:
    """Whether a trial made under other options is what these would give."""
    most = options.max_temp_mb
    if trial.status == "over_limit":
        return most is not None and trial.temp_mb > most
    return most is None or trial.temp_mb <= most


def _as_trial(one: Quarantine) -> Trial:
    note = one.note if one.note.startswith("quarantined") else f"quarantined: {one.note}"
    return dataclasses.replace(
        Trial(one.candidate, one.status), note=note[:900], version=one.version
    )
