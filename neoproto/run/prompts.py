"""Prompts as the trainer wants them: encoded rows on one side, batches in the run's store on the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from neoproto.data import DataProto
from neoproto.data.prompts import EncodedPrompts, PromptColumns, PromptLoader


class RunPrompts:
    """The `PromptSource` of a run.

    Args:
        loader: walks through the training prompts.
        validation: the held-out prompts; None without any.
        val_batch_size: prompts a validation batch; None takes all at once.
    """

    def __init__(
        self, loader: PromptLoader, validation: EncodedPrompts | None, val_batch_size: int | None
    ) -> None:
        self._loader, self._validation, self._val_batch_size = loader, validation, val_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self._loader.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    @property
    def has_validation(self) -> bool:
        return self._validation is not None

    def next_batch(self) -> DataProto:
        return as_batch(self._loader.next_batch())

    def validation_batches(self) -> Iterator[DataProto]:
        if self._validation is not None:
            for columns in self._validation.batches(self._val_batch_size or len(self._validation)):
                yield as_batch(columns)


def as_batch(columns: PromptColumns) -> DataProto:
    """The columns as a batch of the active store."""
    return DataProto.from_dict(tensors=columns.tensors, non_tensors=columns.non_tensors)
