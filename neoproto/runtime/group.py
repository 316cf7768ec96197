"""Worker groups, and views of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from neoproto.errors import RuntimeClosed
from neoproto.runtime.call import RemoteCall
from neoproto.runtime.deadline import deadline_after
from neoproto.runtime.dispatch import MeshRanks, plan_call
from neoproto.runtime.display import group_html
from neoproto.runtime.placement import Block
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.registration import Dispatch, Execute, MethodSpec, method_table
from neoproto.runtime.wire import GroupRef, MethodCall
from neoproto.runtime.worker import ClassWithInitArgs, Worker

if TYPE_CHECKING:
    from neoproto.runtime.group_state import GroupState

Methods = Mapping[str, MethodSpec]


class Caller(Protocol):
    """How this process calls groups: a `CallTracker` in the run's root, an `AttachedRuntime` in a worker."""

    def start(
        self,
        group: GroupRef,
        call: MethodCall,
        deadline: float,
        collect: Callable[[list[Any]], Any],
        keep_alive: object,
    ) -> RemoteCall[Any]:
        """Start a call.

        Args:
            deadline: absolute, monotonic.
            collect: makes the value out of the results in the order of `call.sends`.
            keep_alive: lives as long as the call is under way.
        """
        ...

    def mesh_ranks(self, group: GroupRef, role: str) -> Sequence[Mapping[str, tuple[int, bool]]]:
        """What the workers have registered by `Worker.register_mesh`, by rank."""
        ...

    def native(self, group: GroupRef) -> Any:
        """The backend's own handle on a group's processes."""
        ...

    def state(self, group: GroupRef) -> GroupState | None:
        """What is known here of a group's processes, without asking."""
        ...


_caller: Caller | None = None


def set_caller(caller: Caller | None) -> None:
    """Say how this process calls groups that arrive by pickle; None: it has no runtime."""
    global _caller
    _caller = caller


class RemoteWorkerGroup:
    """Some or all ranks of a group, to call; owns nothing.

    It may travel: where it arrives it can be called, keeps nothing alive, and raises `RuntimeClosed` once the
    group is closed. A view of a group in this process keeps the group.

    Methods of the worker class can be called by name: `group.compute(batch)` dispatches, waits if the method
    was registered with `blocking=True`, and returns the collected results. `submit` takes a deadline.
    """

    def __init__(
        self,
        caller: Caller | None,
        ref: GroupRef,
        methods: Methods,
        ranks: Sequence[int],
        block: Block,
        role: str = "",
        parent: RemoteWorkerGroup | None = None,
    ) -> None:
        """Point at ranks of a group.

        Args:
            caller: starts the calls; None in a process without a runtime.
            ref: the group.
            methods: what can be called.
            ranks: which of the group's.
            block: their devices.
            role: whose methods they are; "" is a group's only worker.
            parent: is kept alive.
        """
        self._caller, self._ref, self._methods = caller, ref, methods
        self._ranks: Sequence[int] = ranks
        self._block = block
        self._role = role
        self._parent = parent
        self._mesh_ranks: dict[str, MeshRanks] = {}

    @property
    def name(self) -> str:
        """The group's name."""
        return self._ref.name

    @property
    def world_size(self) -> int:
        """How many ranks calls go to."""
        return len(self._ranks)

    @overload
    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        blocking: Literal[False] = False,
    ) -> RemoteCall[Any]: ...
    @overload
    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        blocking: Literal[True],
    ) -> Any: ...
    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Any:
        """Start a method on the ranks its `register` names.

        Args:
            timeout: seconds; the absolute deadline is fixed now. None: that of the running call, if any.
            blocking: wait, and return the value instead of the call.

        Raises:
            AttributeError: the worker class has no such public method.
            ValueError, TypeError: the arguments do not fit the method's dispatch mode.
            RuntimeClosed, GroupBroken, WorkerDied: the group takes no calls.
            With `blocking`, also whatever `RemoteCall.result` raises.
        """
        spec = self._spec_of(method)
        return self._start(method, spec, tuple(args), kwargs or {}, deadline_after(timeout), blocking)

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> RemoteCall[list[Any]]:
        """The same arguments to every rank, whatever the method is registered as; a call of the results."""
        return self._execute(Dispatch.ONE_TO_ALL, method, args, kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        """Rank 0 only, whatever the method is registered as; a call of its value."""
        return self._execute(Dispatch.RANK_ZERO, method, args, kwargs)

    execute_all_async = execute_all
    execute_rank_zero_async = execute_rank_zero

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all`, and wait."""
        return self.execute_all(method, *args, **kwargs).result()

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero`, and wait."""
        return self.execute_rank_zero(method, *args, **kwargs).result()

    def rank(self, index: int) -> RemoteWorkerGroup:
        """A view of one rank."""
        return self.slice(start=index, size=1)

    def slice(self, *, start: int, size: int) -> RemoteWorkerGroup:
        """A view of contiguous ranks inside one node, or of whole nodes.

        Raises:
            ValueError: the range does not fit, or is neither.
        """
        block = self._block.view(start, start + size)
        ranks = self._ranks[start : start + size]
        return RemoteWorkerGroup(self._caller, self._ref, self._methods, ranks, block, self._role, self)

    def close(self) -> None:
        """A view owns nothing: this releases nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        spec = self._spec_of(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._start(name, spec, args, kwargs, deadline_after(None), spec.blocking)

        call.__name__ = name
        return call

    def _spec_of(self, method: str) -> MethodSpec:
        spec = self._methods.get(method)
        if spec is None:
            known = ", ".join(sorted(self._methods)) or "none"
            raise AttributeError(
                f"workers of {self.name} have no public method {method!r}; there is: {known}"
            )
        return spec

    def _execute(
        self, mode: Dispatch, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RemoteCall[Any]:
        spec = self._spec_of(method)
        forced = MethodSpec(dispatch_mode=mode, execute_mode=Execute.ALL, is_async=spec.is_async)
        call: RemoteCall[Any] = self._start(method, forced, args, kwargs, deadline_after(None), False)
        return call

    def _start(
        self,
        method: str,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        deadline: float,
        blocking: bool,
    ) -> Any:
        plan = plan_call(spec, self, args, kwargs, size=len(self._ranks), mesh_ranks=self._ranks_in_mesh)
        ranks = self._ranks
        sends = plan.sends
        if ranks[0] or len(ranks) != self._ref.world_size:
            sends = [([ranks[position] for position in some], payload) for some, payload in plan.sends]
        method_call = MethodCall(role=self._role, method=method, sends=sends, is_async=spec.is_async)
        call = self._open_caller().start(self._ref, method_call, deadline, plan.collect, self)
        return call.result() if blocking else call

    def _ranks_in_mesh(self, mesh_name: str) -> MeshRanks:
        if mesh_name not in self._mesh_ranks:
            by_rank = self._open_caller().mesh_ranks(self._ref, self._role)
            missing = [rank for rank in self._ranks if mesh_name not in by_rank[rank]]
            if missing:
                raise ValueError(f"{self.name}: rank(s) {missing} did not register_mesh({mesh_name!r}, …)")
            self._mesh_ranks[mesh_name] = [by_rank[rank][mesh_name] for rank in self._ranks]
        return self._mesh_ranks[mesh_name]

    def _open_caller(self) -> Caller:
        if self._caller is None:  # it came by pickle, and no runtime was open here
            raise RuntimeClosed(f"worker group {self.name} has been closed")
        return self._caller

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_group, (self._ref, self._methods, self._ranks, self._block, self._role)

    def _repr_html_(self) -> str:
        """What a notebook shows, from what this process knows."""
        state = None if self._caller is None else self._caller.state(self._ref)
        return group_html(self, state, self._ranks, self._methods, self._role)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ranks {list(self._ranks)}>"


class WorkerGroup(RemoteWorkerGroup):
    """A group that owns its processes. Made by `Runtime.create_worker_group`.

    They are released by `close`, by the end of the runtime or worker that made the group, or when the last
    reference to the group, its local views and its calls under way is gone.
    """

    def __init__(
        self,
        caller: Caller | None,
        ref: GroupRef,
        roles: Mapping[str, Methods],
        pool: ResourcePool,
        close: Callable[[str, float], None],
        abandon: Callable[[str], None],
    ) -> None:
        """Own the processes that `close` releases.

        Args:
            caller, ref: see `RemoteWorkerGroup`.
            roles: the methods of each role; role "" is a group's only worker.
            pool: where the processes are.
            close: releases a group's processes: its key, how long it may drain.
            abandon: has them released on another thread, by key; runs as a finalizer.
        """
        super().__init__(caller, ref, roles.get("", {}), range(ref.world_size), pool.block)
        self.pool = pool
        self._roles, self._close = roles, close
        self._abandon = weakref.finalize(self, abandon, ref.key)
        self._abandon.atexit = False

    @property
    def actor_mesh(self) -> Any:
        """The backend's own handle on the processes: with Monarch, the ActorMesh of containers.

        Raises:
            RuntimeError: a worker made this group; the handle is with the root, which owns the processes.
        """
        return self._open_caller().native(self._ref)

    def role(self, name: str) -> RemoteWorkerGroup:
        """The view of one role of a fused group.

        Raises:
            ValueError: no such role.
        """
        if name not in self._roles:
            raise ValueError(f"{self.name} has no role {name!r}; there is: {', '.join(sorted(self._roles))}")
        return RemoteWorkerGroup(
            self._caller, self._ref, self._roles[name], self._ranks, self._block, name, self
        )

    def close(self, drain_s: float = 5.0) -> None:
        """Stop admission, drain what was admitted, release the processes. Closing twice is a no-op.

        Args:
            drain_s: how long admitted calls may take to end; afterwards the processes are killed.
        """
        self._abandon.detach()
        self._close(self._ref.key, drain_s)


def _unpickle_group(
    ref: GroupRef, methods: Methods, ranks: Sequence[int], block: Block, role: str
) -> RemoteWorkerGroup:
    """A group or view that came by pickle."""
    return RemoteWorkerGroup(_caller, ref, methods, ranks, block, role)


def public_methods(cls: type[Worker]) -> Methods:
    """The methods of a worker class that a group can be asked for: its own public ones."""
    return {name: spec for name, spec in method_table(cls).items() if name not in method_table(Worker)}


def method_tables(workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs]) -> dict[str, Methods]:
    """The methods of each role.

    Raises:
        ValueError: there is no role.
    """
    return {role: public_methods(spec.cls) for role, spec in roles_of(workers).items()}


def roles_of(workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """Role → class; role "" is a group's only worker.

    Raises:
        ValueError: there is no role.
    """
    roles = {"": workers} if isinstance(workers, ClassWithInitArgs) else dict(workers)
    if not roles:
        raise ValueError("a worker group has at least one role")
    return roles
