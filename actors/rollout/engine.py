"""A rollout engine: what the worker calls, in one of two forms.

    RolloutWorker ──async──> RolloutEngine                  answers callers that overlap, takes weights
                             └ EngineThread ──> StepEngine  one of them: a thread that steps an engine

An engine in this process that advances all its requests by one step at a time is a `StepEngine`; whatever has
an event loop or a process of its own (a server, say) is a `RolloutEngine`. `neoproto.rollout.engines` has an
entry for each; `actors.rollout.engine_thread.build_engine` makes one from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from actors.rollout.continuation import Partial
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.weights import ServingEngine, TensorLayout, WeightVersion


class StepEngine(Protocol):
    """A generation engine that advances all its requests by one step at a time.

    It is made and used in one thread (`EngineThread`). Each token of an answer has the number of the weight
    version that drew it (`Generation.weight_versions`): 0 until the first load, then that of the version
    loaded last. What a request is answered depends on its prompt, its sampling, its seed and the weights, and
    on no other request.
    """

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def add(self, request_id: str, request: GenerateRequest) -> None:
        """Admit a request. Raises ValueError for one it can never serve: a prompt and `max_tokens` that are
        longer together than `max_model_len`, say, since a cut answer would pass for a whole one."""
        ...

    def step(self) -> list[tuple[str, Generation]]:
        """Advance; the requests that finished in this step.

        Every request that was added and not aborted or interrupted is returned once. An error ends the
        engine.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown or finished ones are ignored."""
        ...

    def interrupt(self) -> dict[str, Partial]:
        """Drop all unfinished requests; what each had been answered so far, down to the last token."""
        ...

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless weights of this layout can be loaded; `what` names them."""
        ...

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights and drop every cached state of the old ones.

        Unfinished requests continue with the new weights, all their state computed again.

        Args:
            tensors: by name, as `check_layout` was asked. Some are views of shared memory that is reused once
                this returns: what is kept is copied. Names that are tied to another come too, and may be
                skipped.

        Raises:
            WeightMismatch: some weights were not replaced. The engine is not used again after an error.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTimes:
    """Seconds since the engine was built.

    Attributes:
        paused, last_paused: all pauses and the last one, from the last step before to where stepping went
            on; without the time that requests in flight were given to end.
        loading, last_loading: the same for loads, inside the engine's thread.
    """

    paused: float = 0.0
    last_paused: float = 0.0
    loading: float = 0.0
    last_loading: float = 0.0


class RolloutEngine(ServingEngine, Protocol):
    """What a rollout worker has: it generates for callers that overlap, and takes weights.

    Its coroutines belong to one event loop. After `fail`, or an error of its own, every call raises
    `EngineFailed` or `RolloutError`: half-loaded weights never answer.
    """

    @property
    def version(self) -> WeightVersion:
        """The weights it serves; 0.0, those it was built with, before the first load."""
        ...

    @property
    def times(self) -> EngineTimes:
        """How long it stood still, and loaded."""
        ...

    async def wait_open(self) -> None:
        """Wait until it is not paused; it stays so until the caller awaits something else."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One generation per request, in the order of the requests; waits while the engine is paused.

        Cancelling the caller drops its requests.
        """
        ...
