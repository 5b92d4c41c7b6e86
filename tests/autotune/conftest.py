"""XLA's CUDA compiler, kept out of the environment and lent to the tests that need it."""

import os
import sys

import jax
import pytest


@pytest.fixture
def compiler(monkeypatch):
    """Puts the compiler on the path, for the processes that compile."""
    folder = os.environ.get("SHAPETUNE_TEST_AOT", "")
    if not os.path.isdir(os.path.join(folder, "jax_plugins")):
        pytest.skip("needs XLA's CUDA compiler in SHAPETUNE_TEST_AOT; make test installs it")
    jax.devices()  # this process keeps to the back end that it has
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder
