"""A `StepEngine` that answers from arithmetic: no model, no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from actors.rollout.continuation import Partial
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.weights import TensorLayout, WeightVersion, check_layout

EOS = 2


def length_of(request: GenerateRequest) -> tuple[int, bool]:
    """How many tokens the answer has, and whether it ends with an end token."""
    most = request.sampling.max_tokens
    length = 1 + (request.seed + sum(request.prompt_ids)) % (most + 1)
    return min(length, most), length <= most


def token(request: GenerateRequest, version: int, place: int) -> int:
    """The token at `place` of the answer, if it is drawn on `version`."""
    length, stopped = length_of(request)
    return EOS if stopped and place == length - 1 else 3 + (request.seed + version + place) % 40


def answer(request: GenerateRequest, *versions: int) -> Generation:
    """1 to `max_tokens` tokens that depend on the prompt, the seed and the weight versions only.

    Args:
        versions: of each token; the last one is that of all further tokens.
    """
    length, stopped = length_of(request)
    drawn = (*versions, *versions[-1:] * length)[:length]
    return Generation(
        uid=request.uid,
        sample_index=request.sample_index,
        prompt_ids=request.prompt_ids,
        token_ids=tuple(token(request, version, place) for place, version in enumerate(drawn)),
        log_probs=tuple(-0.5 - place for place in range(length)),
        loss_mask=(1,) * length,
        weight_versions=drawn,
        finish_reason="stop" if stopped else "length",
    )


class FakeEngine:
    """Each step draws one token of every request, on the version of that moment.

    Attributes:
        on_step: called at the beginning of each step, with the number of requests in flight.
        aborted: ids that were aborted.
    """

    def __init__(self) -> None:
        self.layout: dict[str, TensorLayout] = {"w": TensorLayout(dtype="float32", shape=(2,))}
        self.version = 0
        self.running: dict[str, tuple[GenerateRequest, list[int]]] = {}
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
        self.running[request_id] = (request, [])

    def step(self) -> list[tuple[str, Generation]]:
        self.threads.add(threading.get_ident())
        self.on_step(len(self.running))
        done = []
        for request_id, (request, versions) in list(self.running.items()):
            versions.append(self.version)
            if len(versions) == length_of(request)[0]:
                del self.running[request_id]
                done.append((request_id, answer(request, *versions)))
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def interrupt(self) -> dict[str, Partial]:
        found = {}
        for request_id, (request, versions) in self.running.items():
            made = answer(request, *versions) if versions else None
            count = len(versions)
            found[request_id] = (
                Partial()
                if made is None
                else Partial(
                    token_ids=made.token_ids[:count],
                    log_probs=made.log_probs[:count],
                    weight_versions=made.weight_versions[:count],
                )
            )
        self.running.clear()
        return found

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        check_layout(layout, self.layout, what=what)

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.threads.add(threading.get_ident())
        self.loaded = dict(tensors)
        self.on_load()
        self.version = version.n
