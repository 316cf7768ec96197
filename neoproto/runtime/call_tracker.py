"""All calls of a run, in its root: numbers them, sends them, settles them by reply, death or deadline.

    start ──> _pending ──> processes.send           on_reply ─┐
                  ▲                                 on_death ─┼─settle──> RemoteCall
                  └── registered before it is sent   _expire ─┘

`start` runs on the thread that calls; `on_reply` and `on_death` on threads of the backend; `_expire` on the
watch's. A call settles once, whichever of them is first.

A sync call may end for its caller (an exception of one rank, a death, `cancel`) while ranks still run it. Its
deadline is still watched: past it, what waits behind it on those ranks would wait for as long as it runs.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neoproto.errors import GroupBroken, RuntimeClosed
from neoproto.runtime.call import GroupCall
from neoproto.runtime.deadline import (
    FAILURE_HOLD_S,
    MESHES_TIMEOUT_S,
    STATUS_TIMEOUT_S,
    DeadlineWatch,
    budget,
)
from neoproto.runtime.executor import CallStatus
from neoproto.runtime.group_state import GroupState
from neoproto.runtime.wire import (
    CANCEL,
    CallHeader,
    GroupRef,
    MethodCall,
    RemoteFailure,
    decode,
    decode_failure,
)

Collect = Callable[[list[Any]], Any]
"""Makes the value of a call out of its results, in the order of `MethodCall.sends`."""


class PendingCall(GroupCall):
    """A call that this process has sent to ranks of a group."""

    def __init__(
        self,
        tracker: CallTracker,
        group: GroupState,
        call_id: int,
        call: MethodCall,
        deadline: float,
        collect: Collect,
        keep_alive: object,
    ) -> None:
        super().__init__(group.name, call.method, call.ranks, deadline, self._collect, keep_alive)
        self.call_id, self.group, self.is_async = call_id, group, call.is_async
        self.replies: dict[int, RemoteFailure | bytes | None] = dict.fromkeys(self.ranks)
        self.missing = len(self.replies)
        self.failure: RemoteFailure | None = None
        self._tracker, self._collect_results = tracker, collect

    def cancel(self) -> bool:
        if not self._tracker.end_early(self, error=self.cancelled_error()):
            return False
        if self.is_async:
            header = CallHeader(call_id=self.call_id, role="", method=CANCEL)
            self.group.processes.send(self.ranks, header, b"")
        return True

    def silent_ranks(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank, reply in self.replies.items() if reply is None]

    def _answered(self) -> list[int]:
        return [rank for rank, reply in self.replies.items() if reply is not None]

    def _collect(self, raw: RemoteFailure | dict[int, bytes]) -> Any:
        if isinstance(raw, RemoteFailure):
            raise decode_failure(raw)
        return self._collect_results([decode(reply) for reply in raw.values()])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Abandoned:
    """Ranks that may still run a sync call that has ended for its caller."""

    group: GroupState
    method: str
    ranks: set[int]


class CallTracker:
    """All groups of a run, and all calls to them; lives in the run's root.

    Attributes:
        groups: by key. Closed ones stay, so that a handle that is still held can report how they ended.
    """

    def __init__(self, watch: DeadlineWatch | None = None) -> None:
        self.groups: dict[str, GroupState] = {}
        # Guards what follows, and the replies of pending calls. Never held while a call is settled or a group
        # asked: both run code of others.
        self._lock = threading.Lock()
        self._pending: dict[int, PendingCall] = {}
        self._abandoned: dict[int, _Abandoned] = {}
        # From a random number on: a late reply to a call of an earlier run must not match one of this run.
        self._next_id = random.SystemRandom().getrandbits(40) << 20
        self._closed: str | None = None
        self._draining = False
        self._watch = DeadlineWatch(self._is_watched) if watch is None else watch

    def start(
        self,
        group: GroupRef,
        call: MethodCall,
        deadline: float,
        collect: Collect = list,
        keep_alive: object = None,
        *,
        relayed: bool = False,
    ) -> PendingCall:
        """Number, register and send a call.

        Args:
            deadline: absolute, monotonic.
            keep_alive: lives as long as the call is under way.
            relayed: a worker asks; it may do so for what is being drained, so it is let through then.

        Raises:
            RuntimeClosed, GroupBroken, WorkerDied: refused here, nothing was sent.
        """
        with self._lock:
            if self._closed is not None and not (relayed and self._draining):
                raise RuntimeClosed(self._closed)
            state = self._known_group(group)
            self._next_id += 1
            pending = PendingCall(self, state, self._next_id, call, deadline, collect, keep_alive)
            # Registered before the group is asked who lives: a death is marked before the pending calls are
            # looked through, so one of the two sees the other.
            self._pending[pending.call_id] = pending
        try:
            may_be_sent = state.admit(pending.ranks)
            if deadline <= pending.submitted:  # over before it began: it is sent to no rank
                self.settle(pending, error=pending.deadline_error(pending.ranks))
                return pending
            if may_be_sent:
                self._send(pending, call)
        except BaseException:
            self._forget(pending)
            raise
        self._watch.add(deadline, self._expire, pending.call_id)
        return pending

    def _send(self, pending: PendingCall, call: MethodCall) -> None:
        state = pending.group
        ranks: tuple[int, ...] | None = None
        sequence: int | tuple[int, ...] | None = None
        if not call.is_async:
            # From here on the call must reach every rank: none passes over a turn that was taken.
            sequence, ranks = state.take_turns(pending.ranks)
        header = CallHeader(
            call_id=pending.call_id,
            role=call.role,
            method=call.method,
            sequence=sequence,
            ranks=ranks,
            budget_s=budget(pending.deadline),
        )
        try:
            for some, payload in call.sends:
                state.processes.send(some, header, payload)
        except BaseException:
            if sequence is not None:
                # Some ranks would wait for this turn for ever.
                state.mark_broken(f"{state.name} is broken: {call.method} could not be sent to all its ranks")
            raise

    def mesh_ranks(self, group: GroupRef, role: str) -> Sequence[Mapping[str, tuple[int, bool]]]:
        """What the workers have registered by `Worker.register_mesh`, by rank.

        Raises:
            RuntimeClosed: the group has been closed.
        """
        state = self._known_group(group)
        if state.closed is not None:
            raise RuntimeClosed(state.closed)
        return state.processes.meshes(role, MESHES_TIMEOUT_S)

    def native(self, group: GroupRef) -> Any:
        """The backend's own handle on a group's processes."""
        return self._known_group(group).processes.native

    def state(self, group: GroupRef) -> GroupState | None:
        """The state of a group, if it is of this run."""
        return self.groups.get(group.key)

    def _known_group(self, group: GroupRef) -> GroupState:
        state = self.groups.get(group.key)
        if state is None:
            raise RuntimeClosed(f"worker group {group.name} has been closed")
        return state

    def on_reply(self, call_id: int, rank: int, outcome: RemoteFailure | bytes) -> None:
        """A rank has answered. Runs on the backend's thread: settles, never blocks."""
        call = self._pending.get(call_id)  # one look-up, atomic without the lock
        if call is None:
            self._answered_late(call_id, rank)
            return
        with self._lock:
            if rank not in call.replies or call.replies[rank] is not None:
                return
            call.replies[rank] = outcome
            call.missing -= 1
            complete = call.missing == 0
            first_failure = call.failure is None and isinstance(outcome, RemoteFailure)
            if isinstance(outcome, RemoteFailure):
                call.failure = call.failure or outcome
        if isinstance(outcome, RemoteFailure) and outcome.broken:
            call.group.mark_broken(outcome.message)  # before the pending calls are looked through, as a death
            self._fail_behind(call.group, call_id, stuck={rank}, unresponsive=set())
            complete = True
        if complete:
            self.settle(call, raw=call.failure or call.replies)
        elif first_failure:
            self._watch.add(time.monotonic() + FAILURE_HOLD_S, self._end_hold, call_id)

    def _end_hold(self, call_id: int) -> None:
        call = self._pending.get(call_id)
        if call is not None and not call.group.is_dying(call.silent_ranks()):  # else `on_death` settles it
            self.end_early(call, raw=call.failure)

    def _answered_late(self, call_id: int, rank: int) -> None:
        with self._lock:
            abandoned = self._abandoned.get(call_id)
            if abandoned is not None:
                abandoned.ranks.discard(rank)
                if not abandoned.ranks:
                    del self._abandoned[call_id]

    def on_death(self, group: GroupState, rank: int) -> None:
        """Settle what waits for a rank that `group` already counts as dead."""
        error = group.death_of(rank)
        with self._lock:
            waiting = [
                call for call in self._pending.values() if call.group is group and rank in call.replies
            ]
        for call in waiting:
            if call.replies[rank] is None:
                self.end_early(call, error=error)

    def end_early(self, call: PendingCall, raw: Any = None, error: BaseException | None = None) -> bool:
        """`settle` a call that ranks may still run, and watch these until its deadline."""
        if not call.is_async and call.deadline != math.inf and not call.done():
            abandoned = _Abandoned(group=call.group, method=call.method, ranks=set(call.silent_ranks()))
            with self._lock:
                self._abandoned[call.call_id] = abandoned
            self._watch.add(call.deadline, self._check_abandoned, call.call_id)
        return self.settle(call, raw, error)

    def settle(self, call: PendingCall, raw: Any = None, error: BaseException | None = None) -> bool:
        """End a call and forget it; False if it had ended."""
        self._forget(call)
        return call._settle(raw, error)

    def fail_all(self, group: GroupState | None, reason: str) -> None:
        """End every call under way, of one group or of all, with `RuntimeClosed`."""
        with self._lock:
            ended = [call for call in self._pending.values() if group is None or call.group is group]
            for call_id, one in list(self._abandoned.items()):
                if group is None or one.group is group:
                    del self._abandoned[call_id]
        for call in ended:
            self.settle(call, error=RuntimeClosed(reason))

    def close(self, reason: str) -> None:
        """Refuse new calls, end those under way, end the deadline thread."""
        with self._lock:
            self._closed, self._draining = reason, False
        self.fail_all(None, reason)
        self._watch.close()

    def stop_admission(self, reason: str) -> None:
        """Refuse new calls of this process; those under way continue, and may call from where they run."""
        with self._lock:
            self._closed, self._draining = reason, True

    def _forget(self, call: PendingCall) -> None:
        with self._lock:
            self._pending.pop(call.call_id, None)

    # Deadlines

    def _is_watched(self, call_id: int) -> bool:
        return call_id in self._pending or call_id in self._abandoned

    def _expire(self, call_id: int) -> None:
        """A deadline has passed."""
        call = self._pending.get(call_id)
        if call is not None and call.failure is not None:
            self._end_hold(call_id)
        elif call is not None:
            _on_a_thread(self._report_expiry, call)

    def _report_expiry(self, call: PendingCall) -> None:
        group, silent = call.group, call.silent_ranks()
        statuses = group.processes.statuses(silent, call.call_id, STATUS_TIMEOUT_S)
        if not call.is_async:
            # First this, then the call's own end: when its caller sees the end, the group is marked.
            self._break_if_running(group, call.method, call.call_id, call.silent_ranks(), statuses)
        stacks = {rank: status.stack for rank, status in statuses.items() if status.stack}
        unresponsive = [rank for rank in silent if rank not in statuses]
        if unresponsive and not call.done():
            stacks |= group.processes.stacks(unresponsive)
        self.settle(call, error=call.deadline_error(silent, stacks))

    def _check_abandoned(self, call_id: int) -> None:
        """The deadline has passed of a call that had ended for its caller before."""
        with self._lock:
            abandoned = self._abandoned.pop(call_id, None)
        if abandoned is not None:
            _on_a_thread(self._ask_abandoned, call_id, abandoned)

    def _ask_abandoned(self, call_id: int, abandoned: _Abandoned) -> None:
        group = abandoned.group
        if group.closed is not None:
            return
        silent = [rank for rank in abandoned.ranks if not group.is_dying([rank])]
        statuses = group.processes.statuses(silent, call_id, STATUS_TIMEOUT_S)
        self._break_if_running(group, abandoned.method, call_id, silent, statuses)

    def _break_if_running(
        self,
        group: GroupState,
        method: str,
        call_id: int,
        silent: Sequence[int],
        statuses: Mapping[int, CallStatus],
    ) -> None:
        """Break the group if a sync call past its deadline runs on a rank, or if the rank does not answer."""
        unresponsive = {rank for rank in silent if rank not in statuses and not group.is_dying([rank])}
        runs = {rank for rank, status in statuses.items() if status.state == "running"}
        running = [rank for rank in silent if rank in unresponsive or rank in runs]
        if running and group.closed is None:
            reason = f"{group.name} is broken: {method} overran its deadline on rank(s) {running}"
            group.mark_broken(reason)
            group.processes.break_group(running, reason)
            self._fail_behind(group, call_id, stuck=set(running), unresponsive=unresponsive)

    def _fail_behind(
        self, group: GroupState, call_id: int, *, stuck: set[int], unresponsive: set[int]
    ) -> None:
        """End what waits behind a call of a broken group, which may run for ever.

        Args:
            stuck: ranks that run it. A call that waits there keeps its other ranks waiting too.
            unresponsive: those of them that do nothing else, async methods included.
        """
        error = GroupBroken(group.broken)
        with self._lock:  # in the order of submission
            others = [call for call in self._pending.values() if call.group is group]
        for call in others:
            waits_for = unresponsive if call.is_async else stuck
            if call.call_id == call_id or waits_for.isdisjoint(call.silent_ranks()):
                continue
            if not call.is_async:
                stuck |= call.replies.keys()
            if call.deadline > time.monotonic():  # else its own deadline ends it
                self.settle(call, error=error)


def _on_a_thread(function: Callable[..., None], *args: Any) -> None:
    """Ask ranks about a passed deadline beside the watch's thread: other calls may be due meanwhile."""
    threading.Thread(target=function, args=args, name="neoproto-expiry", daemon=True).start()
