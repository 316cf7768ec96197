"""Values that their writer makes in place: no copy of its own is put.

    reserve ──> Draft: memory, written here and, by its `Space`s, in other processes of the host
                  ├──commit──> references
                  └──discard, or the writer is gone──> taken back

A draft's values are bytes: a one-dimensional uint8 tensor each. Memory that was written before is mapped
already when it comes again, so writing it costs no page faults.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from neoproto.errors import StoreError
from neoproto.store.base import ObjectRef, Place, ValueInfo
from neoproto.store.local import Pen, SharedVolume
from neoproto.store.pool import Grant
from neoproto.store.shm import map_shared, path_of
from neoproto.store.torchstore.putter import Written, new_generation
from neoproto.store.wire import Gone

if TYPE_CHECKING:
    from neoproto.store.base import ObjectStore
    from neoproto.store.torchstore.client import StoreClient

_MAPPINGS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Where a value of a draft goes; travels to other processes of the host.

    Attributes:
        key: its key.
        grant: the memory reserved for it.
        nbytes: its size.
    """

    key: str
    grant: Grant
    nbytes: int


class OpenSpaces:
    """The memory of spaces, open for writing in this process.

    Attributes:
        buffers: one a space, uint8 [nbytes], shared with every process that has the space open. Not to be
            used after `close`.
    """

    def __init__(self, buffers: list[torch.Tensor], pens: list[Pen]) -> None:
        self.buffers = buffers
        self._pens = pens

    def close(self) -> None:
        """Let go of the memory. Closing twice is harmless."""
        for pen in self._pens:
            pen.close()


class Draft(OpenSpaces):
    """Values under way. Ends with `commit` or `discard`."""

    def __init__(
        self, drafts: Drafts, spaces: tuple[Space, ...], buffers: list[torch.Tensor], pens: list[Pen]
    ) -> None:
        super().__init__(buffers, pens)
        self.spaces = spaces
        self._drafts = drafts

    def commit(self) -> list[ObjectRef]:
        """Make the values readable, all at once or none; nobody writes into them any more.

        Raises:
            StoreError: the store did not take note of them; nothing of them remains.
        """
        return self._drafts.commit(self)

    def discard(self) -> None:
        """Give the memory back."""
        self.close()
        self._drafts.give_back(self.spaces)


class Drafts:
    """Makes drafts in the shared memory of one client's volume. Made by `StoreClient.drafts`."""

    def __init__(self, client: StoreClient, memory: SharedVolume) -> None:
        self._client, self._memory = client, memory
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[str, torch.Tensor] = collections.OrderedDict()

    @property
    def volume(self) -> str:
        """The volume whose host's processes can open the spaces."""
        return self._client.volume

    def start(self, sizes: Mapping[str, int]) -> Draft:
        """Reserve memory for values: key -> bytes, each > 0.

        Raises:
            StoreFull: they do not fit; nothing is reserved.
        """
        keys = list(sizes)
        what = f"draft of {keys[0]!r}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        wanted = [(nbytes, 1) for nbytes in sizes.values()]
        grants = self._client.run(self._client.reserve(what, wanted, []))
        spaces = tuple(
            Space(key=key, grant=grant, nbytes=nbytes)
            for (key, nbytes), grant in zip(sizes.items(), grants, strict=True)
        )
        try:
            opened = self.open(spaces)
        except BaseException:
            self.give_back(spaces)
            raise
        return Draft(self, spaces, opened.buffers, opened._pens)

    def open(self, spaces: Sequence[Space]) -> OpenSpaces:
        """Open spaces that a process of this host reserved.

        Raises:
            StoreError: they were taken back meanwhile.
        """
        pens: list[Pen] = []
        try:
            for space in spaces:
                pens.append(self._memory.pen(space.grant))
            buffers = [self._mapping(space.grant.segment)[: space.nbytes] for space in spaces]
        except BaseException:
            for pen in pens:
                pen.close()
            raise
        return OpenSpaces(buffers, pens)

    def commit(self, draft: Draft) -> list[ObjectRef]:
        """See `Draft.commit`."""
        refs = [
            ObjectRef(
                store=self._client.name,
                key=space.key,
                volume=self.volume,
                info=ValueInfo(kind="tensor", dtype="uint8", shape=(space.nbytes,), nbytes=space.nbytes),
                generation=new_generation(),
                place=Place(
                    segment=space.grant.segment, offset=0, slot=space.grant.slots[0], sizes=(space.nbytes,)
                ),
            )
            for space in draft.spaces
        ]
        slots = [space.grant.slots[0] for space in draft.spaces]
        self._memory.publish(slots, [ref.generation for ref in refs])
        written = Written(refs, [space.grant.token for space in draft.spaces], draft._pens)
        try:
            self._client.run(self._client.tell(f"draft of {refs[0].key!r}", written))
        except BaseException:
            # Their words are set, so retiring the reservations alone would keep them.
            with contextlib.suppress(StoreError):
                self._client.run(self._client.drop([_gone(ref) for ref in refs]))
            raise
        self._client.counters.puts += len(refs)
        self._client.counters.bytes_in += sum(space.nbytes for space in draft.spaces)
        return refs

    def give_back(self, spaces: Sequence[Space]) -> None:
        """End reservations; a volume that cannot be told takes back by itself what nobody locks."""
        with contextlib.suppress(StoreError):
            tokens = [space.grant.token for space in spaces]
            self._client.run(self._client.reserve("giving memory back", [], tokens))

    def _mapping(self, segment: str) -> torch.Tensor:
        """A segment's memory, mapped once and kept: its pages are there when it is written again."""
        with self._lock:
            memory = self._mapped.get(segment)
            if memory is None:
                # Through a file opened anew: a mapping would keep the lock of the pen's.
                fd = os.open(path_of(segment), os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = torch.from_numpy(map_shared(fd, os.fstat(fd).st_size))
                finally:
                    os.close(fd)
                self._mapped[segment] = memory
                if len(self._mapped) > _MAPPINGS:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(segment)
            return memory


def _gone(ref: ObjectRef) -> Gone:
    assert ref.place is not None
    return Gone(key=ref.key, generation=ref.generation, volume=ref.volume, slot=ref.place.slot)


def drafts_of(store: ObjectStore) -> Drafts | None:
    """What makes drafts in the store's shared memory; None if this process has none to write to."""
    make = getattr(store, "drafts", None)
    drafts: Drafts | None = make() if callable(make) else None
    return drafts
