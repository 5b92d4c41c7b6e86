"""Many processes at one folder: nothing is lost, and nobody sees what no one wrote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shapetune.cache import load

HERE = Path(__file__).parent
WRITERS, READERS = 16, 8


def _start(role, folder, number, count, slow):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, str(HERE / "fleet.py"), role, str(folder), *map(str, (number, count, slow))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(("slow", "count"), [(0, 100), (1, 100)], ids=["local", "slow"])
def test_sixteen_write_while_eight_read_and_one_compacts(tmp_path, slow, count):
    folder = tmp_path / "shared"
    writers = [_start("write", folder, number, count, slow) for number in range(WRITERS)]
    readers = [_start("read", folder, WRITERS, count, slow) for _ in range(READERS)]
    compactor = _start("compact", folder, 0, 10_000, slow)
    told = [child.communicate(timeout=280) for child in (*writers, *readers)]
    (tmp_path / "stop").touch()
    told.append(compactor.communicate(timeout=60))
    failed = [err for child, (_, err) in zip((*writers, *readers, compactor), told, strict=True)
              if child.returncode]  # fmt: skip
    assert not failed, failed[0][-2000:]
    assert [out.strip() for out, _ in told[WRITERS:-1]] == [str(WRITERS * count)] * READERS
    assert len(load([folder])) == WRITERS * count
    assert not list(folder.rglob("*.tmp"))
