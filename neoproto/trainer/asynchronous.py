"""The asynchronous trainers: rollout runs ahead of training, on devices of its own.

    prompts ─feeder─> queue ─dispatcher─> replicas ─> replay buffer ─sample─> learn ─> publish
                 ▲                           │ load                             │         │
                 └── next batch, step ends ──┼──────────────────────────────────┘         │
                                             └──────────── weight versions <──────────────┘

The two modes differ in the last arrow only. In `separate_async` the trainer stops all replicas, has them
load, and waits; in `decoupled_async` it publishes and continues, and replicas load when they choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from neoproto.trainer.checkpoint.resume import RolloutProgress
from neoproto.trainer.checkpoint.rollout_state import RolloutSnapshot, restore_rollout
from neoproto.trainer.checkpoint.saving import CheckpointContext, Checkpointer
from neoproto.trainer.dispatcher import Dispatcher
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.metrics.store import store_metrics
from neoproto.trainer.prompt_queue import PromptFeeder, PromptQueue
from neoproto.trainer.protocols import ServingReplica
from neoproto.trainer.replay_buffer import ReplayBuffer
from neoproto.trainer.step import learn
from neoproto.trainer.tasks import must_go_on, owned_tasks
from neoproto.trainer.weight_flow import DrivenFlow, PulledFlow, ServingStatus, WeightFlow
from neoproto.weights.version import required_version

_HEALTH_CHECK_S = 1.0


class AsyncTrainer:
    """Owns the loops of `separate_async` and `decoupled_async`.

    Args:
        status: which weights each replica serves, by name.
        replicas: of rollout. The caller of the trainer keeps them alive.
    """

    def __init__(
        self, parts: TrainingParts, status: ServingStatus, replicas: Sequence[ServingReplica]
    ) -> None:
        self._parts, self._status, self._replicas = parts, status, tuple(replicas)
        self._options = parts.config.async_options
        self._batch_size = parts.config.data.train_batch_size
        ahead = (1 + self._options.num_warmup_batches) * self._batch_size
        inflight = self._options.max_inflight_prompts or ahead
        buffer = parts.config.trainer.replay_buffer
        self._queue = PromptQueue(max_inflight_prompts=inflight, max_tries=buffer.max_tries)
        self._feeder = PromptFeeder(self._queue, parts.prompts.next_batch)
        self._buffer = ReplayBuffer(
            self._queue,
            n=parts.config.actor_rollout_ref.rollout.n,
            epoch=parts.start.epoch,
            max_off_policy_threshold=buffer.max_off_policy_threshold,
            strategy=buffer.max_off_policy_strategy,
            refill=self._feed,
            poll_interval=_HEALTH_CHECK_S,
        )
        self._dispatcher = Dispatcher(
            self._queue,
            self._buffer,
            self._replicas,
            status.serving,
            max_inflight_prompts=inflight,
            max_per_call=self._options.dispatch_batch_size,
            poll_interval=self._options.dispatch_poll_interval,
            timeout=parts.config.trainer.timeouts.generate,
            version_aware=parts.config.trainer.decoupled_async.version_aware_routing,
        )
        self._step = parts.start.step
        self._batches_left = parts.total_steps - self._step
        self._wanted = parts.start.version

    async def run(self) -> TrainingResult:
        """Train up to `total_steps` steps, from where the run starts.

        Consumes: nothing. Waits for: the training loop. Produces: the result. Unblocked by: the end of
        training, or the failure of any loop, which ends the others and is raised as itself.
        """
        async with owned_tasks() as tasks:
            flow = self._flow(tasks)
            dispatching = tasks.create_task(must_go_on("the dispatcher", self._dispatcher.run()))
            await self._train(flow, Checkpointer(self._parts, tasks))
            dispatching.cancel()
        return self._parts.recorder.result()

    async def _train(self, flow: WeightFlow, saver: Checkpointer) -> None:
        """The training loop.

        Consumes: finished groups. Waits for: a batch of them, and worker calls. Produces: weight versions,
        prompts to generate, metrics, checkpoints. Unblocked by: enough groups, a result, an error, or a
        deadline.
        """
        parts, start = self._parts, self._parts.start
        on_their_way = self._restore()
        await flow.publish().committed(PhaseClock(), self._options.init_timeout)
        if start.step == 0 and parts.validator.due(0):
            await parts.validator.run(0)
        for _ in range(1 + self._options.num_warmup_batches - on_their_way):
            self._feed_batch()
        for step in range(start.step + 1, parts.total_steps + 1):
            await self._train_step(step, flow)
            if parts.validator.due(step):
                await flow.newest.committed(PhaseClock())
                await parts.validator.run(step)
            if saver.due(step):
                await saver.save(step, lambda: self._checkpoint_context(flow))
        await saver.finished()

    async def _train_step(self, step: int, flow: WeightFlow) -> None:
        parts, clock, limits = self._parts, PhaseClock(), self._parts.config.trainer.timeouts
        self._step = step
        sampled = await clock.wait(
            "gen",
            self._buffer.sample(self._batch_size, flow.newest.version, timeout=limits.generate),
        )
        sampled.batch.meta_info = {
            "step": step,
            "validate": False,
            "keep_text": parts.sample_log.on,
        }
        batch, metrics = await learn(parts.workers, sampled.batch, parts.settings, clock)
        if step % self._options.parameter_sync_step == 0 or parts.validator.due(step):
            await self._hand_out_weights(flow, clock)
        self._feed_batch()
        samples = len(batch)
        tickets = [group.ticket for group in sampled.groups]
        parts.prompt_log.log(step, [one.uid for one in tickets], [one.serial for one in tickets])
        parts.sample_log.log(step, batch)
        self._buffer.done(sampled, batch)
        metrics |= sampled.metrics | await store_metrics()
        parts.recorder.step(step, metrics, clock, samples)

    async def _hand_out_weights(self, flow: WeightFlow, clock: PhaseClock) -> None:
        """Publish; then either make the replicas load, or leave that to them."""
        with clock.phase("update_weights"):
            ticket = flow.publish()
        if self._parts.config.trainer.mode == "separate_async":
            await ticket.committed(clock)
            self._wanted = ticket.version
        else:
            decoupled = self._parts.config.trainer.decoupled_async
            self._wanted = required_version(
                ticket.version,
                min_version_lag=decoupled.min_version_lag,
                prompt_version_lag=decoupled.prompt_version_lag,
            )

    def _feed_batch(self) -> None:
        """Enqueue a batch, unless all that training needs are on their way."""
        if self._batches_left > 0:
            self._batches_left -= 1
            self._feed(self._batch_size)

    def _feed(self, count: int) -> None:
        self._feeder.feed(count, enqueue_step=self._step, min_weight_version=self._wanted)

    def _checkpoint_context(self, flow: WeightFlow) -> CheckpointContext:
        """Queue, feeder and buffer as they are now, for a checkpoint."""
        batches = self._parts.total_steps - self._batches_left
        return CheckpointContext(
            version=flow.newest.version,
            progress=RolloutProgress(batches=batches, wanted=self._wanted),
            rollout=RolloutSnapshot(self._queue, self._feeder, self._buffer),
        )

    def _restore(self) -> int:
        """Take queue, feeder and buffer from the checkpoint; how many batches of prompts are in them."""
        start = self._parts.start
        if start.checkpoint is None or start.state is None or start.state.rollout is None:
            return 0
        restore_rollout(start.checkpoint.path, self._queue, self._feeder, self._buffer)
        progress = start.state.rollout
        self._wanted = progress.wanted
        self._batches_left = self._parts.total_steps - progress.batches
        return progress.batches - start.step

    def _flow(self, tasks: asyncio.TaskGroup) -> WeightFlow:
        workers, limit = self._parts.workers, self._parts.config.trainer.timeouts.weights
        if self._parts.config.trainer.mode == "separate_async":
            return DrivenFlow(workers, tasks, limit=limit, first=self._parts.start.version)
        names = [replica.name for replica in self._replicas]
        first = self._parts.start.version
        return PulledFlow(workers, tasks, self._status, names, limit=limit, first=first)
