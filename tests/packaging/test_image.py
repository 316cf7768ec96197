"""The Dockerfile copies what the set-up and a run need, and its command is one that the project has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from packaging.specifiers import SpecifierSet

from neoproto.run import compose_run
from tests.packaging.test_install import PACKAGES
from tests.packaging.test_project import PROJECT

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n") if line)]


def arguments(wanted: str) -> list[str]:
    return [rest for word, rest in instructions() if word == wanted]


def test_it_copies_what_the_set_up_installs() -> None:
    copied = {source for line in arguments("COPY") for source in line.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "requirements", "scripts", *PACKAGES}
    assert all((ROOT / source).exists() for source in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied, "the build context has other files than are copied"


def test_its_python_and_system_packages_are_those_that_the_project_names() -> None:
    (base,) = arguments("FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)
    assert version
    assert SpecifierSet(PROJECT["requires-python"]).contains(version[1])
    packages = re.findall(r"apt-get install .*?-recommends ([\w. -]+?) &&", " ".join(arguments("RUN")))
    assert packages
    assert {"gcc", "libnuma1"} <= set(packages[0].split())
    assert "scripts/setup" in arguments("RUN")


def test_its_command_composes() -> None:
    command = json.loads(arguments("CMD")[0])
    assert command[:4] == ["python", "-m", "neoproto.run", "--config-name"]
    compose_run(command[4], command[5:])
