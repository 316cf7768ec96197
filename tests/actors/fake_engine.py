"""A `StepEngine` that answers from arithmetic: no model, no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from neoproto.data.generation import GenerateRequest, Generation
from neoproto.weights import TensorLayout, WeightVersion, check_layout

EOS = 2


def answer(request: GenerateRequest, version: int) -> Generation:
    """1 to `max_tokens` tokens that depend on the prompt, the seed and the weight version only."""
    most = request.sampling.max_tokens
    length = 1 + (request.seed + sum(request.prompt_ids)) % (most + 1)
    stopped = length <= most
    length = min(length, most)
    tokens = tuple(3 + (request.seed + version + place) % 40 for place in range(length))
    if stopped:
        tokens = (*tokens[:-1], EOS)
    return Generation(
        uid=request.uid,
        sample_index=request.sample_index,
        prompt_ids=request.prompt_ids,
        token_ids=tokens,
        log_probs=tuple(-0.5 - place for place in range(length)),
        loss_mask=(1,) * length,
        weight_versions=(version,) * length,
        finish_reason="stop" if stopped else "length",
    )


class FakeEngine:
    """Each step finishes the requests that have been in for as many steps as they have tokens.

    Attributes:
        on_step: called at the beginning of each step, with the number of requests in flight.
        aborted: ids that were aborted.
    """

    def __init__(self) -> None:
        self.layout: dict[str, TensorLayout] = {"w": TensorLayout(dtype="float32", shape=(2,))}
        self.version = 0
        self.running: dict[str, tuple[GenerateRequest, int]] = {}
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.on_step: Callable[[int], None] = lambda running: None
        self.on_load: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request_id: str, request: GenerateRequest) -> None:
        self.threads.add(threading.get_ident())
        if len(request.prompt_ids) > 100:
            raise ValueError("too long")
        self.running[request_id] = (request, 0)

    def step(self) -> list[tuple[str, Generation]]:
        self.threads.add(threading.get_ident())
        self.on_step(len(self.running))
        done = []
        for request_id, (request, steps) in list(self.running.items()):
            made = answer(request, self.version)
            if steps + 1 >= len(made.token_ids):
                del self.running[request_id]
                done.append((request_id, made))
            else:
                self.running[request_id] = (request, steps + 1)
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        check_layout(layout, self.layout, what=what)

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.threads.add(threading.get_ident())
        self.on_load()
        self.loaded = dict(tensors)
        self.version = version.n
