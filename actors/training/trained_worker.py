"""What policy and critic workers share: a model in training that is saved and restored."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from actors.checkpoint.model import ModelCheckpointer
from actors.dispatch import REPLICATED
from actors.training.torch_worker import TorchOptions, TorchWorker
from actors.training.updates import TrainLoop
from neoproto.runtime import Dispatch, register

ANSWER_S = 2.0
"""What of a call's time is kept back for reporting an error."""


class TrainedWorker(TorchWorker):
    """A worker with one model in training; a subclass sets it with `_trains` when it is built."""

    _checkpointer: ModelCheckpointer

    def _trains(self, model: nn.Module, loop: TrainLoop, options: TorchOptions) -> None:
        self._checkpointer = ModelCheckpointer(
            model, loop, self.ranks, seed=options.seed, timeout_s=options.collective_timeout_s
        )

    @register(dispatch_mode=REPLICATED)
    def save_checkpoint(self, folder: str) -> None:
        """Have weights, optimizer and generators as they are now copied and written to `folder`, by a thread.

        Training may continue when this returns; the next optimizer step waits for the copy, not the write.
        Every rank writes its own shard; all must see the folder.

        Raises:
            TimeoutError: the last checkpoint was still being written when this call's time ran out.
            OSError: writing the last one failed, and `finish_checkpoint` has not raised it.
        """
        self._checkpointer.save(Path(folder), timeout=self._patience())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def finish_checkpoint(self) -> dict[str, str]:
        """Wait until this rank's files are on the disk: their SHA-256 by their names in the folder.

        May be called again, and while the rank trains.

        Raises:
            OSError: writing failed on this rank, or on another; names the file.
            RuntimeError: nothing was saved.
        """
        return await self._checkpointer.finish()

    @register(dispatch_mode=REPLICATED)
    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` wrote, on any number of ranks; see `ModelCheckpointer.load`.

        Raises:
            ConfigError: a file is missing or damaged; nothing was changed.
            WeightMismatch: it is of another model; names what differs; nothing was changed.
        """
        self._checkpointer.load(Path(folder), timeout=self._patience())

    def _patience(self) -> float:
        return max(self.remaining() - ANSWER_S, 0.0)
