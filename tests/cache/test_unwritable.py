"""Folders that cannot be written: dispatch goes on, and tuning says what to do."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import shapetune
from shapetune.cache import check_writable, load, publish
from shapetune.cache.errors import CacheError
from shapetune.kernels import current_device, misses

from ..samples import problem, record
from . import light

HERE = Path(__file__).parent
NOBODY = 65534


def _attend():
    x = jnp.ones((1, 8, 2, 8))
    return shapetune.attention(x, x, x).shape == (1, 8, 2, 8)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_or_failing_disk_is_named_and_leaves_nothing_behind(
    tmp_path, monkeypatch, call, number
):
    publish(tmp_path, [light.record(1)])

    def fail(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CacheError, match=rf"{os.strerror(number)}; set SHAPETUNE_CACHE"):
            publish(tmp_path, [light.record(2)])
    assert len(load([tmp_path])) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_takes_no_more_bytes_is_named(tmp_path):
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from pathlib import Path\n"
        "from light import record\n"
        "from shapetune.cache import load, publish\n"
        "from shapetune.cache.errors import CacheError\n"
        "place = Path(sys.argv[1])\n"
        "try:\n"
        "    publish(place, [record(1, pad=50)])\n"
        "except CacheError as error:\n"
        "    print(error, len(load([place])), len(list(place.rglob('*.tmp'))))\n"
    )
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")], capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert "SHAPETUNE_CACHE" in told.stdout
    assert told.stdout.rstrip().endswith("0 0")


def _as_nobody(body):
    """Runs some lines as a user who owns nothing, once everything is imported."""
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from shapetune.cache import Device, check_writable, load, publish\n"
        "from shapetune.cache.errors import CacheError\n"
        "if os.geteuid() == 0:\n"
        f"    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "device = Device('cuda', 'NVIDIA Example 1', '8.6', 82)\n"
    )
    return subprocess.run([sys.executable, "-c", script + body], capture_output=True, text=True)


@pytest.mark.parametrize("mode", [0o555, 0o755], ids=["read-only", "of another user"])
def test_a_folder_that_is_not_ours_is_read_and_refused_for_writing(mode):
    if os.geteuid() != 0 and mode == 0o755:
        pytest.skip("only root can make a folder of another user")
    # Not below tmp_path, whose parents another user may not enter.
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "theirs"
        publish(folder, [light.record(1)])
        for path in (Path(top), folder, folder / light.DEVICE.folder):
            path.chmod(0o755 if path == Path(top) else mode)
        told = _as_nobody(
            f"place = Path({str(folder)!r})\n"
            "assert len(load([place])) == 1\n"
            "try:\n    check_writable(place, device)\n"
            "except CacheError as error:\n    print(error)\n"
        )
        for path in (folder, folder / light.DEVICE.folder):
            path.chmod(0o755)
    assert told.returncode == 0, told.stderr
    assert "cannot be written; set SHAPETUNE_CACHE" in told.stdout


def test_dispatch_works_where_nothing_can_be_read_or_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SHAPETUNE_CACHE", str(tmp_path / "file" / "below"))
    shapetune.reload()
    assert _attend()
    misses.write_all()
    with pytest.raises(CacheError, match="SHAPETUNE_CACHE"):
        check_writable(tmp_path / "file" / "below", current_device())


def test_dispatch_works_without_a_home_and_tuning_says_what_is_missing(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "SHAPETUNE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user who is in no list
    shapetune.reload()
    assert _attend()
    with pytest.raises(CacheError, match=r"no home folder.*SHAPETUNE_CACHE"):
        shapetune.tune("attention", {"seq": 8, "dim": 8})


def test_reading_never_writes(tmp_path):
    publish(tmp_path / "c", [record(problem())])
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "c").rglob("*"))
    shapetune.load(tmp_path / "c")
    assert _attend()
    assert shapetune.explain("attention", seq=1024, dim=64).tier == "exact"
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "c").rglob("*")) == before
