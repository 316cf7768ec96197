"""Write `requirements/*.lock` from the packages installed in the running environment.

    python scripts/lock.py            # after upgrading something there and testing it

Starts at what `pyproject.toml` names and walks the installed metadata, so that a lock holds what something
needs and nothing else. No index is asked. `cpu.lock` is what a run needs, `dev.lock` what tests need on top.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by scripts/lock.py; installed by scripts/setup with `pip install --no-deps`.\n"


def closure(roots: Iterable[str], left_out: frozenset[str]) -> dict[str, str]:
    """The versions installed here of everything that `roots` need, by canonical name.

    Raises:
        LookupError: something needed is not installed, or a version that `roots` do not allow is.
    """
    todo = [(Requirement(root), "pyproject.toml") for root in roots]
    done: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, str] = {}
    while todo:
        wanted, wanted_by = todo.pop()
        name = canonicalize_name(wanted.name)
        key = (name, frozenset(wanted.extras))
        if name in left_out or key in done:
            continue
        done.add(key)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise LookupError(f"{name}, needed by {wanted_by}, is not installed") from None
        if wanted_by == "pyproject.toml" and not wanted.specifier.contains(package.version, prereleases=True):
            raise LookupError(
                f"{name} {package.version} is installed, {wanted_by} asks for {wanted.specifier}"
            )
        found[name] = package.version
        for line in package.requires or ():
            needed = Requirement(line)
            extras = wanted.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append((needed, name))
    return found


def main() -> int:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, lock = pyproject["project"], pyproject["tool"]["neoproto"]["lock"]
    extras = project["optional-dependencies"]
    left_out = frozenset(lock["left_out"])
    run = [*project["dependencies"], *extras["cpu"], *lock["without_pins"], lock["cpu_torch"]]
    try:
        needed_to_run = closure(run, left_out)
        needed_to_test = closure([*extras["dev"], *lock["dev_without_pins"]], left_out)
    except LookupError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    for name, versions in (
        ("cpu", needed_to_run),
        ("dev", {k: v for k, v in needed_to_test.items() if k not in needed_to_run}),
    ):
        lines = [f"{package}=={version}\n" for package, version in sorted(versions.items())]
        (ROOT / "requirements" / f"{name}.lock").write_text(HEADER + "".join(lines))
        print(f"requirements/{name}.lock: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
