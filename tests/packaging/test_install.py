"""An installed copy (not an editable one) is complete: it finds its configurations from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.neoproto.report.runs import write_run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("neoproto", "meshes", "actors", "configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "-w", folder, source], capture_output=True, text=True, timeout=100, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(site: Path, folder: Path, *arguments: str) -> str:
    """The standard output of a Python that finds the installed copy first, started in `folder`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_module_and_configuration_and_nothing_else(installed: Path) -> None:
    wanted = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml"} or path.parent.name == "assets"
    }
    metadata = next(installed.glob("neoproto-*.dist-info"))
    got = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {path for path in got if path.parts[0] != metadata.name} - {Path("neoproto/py.typed")} == wanted
    assert {path.name for path in installed.iterdir()} == {*PACKAGES, metadata.name}


def test_every_shipped_configuration_composes_from_another_folder(installed: Path, tmp_path: Path) -> None:
    for name in ("actors", "configs", "meshes"):  # before the installed copy on the path
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    code = (
        "import neoproto, configs, neoproto.run.compose as c\n"
        "from neoproto.config import CONFIG_NAMES\n"
        "for name in CONFIG_NAMES: c.compose_run(name, [])\n"
        "print(configs.__file__, neoproto.__file__)"
    )
    where = python(installed, tmp_path, "-c", code).split()
    assert [Path(path).is_relative_to(installed) for path in where] == [True, True]


def test_a_report_is_written_from_another_folder(installed: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert "report.html" in python(installed, tmp_path, "-m", "neoproto.report", "run")


def test_the_command_answers_from_another_folder(installed: Path, tmp_path: Path) -> None:
    assert "--config-name" in python(installed, tmp_path, "-m", "neoproto.run", "--help")


def test_vllm_finds_our_plugin_where_another_module_is_called_actors(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text("raise RuntimeError")
    code = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='vllm.general_plugins', name='neoproto')\n"
        "print(*{one.load().__module__ for one in found})"
    )
    assert python(installed, tmp_path, "-c", code) == "neoproto.packages\n"
