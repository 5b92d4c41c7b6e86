import ctypes
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shapetune.autotune import measure, verify
from shapetune.bench import isolate, torch_peer
from shapetune.bench.torch_peer import (
    TorchPeer,
    allocated_growth,
    device_for,
    resident_growth,
    versions,
)
from shapetune.cache.errors import UnsupportedError
from shapetune.cache.key import Candidate, Device
from shapetune.kernels import get_op
from shapetune.kernels.device import usable_cores

from ..samples import problem

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torch_flash", "torch_math"])
def test_a_peer_computes_the_same_outputs_and_gradients(name, dtype, mode):
    about = problem(seq=70, dim=16, heads=2, batch=2, dtype=dtype, mode=mode, causal=True)
    op = get_op("attention")
    inputs = op.make_inputs(about, 0, "normal")
    outputs = TorchPeer(name, about, inputs).first()
    plain = measure.compile_program(
        measure.program(op, about, Candidate("xla"), inputs), measure.arguments(about, inputs)
    )
    result = jax.block_until_ready(plain.call(*measure.arguments(about, inputs)))
    expected = measure.named_outputs(op, about, inputs, result)
    assert set(outputs) == set(expected)
    tolerance = 20 * verify.rounding_floor(about)
    for key, value in expected.items():
        scale = np.abs(value.astype(np.float32)).max()
        np.testing.assert_allclose(outputs[key], value.astype(np.float32), atol=tolerance * scale)


def test_a_back_end_that_is_not_there_says_so():
    about = problem(seq=16, dim=16, heads=1)
    inputs = get_op("attention").make_inputs(about, 0, "normal")
    peer = TorchPeer("torch_efficient", about, inputs)
    if torch.cuda.is_available():
        pytest.skip("there is one on a GPU")
    with pytest.raises(RuntimeError):
        peer.first()


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("name", ["torch_flash", "torch_math"])
def test_memory_holds_the_inputs_and_the_results(name, mode):
    about = problem(seq=512, dim=128, heads=8, mode=mode)
    inputs = get_op("attention").make_inputs(about, 0, "normal")
    peer = TorchPeer(name, about, inputs)
    results = peer.first()
    given = measure.arguments(about, inputs)
    least = sum(array.nbytes for array in (*given, *results.values())) / measure.MIB
    assert peer.memory()["peak_mb"] >= least


def test_memory_grows_with_the_scores_that_are_held():
    about = problem(seq=1024, dim=16, heads=8)
    inputs = get_op("attention").make_inputs(about, 0, "normal")
    peaks = {}
    for name in ("torch_flash", "torch_math"):
        peer = TorchPeer(name, about, inputs)
        peer.first()
        peaks[name] = peer.memory()["peak_mb"]
    assert peaks["torch_math"] > peaks["torch_flash"] + 16


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_memory_that_the_allocator_kept_free_counts_again():
    size = 2**23
    for _ in range(3):  # from the second on it comes from the heap, which keeps it
        torch.ones(size // 4)
    with resident_growth() as grown:
        torch.ones(size // 4)
    assert grown() > 0.9 * size


@pytest.mark.parametrize(
    ("platform", "built", "seen", "device"),
    [
        ("cpu", {"cuda": "13.0"}, True, "cpu"),
        ("cuda", {"cuda": "13.0"}, True, "cuda"),
        ("rocm", {"hip": "7.0"}, True, "cuda"),
        ("cuda", {"cuda": "13.0"}, False, None),
        ("cuda", {"hip": "7.0"}, True, None),
        ("tpu", {"cuda": "13.0"}, True, None),
    ],
)
def test_a_peer_runs_where_jax_does_or_says_why_it_cannot(platform, built, seen, device):
    fake = SimpleNamespace(
        __version__="2.0",
        version=SimpleNamespace(**{"cuda": None, "hip": None, **built}),
        cuda=SimpleNamespace(is_available=lambda: seen),
    )
    if device is not None:
        assert device_for(platform, fake) == device
        return
    with pytest.raises(UnsupportedError, match=f"jax runs on {platform}, and PyTorch 2.0"):
        device_for(platform, fake)


def test_a_peer_never_runs_beside_the_device_of_jax(monkeypatch):
    about = problem(seq=16, dim=16, heads=1)
    inputs = get_op("attention").make_inputs(about, 0, "normal")
    monkeypatch.setattr(torch_peer, "current_device", lambda: Device("tpu", "a TPU"))
    with pytest.raises(UnsupportedError, match="jax runs on tpu"):
        TorchPeer("torch_math", about, inputs)


def test_memory_on_a_gpu_leaves_out_what_others_hold_there():
    held = SimpleNamespace(now=100, most=900)
    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda: setattr(held, "most", held.now),
        memory_allocated=lambda: held.now,
        max_memory_allocated=lambda: held.most,
    )
    with allocated_growth(cuda) as grown:
        held.most = 150
    assert grown() == 50


SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "infinite"}
IDLE = """
import json, sys, time
told = open(sys.argv[1], "a")
json.load(sys.stdin)
import torch
q = torch.randn(1, 8, 512, 64)
burnt = []
for _ in range(5):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    before = time.process_time()
    time.sleep(0.1)
    burnt.append(time.process_time() - before)
told.write(json.dumps({"burnt": sorted(burnt)[2]}) + "\\n")
"""


@pytest.mark.skipif(usable_cores() < 2, reason="needs a second processor to spin on")
def test_torchs_threads_sleep_while_jax_is_measured(tmp_path):
    (tmp_path / "idle.py").write_text(IDLE)
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    burnt = {}
    for name, policy in (("usual", {}), ("spinning", SPINNING)):
        environment = {"PYTHONPATH": path, **policy}
        events, why = isolate.run("idle", {}, seconds=120.0, environment=environment)
        assert why is None
        burnt[name] = events[0]["burnt"]
    # Found to be a thousandth.
    assert burnt["usual"] < burnt["spinning"] / 5


def test_the_head_of_a_file_names_the_version():
    assert versions()["torch"] == torch.__version__
