"""What the head of a benchmark file says of a GPU, and what of it workers may take."""

import os
import sys

import jax
import pytest

from shapetune.bench import describe, isolate
from shapetune.cache.key import Device

CARDS = """615.78.08, 24576, NVIDIA GeForce RTX 3090
615.78.08, 143771, NVIDIA H200
615.78.08, [N/A], NVIDIA GB10
615.78.08, 81920, NVIDIA A100
615.78.08, 40960, NVIDIA A100
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` of these lines of shell first on the path."""

    def put(script):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    return put


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA GeForce RTX 3090", 24.0),
        ("NVIDIA H200", 140.4),
        ("NVIDIA GB10", None),
        ("NVIDIA A100", None),
        ("a slice of a card", None),
    ],
)
def test_memory_and_driver_are_those_of_the_card(smi, name, memory):
    smi(f"cat <<'END'\n{CARDS}END")
    found = describe.card_fields(name)
    assert found["driver"] == "615.78.08"
    assert found.get("gpu_memory_gb") == memory


@pytest.mark.parametrize("script", ["exit 9", "sleep 60", "echo No devices were found"])
def test_a_card_that_cannot_be_asked_leaves_what_jax_says(smi, monkeypatch, script):
    smi(f"exec {script}" if script.startswith("sleep") else script)
    monkeypatch.setattr(describe, "_PATIENCE_S", 0.3)
    card = Device("cuda", "NVIDIA H200", "9.0", 132, memory=100 * 2**30, driver="PJRT 1")
    monkeypatch.setattr(describe, "current_device", lambda: card)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = describe.device_fields()
    assert (found["driver"], found["gpu_memory_gb"], found["jax_memory_gb"]) == (
        "PJRT 1",
        None,
        100.0,
    )


ECHO = """
import json, os, sys
print(json.dumps(dict(os.environ)), file=open(sys.argv[1], "w"))
"""
NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, (0.95, None)), ({NEW: "0.5"}, (0.5, None)), ({OLD: "0.4"}, (None, 0.4))],
)
def test_jax_may_take_the_gpu_that_pytorch_may_unless_told_otherwise(
    tmp_path, monkeypatch, own, expected
):
    (tmp_path / "echo_environment.py").write_text(ECHO)
    for name in (NEW, OLD):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    (found,), why = isolate.run(
        "echo_environment", {}, seconds=60.0, environment={"PYTHONPATH": path}
    )
    assert why is None
    got = tuple(float(found[name]) if name in found else None for name in (NEW, OLD))
    assert got == expected
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
