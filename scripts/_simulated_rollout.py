"""Workers that take the time real ones would, on a virtual clock, and compute nothing.

Generation is a log-normal time a prompt, in a fixed number of slots a replica; what does not fit waits. A
load freezes the slots, and what was in them goes on with the new weights. Weights are versions without bytes,
but registry, leases and update agents are the real ones.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _virtual_time import VirtualLoop

from neoproto.data import DataProto
from neoproto.store import MemoryStore
from neoproto.weights import Manifest, WeightRegistry, WeightVersion
from neoproto.weights.agent import UpdateAgent
from neoproto.weights.options import PauseMode, UpdateOptions
from neoproto.weights.puller import Puller

R = 4
"""Response tokens of a simulated answer: enough to carry its weight versions."""
LEASE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds.

    Attributes:
        train: a training step.
        generate, sigma: median of a prompt's log-normal time in a slot, and the shape of the distribution.
        prefetch, load: reading a version while generating, and standing still to load it.
        driven_sync: standing still, reading included, where the trainer has all replicas load.
    """

    train: float = 5.0
    generate: float = 3.0
    sigma: float = 0.6
    prefetch: float = 2.0
    load: float = 1.0
    driven_sync: float = 1.35

    @property
    def mean_generate(self) -> float:
        return self.generate * float(np.exp(self.sigma**2 / 2))


@dataclass(slots=True, order=True)
class _Request:
    """`ends` is in seconds of generation of its engine, pauses left out."""

    ends: float
    number: int
    seconds: float = field(compare=False)
    versions: list[WeightVersion] = field(compare=False)
    done: asyncio.Future[list[WeightVersion]] = field(compare=False)


class Engine:
    """A replica's engine; a `ServingEngine` of the update agent's."""

    def __init__(self, slots: int, load_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots, self._load_s = slots, load_s
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._numbers = 0
        self._worked, self._since = 0.0, self._loop.time()
        self._frozen = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self.version: WeightVersion | None = None
        self.busy = 0.0  # slot-seconds of generation

    async def generate(self, seconds: float) -> list[WeightVersion]:
        """The versions that an answer of so many seconds was generated on, in order."""
        self._numbers += 1
        request = _Request(0.0, self._numbers, seconds, [], self._loop.create_future())
        self._waiting.append(request)
        self._advance()
        return await request.done

    async def check_layout(self, layout: Mapping[str, Any], what: str) -> None:
        """Weights without tensors fit any engine."""

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        self._closed = True
        if drain_s > 0 and self._running:
            self._emptied.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await self._emptied.wait()
            except TimeoutError:
                pass
        self._advance()
        self._frozen = True

    async def load(self, version: WeightVersion, tensors: Mapping[str, Any]) -> None:
        await asyncio.sleep(self._load_s)
        self.version = version
        for request in self._running:
            request.versions.append(version)

    async def resume(self) -> None:
        self._since = self._loop.time()
        self._frozen = self._closed = False
        self._advance()

    async def fail(self, cause: BaseException) -> None:
        raise RuntimeError("a simulated engine does not fail") from cause

    def _advance(self) -> None:
        """Bring the slots up to date: end what has ended, start what waits, set the timer."""
        if self._frozen:
            return
        now = self._loop.time()
        self.busy += len(self._running) * (now - self._since)
        self._worked, self._since = self._worked + now - self._since, now
        while self._running and self._running[0].ends <= self._worked + 1e-9:
            request = heapq.heappop(self._running)
            if not request.done.done():
                request.done.set_result(request.versions)
        open_slots = 0 if self._closed else self._slots - len(self._running)
        while open_slots > 0 and self.version is not None and self._waiting:
            open_slots -= 1
            request = self._waiting.popleft()
            request.ends, request.versions = self._worked + request.seconds, [self.version]
            heapq.heappush(self._running, request)
        if not self._running:
            self._emptied.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            self._timer = self._loop.call_at(now + self._running[0].ends - self._worked, self._advance)


class SimulatedPuller(Puller):
    """Leases a version as the real one does; reading it takes so many seconds."""

    def __init__(self, registry: WeightRegistry, holder: str, seconds: float) -> None:
        super().__init__(MemoryStore(), registry, holder, LEASE_S)
        self._seconds = seconds

    async def _read(self, lease: Any, select: Any) -> dict[str, torch.Tensor]:
        await asyncio.sleep(self._seconds)
        return {}


class SimulatedReplica:
    """An engine and the real update agent beside it."""

    def __init__(
        self,
        registry: WeightRegistry,
        name: str,
        *,
        slots: int,
        times: Times,
        driven: bool,
        options: UpdateOptions,
        seed: int,
    ) -> None:
        self.name = name
        load, prefetch = (times.driven_sync, 0.0) if driven else (times.load, times.prefetch)
        self.engine = Engine(slots, load)
        self.agent = UpdateAgent(
            registry, SimulatedPuller(registry, name, prefetch), self.engine, options, replica=name
        )
        self._draw = random.Random(f"{seed} {name}")
        self._times = times

    async def generate(self, prompts: DataProto) -> DataProto:
        """One answer a prompt."""
        median, sigma = np.log(self._times.generate), self._times.sigma
        answers = await asyncio.gather(
            *(self.engine.generate(self._draw.lognormvariate(median, sigma)) for _ in range(len(prompts)))
        )
        return answer_batch(prompts, answers)


def answer_batch(prompts: DataProto, answers: Sequence[Sequence[WeightVersion]]) -> DataProto:
    """The columns of answers of R tokens; each version generated at least one of them."""
    rows = len(answers)
    versions = torch.tensor(
        [
            [answer[min(token, len(answer) - 1)].n for token in range(R - 1)] + [answer[-1].n]
            for answer in answers
        ]
    )
    asked = torch.ones(rows, 1, dtype=torch.int64)
    mask = torch.ones(rows, R, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "responses": mask,
            "response_mask": mask,
            "attention_mask": torch.cat([asked, mask], dim=1),
            "rollout_log_probs": -mask.float(),
            "weight_versions": versions,
            "truncated": torch.zeros(rows, dtype=torch.bool),
        },
        non_tensors={"uid": prompts["uid"]},
        meta_info=dict(prompts.meta_info),
    )


Method = Callable[..., Awaitable[Any]]


class SimulatedGroup:
    """A worker group: its methods run on the account of the workers, in one order if `serial`."""

    def __init__(
        self,
        name: str,
        methods: Mapping[str, Method],
        *,
        ranks: Sequence[Mapping[str, Method]] = (),
        serial: bool = False,
    ) -> None:
        self.name, self.world_size = name, max(1, len(ranks))
        self._methods, self._ranks = methods, ranks
        self._turn = asyncio.Lock() if serial else None

    def rank(self, rank: int) -> SimulatedGroup:
        return SimulatedGroup(f"{self.name}[{rank}]", self._ranks[rank])

    def handle(self, timeout: float | None = None) -> Any:
        """Its methods as a handle's, each with this many seconds."""
        return _Handle(self, timeout)

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.on(self.name, self._run(self._methods[method], args, timeout))

    async def _run(self, method: Method, args: Sequence[Any], timeout: float | None) -> Any:
        async with asyncio.timeout(timeout):
            if self._turn is None:
                return await method(*args)
            async with self._turn:
                return await method(*args)


class _Handle:
    def __init__(self, group: SimulatedGroup, timeout: float | None) -> None:
        self.group, self._timeout, self.within = group, timeout, group.handle

    def __getattr__(self, method: str) -> Callable[..., asyncio.Task[Any]]:
        return lambda *args: self.group.submit(method, args, timeout=self._timeout)


class Trainee:
    """The policy's ranks: training takes time, publishing only what the registry and leases take.

    Attributes:
        busy: seconds of training.
    """

    def __init__(self, registry: WeightRegistry, times: Times, num_slots: int) -> None:
        self._registry, self._times, self._num_slots = registry, times, num_slots
        self._published: deque[WeightVersion] = deque()
        self.busy = 0.0

    async def update_actor(self, batch: DataProto) -> dict[str, float]:
        await asyncio.sleep(self._times.train)
        self.busy += self._times.train
        return {"actor/pg_loss": 0.0}

    async def compute_log_prob(self, batch: DataProto) -> DataProto:
        ones = torch.ones(len(batch), R)
        return DataProto.from_dict(tensors={"old_log_probs": -ones, "entropys": ones})

    async def publish_weights(self, version: WeightVersion) -> Manifest:
        """As a real publisher: the oldest version makes room first, once nobody reads it."""
        if len(self._published) == self._num_slots:
            oldest = self._published.popleft()
            await self._registry.retire(oldest)
            held = await self._registry.wait_reclaimed(oldest, LEASE_S)
            if held:
                raise TimeoutError(f"{oldest} is held by {held}")
        manifest = Manifest(version=version, entries=(), buckets=(), bucket_bytes=())
        await self._registry.publish(manifest)
        self._published.append(version)
        return manifest


async def score(batch: DataProto) -> DataProto:
    """The reward worker: right and wrong in turn."""
    scores = torch.zeros(len(batch), R)
    scores[::2, -1] = 1.0
    return DataProto.from_dict(tensors={"token_level_scores": scores})
