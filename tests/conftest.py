"""Every test has a cache folder of its own, and none sees the user's."""

from __future__ import annotations

import signal

import hypothesis
import jax
import pytest

from shapetune.autotune import final, measure
from shapetune.autotune.races import CALM
from shapetune.kernels import default

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("shapetune", deadline=None)
hypothesis.settings.load_profile("shapetune")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder, in force through SHAPETUNE_CACHE."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHAPETUNE_CACHE", str(folder))
    for name in ("SHAPETUNE_DISABLE", "SHAPETUNE_ON_MISS", "SHAPETUNE_STALE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(default, "_process_state", None)
    return folder


@pytest.fixture(autouse=True)
def short_races(monkeypatch):
    """Finalists race as on a calm machine, and no calm is waited for, though tests share
    theirs: what a noisy one brings about is tested by itself."""
    monkeypatch.setattr(final, "field_of", lambda trials: CALM)
    monkeypatch.setattr(measure, "PATIENCE", 1)


@pytest.fixture
def sigint():
    """Ctrl-C as in a terminal, also for child processes: who runs in a shell's background
    ignores it, and whom he starts does too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items):
    """Tests that need an NVIDIA GPU say so where there is none."""
    if jax.default_backend() != "gpu":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; jax sees none"))
