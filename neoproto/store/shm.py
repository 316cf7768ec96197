"""A volume's shared memory: its files, its locks, and how every process of its host reads and writes it.

    np.<store>.<token>.owner     locked by the volume's process while it lives
    np.<store>.<token>.table     64-bit words: the state of the volume, then one word a slot
    np.<store>.<token>.s<n>      segments of bytes

write   Reservation ──> SegmentWriter: shared lock, reservation checked ──> bytes ──> seal: the table's words
read    large: shared lock ──> generation checked ──> private mapping; the lock goes with the mapping
        wide rows: shared lock ──> generation checked ──> bytes copied
        small: generation checked ──> bytes copied ──> generation checked again

See docs/store-internals.md for who may do what when.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from neoproto.errors import KeyMissing, StoreClosed, StoreError
from neoproto.store.base import Bytes, Location, ObjectRef, Rows, ValueInfo
from neoproto.store.codec import Parts, check_rows, decode, select_rows

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
"""A volume's. With a looser pattern, a stray file `np.owner` would have the files of all stores removed."""


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
    """Take the lock of an open file, if that is possible at once."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Owner:
    """The lock that shows that a volume lives. Make it with `claim`."""

    def __init__(self, prefix: str, fd: int) -> None:
        self.prefix, self._fd = prefix, fd

    @classmethod
    def claim(cls, prefix: str) -> Owner:
        """Create and lock the owner file.

        Raises:
            OSError: shared memory cannot be used.
            StoreError: sweeps of other processes were in the way again and again.
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
        os.close(self._fd)  # only now: while it is locked no sweep looks at the files


def remove_files(prefix: str) -> int:
    """Remove the files whose names begin so, owner files last. Mappings of them stay readable.

    Returns:
        how many there were.
    """
    names = [name for name in os.listdir(SHM_DIR) if name.startswith(prefix)]
    # Owner files last: a sweep finds volumes by them, so one that was interrupted is finished by the next.
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
            # The lock is free once the owner's process is gone, however it ended. Between our open and our
            # lock another sweep may have removed the file, and a new volume made one of that name.
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

    Words are read and written whole (64 bits, aligned), so no reader sees half of a change. x86-64 keeps the
    order of stores: bytes written before a word are there for every reader of the new word.

    A page of it without memory must not be touched while /dev/shm is full: SIGBUS would end the process.
    So the volume, which made the table, allocates words before it hands out their slots.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        """A mapped table; see `create` and `open`.

        Args:
            fd: the file, if this process is the one to allocate; open as long as the process lives.
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
        """Whether the volume has closed, in order."""
        return bool(self.words[_STATE] != _OPEN)

    def mark_closed(self) -> None:
        """Set `closed`, for every process of the host."""
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
    """Unmaps, and reports it, when the last array on it is gone. Python's mmap keeps a descriptor each."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A segment to write into.

    Attributes:
        token: stands, with `RESERVED`, in the table's words of the slots until values are there.
        segment: name of the file.
        nbytes: how much may be written.
        slots: one for each value.
    """

    token: int
    segment: str
    nbytes: int
    slots: tuple[int, ...]


MAP_BYTES = 128 << 10
"""Values of at least this size are mapped, smaller ones are copied: a process may have 65,530 mappings."""
_WIDE_BYTES = 1024
"""Rows of at least this size are copied one by one: mapped afresh, each costs a page fault, which is more."""
_ALIGN = 64
_KNOWN_SEGMENTS = 4096
"""Mappings a process keeps of one volume's segments: all that a publisher of weights writes into."""


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the parts of a value go, from its first byte, and how many bytes it takes altogether."""
    offsets, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGN) * _ALIGN
        offsets.append(start)
        end = start + size
    return offsets, end


def aligned(offset: int, nbytes: int) -> int:
    """The next offset at which a value of that size may begin."""
    unit = PAGE if nbytes >= MAP_BYTES else _ALIGN
    return -(-offset // unit) * unit


class SharedVolume:
    """One volume's shared memory, as seen by one process. Reading is safe from any thread.

    Attributes:
        prefix: of the volume's files.
        mapped, copied: bytes read so far by mapping and by copying.
    """

    def __init__(self, prefix: str, table: Table) -> None:
        self.prefix, self._table = prefix, table
        self.mapped = self.copied = 0
        self._mappings: set[int] = set()
        self._numbers = itertools.count()
        self._known_lock = threading.Lock()
        self._known: collections.OrderedDict[str, Bytes | None] = collections.OrderedDict()

    @classmethod
    def open(cls, prefix: str) -> SharedVolume | None:
        """The volume with these files; None if it is on another machine."""
        table = Table.open(prefix)
        return None if table is None else cls(prefix, table)

    @property
    def holds(self) -> int:
        """How many values this process has mapped, which keep their segments from being reused."""
        return len(self._mappings)

    # -- reading -------------------------------------------------------------------------------------------

    def read(self, ref: ObjectRef, rows: Rows | None = None) -> Any:
        """A value of this volume, or some of its rows, for the caller to keep and change.

        Raises:
            KeyMissing: deleted or overwritten.
            StoreClosed: the volume has closed.
            ValueError: rows that the value does not have.
            OSError: the process has no descriptors or mappings left.
        """
        if rows is not None:
            rows = check_rows(ref.info, rows, ref.key)
            if _is_wide(ref.info):
                return decode(*self._copy_rows(ref, rows))
        parts = self.parts(ref)
        if rows is None:
            if ref.info.nbytes < MAP_BYTES:
                self.copied += ref.info.nbytes
            else:
                self.mapped += ref.info.nbytes
            return decode(ref.info, parts)
        info, chosen = select_rows(ref.info, parts, rows)
        self.copied += info.nbytes
        return decode(info, chosen)

    def parts(self, ref: ObjectRef) -> Parts:
        """A value's bytes: mapped if it is large, else copied. Raises as `read`."""
        assert ref.location is not None
        small = ref.info.nbytes < MAP_BYTES
        return self._copy(ref, ref.location) if small else self._map(ref, ref.location)

    def _check(self, ref: ObjectRef, location: Location) -> None:
        # The slot's word decides: generations are random, so it is equal only while this very value is there.
        if self._table.words[location.slot] != ref.generation:
            if self._table.closed:
                raise StoreClosed(f"store {ref.store!r} is closed")
            raise _missing(ref)

    def _copy(self, ref: ObjectRef, location: Location) -> Parts:
        offsets, total = layout(location.sizes)
        data = np.empty(total, dtype=np.uint8)
        # As with a sequence lock: the word before and after. The volume clears it before it hands the memory
        # out again, so bytes copied while it stayed the same are the value's. No lock: two calls less.
        self._check(ref, location)
        fd = self._open(ref, location)
        try:
            read_into(fd, data, location.offset)
        finally:
            os.close(fd)
        self._check(ref, location)
        return _split(data, offsets, location.sizes)

    def _copy_rows(self, ref: ObjectRef, rows: Rows) -> tuple[ValueInfo, Parts]:
        """Rows of a value that is one part, and no other bytes of it."""
        location = ref.location
        assert location is not None
        index, width = np.asarray(rows, dtype=np.int64), ref.info.nbytes // ref.info.shape[0]
        fd = self._open(ref, location)
        try:
            # First the lock, then the word. The volume first clears the word, then tries for the exclusive
            # lock. So either it sees our lock and leaves the segment alone, or we see that the value is gone.
            if not try_lock(fd, exclusive=False):
                raise self._gone(ref)
            self._check(ref, location)
            memory = self.known_mapping(location.segment)
            if memory is None:
                data = _read_rows(fd, location.offset, index, width)
            else:
                table = memory[location.offset : location.offset + ref.info.nbytes].reshape(-1, width)
                data = table.take(index, axis=0)
        except FileNotFoundError:
            raise self._gone(ref) from None
        finally:
            os.close(fd)
        self.copied += data.nbytes
        info = replace(ref.info, shape=(len(index), *ref.info.shape[1:]), nbytes=data.nbytes)
        return info, (data.reshape(-1),)

    def _open(self, ref: ObjectRef, location: Location) -> int:
        try:
            return os.open(path_of(location.segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._gone(ref) from None

    def _map(self, ref: ObjectRef, location: Location) -> Parts:
        fd = self._open(ref, location)
        try:
            if not try_lock(fd, exclusive=False):  # then the word, as in `_copy_rows`
                raise self._gone(ref)
            self._check(ref, location)
            offsets, total = layout(location.sizes)
            number = next(self._numbers)
            # The kernel keeps an open file, and the lock on it, as long as anything is mapped through it: in
            # this process, or in a child that was forked meanwhile. No descriptor is needed for that.
            data = map_private(fd, location.offset, total, lambda: self._mappings.discard(number))
            self._mappings.add(number)
        finally:
            os.close(fd)
        return _split(data, offsets, location.sizes)

    def _gone(self, ref: ObjectRef) -> StoreError:
        return StoreClosed(f"store {ref.store!r} is closed") if self._table.closed else _missing(ref)

    # -- writing -------------------------------------------------------------------------------------------

    def open_writer(self, reservation: Reservation) -> SegmentWriter:
        """Begin to write into a reservation.

        Raises:
            StoreError: it was taken back meanwhile.
        """
        try:
            fd = os.open(path_of(reservation.segment), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreError("the reservation was taken back before its value was written") from None
        # First the lock, then the words. A reservation is taken back only while the lock is free, and
        # its number leaves the words before the segment is used again. So a writer that wakes up late finds
        # it gone before it writes a byte.
        granted = try_lock(fd, exclusive=False)
        if not granted or any(
            self._table.words[slot] != RESERVED | reservation.token for slot in reservation.slots
        ):
            os.close(fd)
            raise StoreError("the reservation was taken back before its value was written")
        return SegmentWriter(self, reservation, fd)

    def seal(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Make values readable by reference, once their bytes are written: the one step that does so."""
        for slot, generation in zip(slots, generations, strict=True):
            self._table.words[slot] = generation

    def known_mapping(self, segment: str) -> Bytes | None:
        """`mapping`, of a segment met before; None of a new one: calls are quicker than its page faults."""
        with self._known_lock:
            met = segment in self._known
            if not met:
                self._remember(segment, None)
        return self.mapping(segment) if met else None

    def mapping(self, segment: str) -> Bytes:
        """A segment's memory, mapped once and kept: its pages are there when it is used again.

        It keeps no lock, so it may be used only while its user holds one on the segment.
        """
        with self._known_lock:
            memory = self._known.get(segment)
            if memory is None:
                # Through a file opened again: the mapping would keep the lock of the caller's.
                fd = os.open(path_of(segment), os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = map_shared(fd, os.fstat(fd).st_size)
                finally:
                    os.close(fd)
            self._remember(segment, memory)
            return memory

    def _remember(self, segment: str, memory: Bytes | None) -> None:
        self._known[segment] = memory
        self._known.move_to_end(segment)
        if len(self._known) > _KNOWN_SEGMENTS:
            self._known.popitem(last=False)


class SegmentWriter:
    """Writes into one reservation. Holds the segment's lock until it is closed."""

    def __init__(self, volume: SharedVolume, reservation: Reservation, fd: int) -> None:
        self.reservation = reservation
        self._volume, self._fd = volume, fd
        self._free_slots = list(reversed(reservation.slots))
        self._end = 0

    def room_for_all(self, count: int, nbytes: int) -> bool:
        """Whether so many small values of so many bytes altogether still fit."""
        return len(self._free_slots) >= count and aligned(self._end, 0) + nbytes <= self.reservation.nbytes

    def allocate(self, sizes: Sequence[int]) -> Location:
        """Choose where the next value goes."""
        _, total = layout(sizes)
        offset = aligned(self._end, total)
        assert offset + total <= self.reservation.nbytes
        self._end = offset + total
        return Location(
            segment=self.reservation.segment, offset=offset, slot=self._free_slots.pop(), sizes=tuple(sizes)
        )

    def write(self, location: Location, parts: Parts) -> None:
        """Copy a value's bytes to its location."""
        offsets, total = layout(location.sizes)
        memory = None
        if total >= MAP_BYTES:
            memory = self._volume.known_mapping(self.reservation.segment)
        for offset, part in zip(offsets, parts, strict=True):
            start = location.offset + offset
            if memory is None:
                write_all(self._fd, part, start)
            else:
                _copy_into(memory[start : start + part.size], part)

    def close(self) -> None:
        """Release the segment's lock. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def total_bytes(sizes: Sequence[Sequence[int]]) -> int:
    """How large a reservation must be for values with parts of these sizes, in this order."""
    end = 0
    for each in sizes:
        _, total = layout(each)
        end = aligned(end, total) + total
    return end


def _split(data: Bytes, offsets: Sequence[int], sizes: Sequence[int]) -> Parts:
    return tuple(data[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))


def _read_rows(fd: int, offset: int, index: npt.NDArray[np.int64], width: int) -> Bytes:
    """[rows, width], from a table that begins at an offset of a file; consecutive rows in one call."""
    data = np.empty((len(index), width), dtype=np.uint8)
    ends = [*(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)] if len(index) else []
    start = 0
    for end in ends:
        read_into(fd, data[start:end].reshape(-1), offset + int(index[start]) * width)
        start = end
    return data


def _copy_into(target: Bytes, source: Bytes) -> None:
    """Copy bytes; with torch, which has several threads copy, where the process has it."""
    torch = sys.modules.get("torch")
    if torch is None or not source.flags.writeable:  # torch warns of memory that it may not write
        np.copyto(target, source)
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


def _is_wide(info: ValueInfo) -> bool:
    large = info.kind in ("tensor", "array") and info.nbytes >= MAP_BYTES
    return large and info.nbytes // info.shape[0] >= _WIDE_BYTES


def _missing(ref: ObjectRef) -> KeyMissing:
    return KeyMissing(f"{ref.key!r} is not in store {ref.store!r}: deleted or overwritten")
