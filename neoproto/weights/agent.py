from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from neoproto.weights.manifest import TensorLayout
from neoproto.weights.version import WeightVersion

PauseMode = Literal["abort", "keep"]


class ServingEngine(Protocol):
    """A replica's engine, as the agent sees it; `actors.engine.EngineThread` is one."""

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless weights of this layout can be loaded."""
        ...

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        """Stop generating; new requests wait. Those in flight are given `drain_s` seconds to end first."""
        ...

    async def load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights. Nothing reads the tensors after it returns or raises, cancelled or not."""
        ...

    async def resume(self) -> None:
        """Go on generating, if it was paused."""
        ...

    async def fail(self, cause: BaseException) -> None:
        """End the engine; it answers nothing from now on."""
        ...
