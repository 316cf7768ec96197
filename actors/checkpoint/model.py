"""Checkpoints of a model in training, from the side of its ranks.

save    (worker thread)  make room in host memory ──┐   training continues: forward, backward, …
copy    (own thread)     weights, optimizer <───────┘   the optimizer's next step waits for this
write   (own thread)     plan, write, hash, fsync, every rank its own shard, in an own process group
finish  (event loop)     wait for the writing: name -> SHA-256 of this rank's files

load    (worker thread)  read all headers, compare ─> read this rank's parts ─> generators
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from actors.checkpoint.rng import rng_state, seed_all, set_rng_state
from actors.checkpoint.state import HostCopies, Part, blank_optimizer_state, training_parts
from actors.training.ranks import Ranks
from actors.training.updates import TrainLoop
from neoproto.weights.peers import on_all_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from actors.checkpoint.reading import Stored


_NICER = 10
"""How much lower the priority of writing is than that of training, where they share processors."""


class ModelCheckpointer:
    """Saves and restores one model, its optimizer and this process's generators. One per rank.

    `save` and `load` are collective and are not called at the same time; `finish` waits for this rank alone.

    Args:
        model: what is trained.
        loop: its optimizer and count of updates.
        ranks: the ranks that hold it.
        seed: of the generators after a load on another number of ranks.
        timeout_s: bound on every collective of a write.
    """

    def __init__(
        self, model: nn.Module, loop: TrainLoop, ranks: Ranks, *, seed: int = 0, timeout_s: float = 1800.0
    ) -> None:
        self._model, self._loop, self._ranks = model, loop, ranks
        self._seed, self._timeout_s = seed, timeout_s
        self._copies = HostCopies()
        self._own_group: ProcessGroup | None = None
        self._writing: _Writing | None = None
        loop.optimizer.register_step_pre_hook(lambda *_: self._wait_for_copies())

    def save(self, folder: Path, *, timeout: float = math.inf) -> None:
        """Have everything as it is now copied, and written to `folder`, by a thread; see `finish`.

        Only the optimizer's step and `load` change what is saved, so the copying continues while the next
        forward and backward passes run, and the next step waits for it.

        Host memory for one copy is kept from the first save on. The folder is made if need be.

        Args:
            timeout: seconds to wait for a write that is still in progress.

        Raises:
            TimeoutError: that write did not end in time.
            OSError: that write failed, and `finish` has not raised it.
        """
        parts: dict[str, Part] = {}
        copies: dict[str, Part] = {}

        def make_room() -> None:
            self._wait_for_writing(timeout)
            parts.update(training_parts(self._model, self._loop.optimizer.state))
            copies.update(self._copies.room_for(parts))

        on_all_ranks(self._ranks, make_room)
        state = {"updates": self._loop.updates, "rng": rng_state(self._ranks.device)}
        group = self._group()

        def write() -> dict[str, str]:
            # Late: importing it takes seconds, and the controller imports this module.
            from actors.checkpoint.files import write_checkpoint

            return write_checkpoint(folder, copies, state, self._ranks, group)

        self._writing = _Writing(lambda: self._copies.fill(copies, parts), write)

    async def finish(self) -> dict[str, str]:
        """Wait until this rank's files of the last save are on the disk; the same answer every time.

        Returns:
            SHA-256 in hexadecimal by file name.

        Raises:
            OSError: writing failed, here or on another rank; names the file.
            RuntimeError: nothing was saved.
        """
        if self._writing is None:
            raise RuntimeError("no checkpoint was saved, so there is none to finish")
        return await self._writing.result()

    def load(self, folder: Path, *, timeout: float = math.inf) -> None:
        """Restore what `save` wrote.

        With as many ranks as saved it everything continues bit for bit. With another number, weights and
        optimizer are divided again, and generators seeded from the seed, the count of updates and the rank.
        The optimizer's hyper-parameters are the configured ones; its learning rate follows from the count.

        Args:
            timeout: as for `save`.

        Raises:
            TimeoutError, OSError: as for `save`.
            ConfigError: a file is missing or damaged; nothing was changed.
            WeightMismatch: it is of another model; names what differs; nothing was changed.
        """
        from actors.checkpoint.reading import open_checkpoint, read_checkpoint

        model, optimizer = self._model, self._loop.optimizer
        stored: Stored | None = None
        blank: dict[Tensor, dict[str, Tensor]] = {}
        parts: dict[str, Part] = {}

        def prepare() -> None:
            nonlocal stored
            self._wait_for_writing(timeout)
            stored = open_checkpoint(folder)
            blank.update(blank_optimizer_state(model, optimizer, stored.names))
            parts.update(training_parts(model, blank))
            stored.check(parts)

        on_all_ranks(self._ranks, prepare)
        assert stored is not None
        read_checkpoint(stored, parts, self._ranks, self._group())
        optimizer.state.clear()
        optimizer.state.update(blank)
        self._loop.updates = stored.updates
        if stored.world_size == self._ranks.world_size:
            set_rng_state(stored.states[self._ranks.rank]["rng"], self._ranks.device)
        else:
            seed_all(self._seed, stored.updates, self._ranks.rank)

    def _wait_for_copies(self) -> None:
        """What a step is about to change must have been copied."""
        if self._writing is not None and not self._writing.copied.wait(self._timeout_s):
            raise TimeoutError(f"the state was still being copied for a checkpoint after {self._timeout_s} s")

    def _wait_for_writing(self, timeout: float) -> None:
        """Host memory and process group are in use until the last write is over."""
        if self._writing is not None:
            self._writing.wait(timeout)

    def _group(self) -> ProcessGroup | None:
        """The ranks, for writing: a collective of the training meanwhile must not meet one of a write."""
        if self._ranks.world_size > 1 and self._own_group is None:
            self._own_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        return self._own_group


class _Writing:
    """One write, on a thread that ends with it; the process does not wait for the thread when it exits.

    Attributes:
        copied: set once `copy` has ended.
    """

    def __init__(self, copy: Callable[[], None], write: Callable[[], dict[str, str]]) -> None:
        self._asked = False
        self.copied = threading.Event()
        self._written: concurrent.futures.Future[dict[str, str]] = concurrent.futures.Future()
        self._written.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        threading.Thread(
            target=self._run, args=(copy, write), name="neoproto-checkpoint", daemon=True
        ).start()

    def _run(self, copy: Callable[[], None], write: Callable[[], dict[str, str]]) -> None:
        try:
            try:
                copy()  # at the training's own priority, which may wait for it
            finally:
                self.copied.set()
            own = threading.get_native_id()  # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
            self._written.set_result(write())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._written.set_exception(error)

    def wait(self, timeout: float) -> None:
        """Wait until it is over. Raises what it raised, unless that was raised before."""
        if concurrent.futures.wait([self._written], None if timeout == math.inf else timeout).not_done:
            raise TimeoutError(f"the last checkpoint is still being written after {timeout:.1f} s")
        if not self._asked:
            self._asked = True
            self._written.result()

    async def result(self) -> dict[str, str]:
        """Its result, or what it raised."""
        try:
            return await asyncio.wrap_future(self._written)
        finally:
            self._asked = self._written.done()
