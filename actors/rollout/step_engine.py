"""What the engine thread needs of a generation engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from actors.rollout.continuation import Partial
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.weights import TensorLayout, WeightVersion


class StepEngine(Protocol):
    """A generation engine that advances all its requests by one step at a time; not thread-safe."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def add(self, request_id: str, request: GenerateRequest) -> None:
        """Admit a request. Raises ValueError for one it can never serve."""
        ...

    def step(self) -> list[tuple[str, Generation]]:
        """Advance; the requests that finished in this step."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown or finished ones are ignored."""
        ...

    def interrupt(self) -> dict[str, Partial]:
        """Drop all unfinished requests; what each had been answered so far."""
        ...

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless weights of this layout can be loaded."""
        ...

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights and forget every cached state of the old ones.

        Unfinished requests go on with the new weights, all their state computed again.
        """
        ...
