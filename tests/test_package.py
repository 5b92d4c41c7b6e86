"""The package as users get it: light to import, whole when installed."""

import ast
import json
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import shapetune

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("optuna", "sqlalchemy", "rich", "torch", "fsspec", "plotly", "click")


def _modules():
    """Every module of the package in the tree."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for package in listed:
        folder = ROOT.joinpath(*package.split(".")[1:])
        for path in folder.glob("*.py"):
            yield package if path.stem == "__init__" else f"{package}.{path.stem}"


def test_every_folder_with_modules_is_a_listed_package():
    listed = {name.rpartition(".")[0] or name for name in _modules()} | set(_modules())
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("tests", "build", "dist", "examples", "docs") or parts[0].startswith("."):
            continue
        assert ".".join(("shapetune", *parts[:-1])) in listed, path


@pytest.mark.parametrize(
    "module", ["shapetune", "shapetune.autotune.worker", "shapetune.bench.row"]
)
def test_importing_loads_nothing_heavy(module):
    script = (
        f"import sys, shapetune, json, {module}\n"
        "import jax.numpy as jnp\n"
        "x = jnp.ones((1, 8, 2, 8))\n"
        "shapetune.attention(x, x, x)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(out.stdout)}
    assert not loaded & set(HEAVY)


def test_public_names_exist_and_have_docs():
    for name in shapetune.__all__:
        assert getattr(shapetune, name).__doc__ or name == "__version__"
    with pytest.raises(AttributeError, match="nothing"):
        shapetune.nothing  # noqa: B018


def test_every_module_says_what_it_is_for():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("tests", "build") or parts[0].startswith("."):
            continue
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.slow
def test_the_wheel_installs_in_a_clean_environment_with_every_module(tmp_path):
    # A build leaves its own folders in the tree that it builds from.
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tmp_path / "tree"],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[cpu]"]
    subprocess.run(install, check=True)
    script = (
        "import importlib, shapetune, sys\n"
        f"assert {str(ROOT)!r} not in shapetune.__file__\n"
        f"[importlib.import_module(name) for name in {sorted(set(_modules()))!r}]\n"
        "assert not [n for n in sys.modules if n.startswith('shapetune.tests')]\n"
    )
    # Isolated from PYTHONPATH, which may well name this tree.
    subprocess.run([python, "-I", "-c", script], check=True, cwd=tmp_path)
    command = tmp_path / "clean" / "bin" / "shapetune"
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert shapetune.__version__ in shown.stdout
