"""The exception tree. Nothing here imports anything else of ours.

User mistakes are `ConfigError` (a `ValueError`): raised before anything is started, naming the field or
file and what was found there. Runtime states are `NeoProtoError`s with a name of their own. `assert` is kept
for our own bugs.

Every class unpickles on another process with its attributes: exceptions cross process borders.
"""

from __future__ import annotations

from collections.abc import Sequence


class NeoProtoError(RuntimeError):
    """Root of the runtime states. Subclasses keep their constructor arguments so that they pickle."""


class ConfigError(ValueError):
    """A user's input is wrong: configuration, data, model folder, reward function.

    Args:
        problems: one sentence each, every one naming the field, file or line and what was found.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"- {problem}" for problem in self.problems)


class TopologyError(ConfigError):
    """The topology cannot be placed; carries every violation found, each with its path."""


class StackError(NeoProtoError):
    """A required package is missing, has an unknown version, or the platform is not supported."""


class RuntimeClosed(NeoProtoError):
    """The runtime, pool or group that was used has been closed."""


class GroupBroken(NeoProtoError):
    """A synchronous method overran its deadline while it was running; the group accepts no more calls."""


class DeadlineExceeded(NeoProtoError, TimeoutError):
    """A call did not end before its absolute deadline.

    Attributes:
        method, group: what was called.
        ranks: the ranks that had not answered.
        elapsed: seconds from submission to the deadline.
        stacks: what the silent ranks were doing, where that could be read (rank -> text).
    """

    def __init__(
        self,
        method: str,
        group: str,
        ranks: Sequence[int],
        elapsed: float,
        stacks: dict[int, str] | None = None,
    ) -> None:
        super().__init__(method, group, ranks, elapsed, stacks)
        self.method, self.group, self.ranks = method, group, tuple(ranks)
        self.elapsed, self.stacks = elapsed, dict(stacks or {})

    def __str__(self) -> str:
        text = (
            f"{self.group}.{self.method} did not answer within {self.elapsed:.1f} s; no answer from rank(s) "
        )
        text += ", ".join(map(str, self.ranks)) or "none"
        for rank, stack in sorted(self.stacks.items()):
            text += f"\n--- rank {rank} was at ---\n{stack}"
        return text


class WorkerDied(NeoProtoError):
    """A worker process ended without being asked to.

    Attributes:
        group, rank, host: which one.
        cause: exit code or signal, in words ("signal 9 (SIGKILL)", "exit code 1").
        log_tail: the last lines the process wrote.
    """

    def __init__(self, group: str, rank: int, host: str, cause: str, log_tail: str = "") -> None:
        super().__init__(group, rank, host, cause, log_tail)
        self.group, self.rank, self.host, self.cause, self.log_tail = group, rank, host, cause, log_tail

    def __str__(self) -> str:
        text = f"worker {self.group}[{self.rank}] on {self.host} died: {self.cause}"
        return f"{text}\n--- its last output ---\n{self.log_tail}" if self.log_tail else text


class WorkerInitError(NeoProtoError):
    """A worker's `__init__` raised; the original exception is the `__cause__` where it could be pickled."""


class RemoteError(NeoProtoError):
    """A worker raised an exception whose class cannot be rebuilt here; carries its name and traceback."""

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(type_name, message, traceback)
        self.type_name, self.message, self.traceback = type_name, message, traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}\n{self.traceback}"


class CallCancelled(NeoProtoError):
    """The call was cancelled by its caller."""


class StoreError(NeoProtoError):
    """Something is wrong with the object store."""


class KeyMissing(StoreError, KeyError):
    """The key is not in the store: never put, or deleted."""

    __str__ = Exception.__str__


class WeightsNotReady(KeyMissing, ValueError):
    """The weight version that was asked for cannot be read: not published yet, or retired."""


class StoreFull(StoreError):
    """The value does not fit into what is left of the store's memory."""


class StoreClosed(StoreError):
    """The store, or this process's client of it, has been closed."""


class LeaseExpired(NeoProtoError):
    """A lease lapsed on the registry's clock before it was renewed or checked."""


class TornRead(NeoProtoError):
    """A lease lapsed before its read was verified; the bytes were not handed over."""


class WeightsInUse(NeoProtoError, TimeoutError):
    """A weight version had to make room and was still being read when time ran out.

    Attributes:
        version: which.
        holders: who reads it, with the time left of each lease.
        waited: seconds.
    """

    def __init__(self, version: object, holders: Sequence[str], waited: float) -> None:
        super().__init__(version, holders, waited)
        self.version, self.holders, self.waited = version, tuple(holders), waited

    def __str__(self) -> str:
        holders = "; ".join(self.holders)
        return f"weights {self.version} were still read after {self.waited:.1f} s, by {holders}"


class WeightMismatch(NeoProtoError):
    """The names, shapes or dtypes of a weight version differ from those of the model that should load it."""


class WeightsNotServed(NeoProtoError, TimeoutError):
    """A published version is not served by all replicas in time."""


class NonFiniteLoss(NeoProtoError):
    """A loss or gradient norm is NaN or infinite; raised before the optimizer step, weights unchanged."""


class RewardError(NeoProtoError):
    """A reward function raised, or returned something that is not a score; names the sample."""


class AdvantageError(NeoProtoError):
    """An advantage estimator of the user's raised, or returned something that is no estimate."""


class RolloutError(NeoProtoError):
    """The generation engine failed or returned something that breaks its contract."""


class EngineFailed(RolloutError):
    """A replica's engine has ended: it answers nothing any more, another replica may."""


class ReplicaFailed(NeoProtoError):
    """A rollout replica is gone, or not up yet: what it was asked for may be asked of another.

    Attributes:
        replica: which.
        reason: why, in words; the failure itself is the `__cause__` where there was one.
    """

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(replica, reason)
        self.replica, self.reason = replica, reason

    def __str__(self) -> str:
        return f"replica {self.replica} failed: {self.reason}"


class ReplicaLost(NeoProtoError):
    """A rollout replica failed more often than it may be restarted.

    Attributes:
        replica, restarts: which one, how often it was restarted.
        causes: of each of its failures, in words, the first one first.
    """

    def __init__(self, replica: str, restarts: int, causes: Sequence[str]) -> None:
        super().__init__(replica, restarts, causes)
        self.replica, self.restarts, self.causes = replica, restarts, tuple(causes)

    def __str__(self) -> str:
        history = "; ".join(f"{number}. {cause}" for number, cause in enumerate(self.causes, start=1))
        return f"replica {self.replica} is lost after {self.restarts} restart(s): {history}"


class PromptFailed(NeoProtoError):
    """A prompt was given to rollout as often as `max_tries` allows, and never answered.

    Attributes:
        uid, tries: which prompt, how often it was tried.
        cause: the last failure, in words; the failure itself is the `__cause__`.
    """

    def __init__(self, uid: str, tries: int, cause: str) -> None:
        super().__init__(uid, tries, cause)
        self.uid, self.tries, self.cause = uid, tries, cause

    def __str__(self) -> str:
        return f"prompt {self.uid} failed after {self.tries} tries: {self.cause}"


class TrainingGivenUp(NeoProtoError):
    """Processes of the run failed more often than `trainer.max_restarts` without a checkpoint in between.

    Attributes:
        causes: of each failure since the last checkpoint, in words; the last failure is the `__cause__`.
    """

    def __init__(self, causes: Sequence[str]) -> None:
        super().__init__(causes)
        self.causes = tuple(causes)

    def __str__(self) -> str:
        listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(self.causes, start=1))
        return f"given up after {len(self.causes)} failures without a checkpoint in between: {listed}"


class CheckpointError(NeoProtoError):
    """A checkpoint could not be written; the one before it is as it was."""


class SamplesMissing(NeoProtoError, TimeoutError):
    """Rollout did not produce a training batch in time; the message names what it was doing."""
