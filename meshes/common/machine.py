"""Facts of the machine this process runs on. Nothing heavy is imported: hosts are looked at with it."""

from __future__ import annotations

import functools
import getpass
import hashlib
import os
import platform
import secrets
import tempfile
from collections.abc import Iterable
from importlib import metadata, util
from pathlib import Path

OURS = ("neoproto", "actors", "meshes", "configs")
LONGEST_TMP = 40
"""Bytes: Monarch's sockets add up to 66, and a path of a socket has at most 107."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Where the collectives of ranks on one machine listen. Else gloo takes the address of the host name,
and NCCL the first interface that is not loopback."""


@functools.cache
def machine_id() -> str:
    """What a process id means something on: this boot of this machine, and the namespace of its ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, of these distributions ("missing" where there is none), and of ours, with its source."""
    found = {"python": platform.python_version()}
    for package in packages:
        found[package] = _version(package)
    found["neoproto"] = f"{_version('neoproto')} (source {source_digest()})"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def source_digest() -> str:
    """A short name for the source of our packages, wherever they are imported from."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def gpu_count() -> int:
    """GPUs that torch can use here: none with a build for CPUs, whatever the machine has."""
    import torch  # late: most callers of this module do not need it

    return torch.cuda.device_count()


def visible_gpus() -> tuple[str, ...]:
    """What `CUDA_VISIBLE_DEVICES` calls them."""
    count = gpu_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:  # it ends, for CUDA, before the first that is not there
        return tuple(name.strip() for name in listed.split(",") if name.strip())[:count]
    return tuple(map(str, range(count)))


def can_be_written(file: Path) -> bool:
    """Whether this process can append to a file, or make it and the folder it lies in."""
    # os.path: in a folder that may not be looked into, Path.exists() raises.
    there = next((one for one in (file, *file.parents) if os.path.exists(one)), file)
    return os.access(there, os.W_OK if there == file else os.W_OK | os.X_OK)


def short_tmp() -> str:
    """A folder for sockets: the usual one, unless a socket's path (≤ 108 bytes) would not fit below it."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST_TMP else "/tmp"


def tmp_note() -> str | None:
    """A note on a folder for temporary files that is not the one a person chose."""
    usual, used = tempfile.gettempdir(), short_tmp()
    if usual == used:
        return None
    return f"TMPDIR={usual} is longer than {LONGEST_TMP} bytes, which sockets allow: {used} is used"


def unmade_folder(prefix: str) -> str:
    """A path for a folder of temporary files. The guardian knows it before it is made."""
    return os.path.join(short_tmp(), f"{prefix}{secrets.token_hex(4)}")


def inductor_cache() -> str:
    """Where torch keeps what it compiled: among the temporary files, by default, which go with the run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry, as containers are given
        user = str(os.getuid())
    usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return os.environ.get(CACHE_VARIABLE) or usual
