"""A volume's files in shared memory: their names, locks, the table of generations, and private mappings.

    np.<store>.<token>.owner     locked by the volume's process while it lives
    np.<store>.<token>.table     64-bit words: the state of the volume, then one word a slot
    np.<store>.<token>.s<n>      segments of bytes

See docs/store-internals.md for who may do what when.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from neoproto.errors import StoreError
from neoproto.store.base import Bytes

SHM_DIR = Path("/dev/shm")
PAGE = mmap.PAGESIZE
SLOTS = 1 << 20
"""Words of a table. The file is sparse: pages that no slot was ever used in take no memory."""
_TABLE_STEP = 16 * PAGE
FIRST_SLOT = 8
RESERVED = 1 << 63
"""Set in a slot's word while its value is being written; generations are below it."""

_STATE, _OPEN, _CLOSED = 0, 1, 2
_FILE_PREFIX = "np."
_OWNER = ".owner"
_OWNER_NAME = re.compile(r"(np\.[A-Za-z0-9_-]+\.[0-9a-f]{16})\.owner")
"""Of a volume. A file `np.owner` of anybody's would have the files of all stores removed."""


def store_prefix(store: str) -> str:
    """How the names of all of a store's files begin, on every host."""
    return f"{_FILE_PREFIX}{re.sub(r'[^A-Za-z0-9_-]', '-', store)}."


def volume_prefix(store: str) -> str:
    """How the names of one new volume's files begin."""
    return f"{store_prefix(store)}{uuid.uuid4().hex[:16]}"


def path_of(name: str) -> str:
    """Where the file of that name is. One that is not in shared memory has its path for a name."""
    return os.path.join(SHM_DIR, name)


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take the lock of an open file if nobody is in the way."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Owner:
    """The lock that says a volume lives. Make it with `claim`."""

    def __init__(self, prefix: str, fd: int) -> None:
        self.prefix, self._fd = prefix, fd

    @classmethod
    def claim(cls, prefix: str) -> Owner:
        """Create and lock the owner file.

        Raises:
            OSError: shared memory cannot be used.
            StoreError: somebody else's sweep was in the way again and again.
        """
        path = path_of(prefix + _OWNER)
        for _ in range(20):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            # A sweep may have locked and removed the file between the two steps: then it is not ours.
            if try_lock(fd, exclusive=True) and _is_at(fd, path):
                return cls(prefix, fd)
            os.close(fd)
        raise StoreError(f"cannot lock {path}")

    def release(self) -> None:
        """Remove every file of the volume, the owner file last."""
        remove_files(self.prefix)
        os.close(self._fd)


def remove_files(prefix: str) -> int:
    """Remove the files whose names begin so, owner files last. Mappings of them stay readable.

    Returns:
        how many there were.
    """
    names = [name for name in os.listdir(SHM_DIR) if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: name.endswith(_OWNER)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(name))
    return len(names)


def sweep_dead_owners() -> list[str]:
    """Remove the files of volumes whose process is gone; living ones hold their locks.

    Returns:
        the prefixes that were removed.
    """
    swept = []
    for name in os.listdir(SHM_DIR):
        if (found := _OWNER_NAME.fullmatch(name)) is None:
            continue
        try:
            fd = os.open(path_of(name), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another sweep was faster, or it is another user's
        try:
            if try_lock(fd, exclusive=True) and _is_at(fd, path_of(name)):
                prefix = found[1]
                remove_files(f"{prefix}.")
                swept.append(prefix)
        finally:
            os.close(fd)
    return swept


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


class Table:
    """The words of one volume, shared by every process of the host that uses it.

    A page of it without memory must not be touched while /dev/shm is full: SIGBUS would end the process.
    So the volume, which made the table, allocates words before it hands out their slots.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        """Args:
        fd: the file, if this process is the one to allocate; it is kept open as long as the process lives.
        """
        self._memory, self._fd, self._allocated = memory, fd, 0
        self.words = memoryview(memory).cast("Q")

    @classmethod
    def create(cls, prefix: str) -> Table:
        """Make the table of a new volume.

        Raises:
            OSError: shared memory cannot be used.
        """
        fd = os.open(path_of(f"{prefix}.table"), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, SLOTS * 8)
            table = cls(mmap.mmap(fd, SLOTS * 8), fd)
            table.allocate(FIRST_SLOT)
        except BaseException:
            os.close(fd)
            raise
        table.words[_STATE] = _OPEN
        return table

    @classmethod
    def open(cls, prefix: str) -> Table | None:
        """The table of a volume of this host; None if there is no such volume here."""
        try:
            fd = os.open(path_of(f"{prefix}.table"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(mmap.mmap(fd, SLOTS * 8))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    def allocate(self, slots: int) -> None:
        """Give memory to the words of the slots below `slots`. For the volume's process alone.

        Raises:
            OSError: there is none left; none of them may be used that could not be used before.
        """
        assert self._fd is not None, "only the table's maker allocates"
        if slots * 8 > self._allocated:
            upto = min(-(-slots * 8 // _TABLE_STEP) * _TABLE_STEP, SLOTS * 8)
            os.posix_fallocate(self._fd, self._allocated, upto - self._allocated)
            self._allocated = upto

    @property
    def closed(self) -> bool:
        """Whether the volume said goodbye."""
        return bool(self.words[_STATE] != _OPEN)

    def mark_closed(self) -> None:
        """Say so."""
        self.words[_STATE] = _CLOSED


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000


class _Mapping:
    """Unmaps, and says so, when the last array on it is gone. Python's own mmap keeps a descriptor each."""

    def __init__(
        self, fd: int, offset: int, nbytes: int, flags: int, release: Callable[[], None] | None
    ) -> None:
        self._address: int | None = None
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if address == _FAILED or address is None:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
        self._address, self._nbytes, self._release = address, nbytes, release
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self._nbytes)
            if self._release is not None:
                self._release()


def map_private(fd: int, offset: int, nbytes: int, release: Callable[[], None] | None = None) -> Bytes:
    """A private copy-on-write mapping of a part of a file, as [nbytes] uint8.

    Args:
        offset: a multiple of the page size.
        nbytes: at least 1.
        release: called once, when the last array or tensor on the memory is gone; not if mapping fails.

    Raises:
        OSError: the process has too many mappings, or too little address space.
    """
    return np.asarray(_Mapping(fd, offset, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, release))


def map_shared(fd: int, nbytes: int) -> Bytes:
    """The first bytes of a file, for writing to it.

    Raises:
        OSError: as `map_private`.
    """
    return np.asarray(_Mapping(fd, 0, nbytes, mmap.MAP_SHARED, None))


def write_all(fd: int, data: Bytes, offset: int) -> None:
    """Write [n] uint8 at an offset.

    Raises:
        OSError: there is no memory left for it.
    """
    view: memoryview = memoryview(cast(Any, data))
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_into(fd: int, data: Bytes, offset: int) -> int:
    """Fill [n] uint8 from an offset on.

    Returns:
        how many bytes there were: fewer if the file ends before.
    """
    view, done = memoryview(cast(Any, data)), 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
