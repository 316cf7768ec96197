"""`Worker`, the base class of what runs in worker processes, and `ClassWithInitArgs`, how one is built."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neoproto.runtime import deadline

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """Who a worker process is within its group.

    Attributes:
        rank, world_size: its place among the group's processes.
        local_rank: its place among those on its node.
        node_rank: its node's place among the group's nodes.
        group_name: the group.
        log_path: the file that holds all output of the process.
        run_id: the run it belongs to.
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    group_name: str
    log_path: str
    run_id: str


class Worker:
    """Base class of workers. The runtime sets the attributes below before `__init__` runs.

    Sync methods run one after another on one thread, in one order on all ranks; `async def` methods overlap
    on the process's event loop.

    Attributes:
        rank, world_size, local_rank, node_rank: its place in the group.
        group_name: the group.
        log_path: the file that holds all output of the process.
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    group_name: str
    log_path: str
    _process_store_factory: Callable[[], Store]

    def remaining(self) -> float:
        """Seconds left of the call that runs now; `inf` if it has no deadline."""
        return deadline.remaining()

    def process_store(self) -> Store:
        """The group's rendezvous store, for `torch.distributed.init_process_group(store=…)`.

        Rank 0's process listens since it was spawned, so there is no port to agree on and none to race for.
        The same object on every call.
        """
        return self._process_store_factory()

    def register_mesh(self, mesh_name: str, *, dp_rank: int, is_collect: bool = True) -> None:
        """Say which data-parallel rank of the device mesh `mesh_name` this process is.

        Args:
            dp_rank: processes with the same number get the same chunk of a batch.
            is_collect: whether results are taken from this process.
        """
        meshes: dict[str, tuple[int, bool]] = self.__dict__.setdefault("_meshes", {})
        meshes[mesh_name] = (dp_rank, is_collect)


class ClassWithInitArgs:
    """A worker class with the arguments it will be built with, in every process of a group.

    Args:
        cls: a subclass of `Worker`; one from `__main__` or a notebook travels by value.
        env: environment of this group's processes; merged over `runtime.env_vars`, applied at spawn.
        preload: modules that the class needs and that take long to import. With `runtime.warm_parent` they
            are imported once on a host, and the group's processes are forked from the process that has them.
            Importing them must start no thread and use no accelerator.

    Raises:
        TypeError: `cls` is not a subclass of `Worker`.
    """

    def __init__(
        self,
        cls: type[Worker],
        *args: Any,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a worker class must be a subclass of neoproto.runtime.Worker, got {cls!r}")
        self.cls, self.args, self.kwargs = cls, args, kwargs
        self.env: dict[str, str] = {str(key): str(value) for key, value in (env or {}).items()}
        self.preload = tuple(preload)


class Rendezvous:
    """Makes a group's `torch.distributed` store without a port that is probed and then released.

    Rank 0 binds a listening socket when its process starts; its address travels to the other ranks with the
    worker's arguments; `TCPStore` then takes the socket over.
    """

    def __init__(self, *, is_server: bool, public: bool) -> None:
        """Listen, if this is rank 0.

        Args:
            is_server: this is rank 0.
            public: the group spans machines, so the socket must be reachable from outside.
        """
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        if is_server:
            self._listener = socket.create_server(("" if public else "127.0.0.1", 0), backlog=1024)
            self._host = socket.gethostname() if public else "127.0.0.1"

    @property
    def address(self) -> tuple[str, int] | None:
        """Where rank 0 listens; None on other ranks."""
        if self._listener is None:
            return None
        return self._host, int(self._listener.getsockname()[1])

    def store(self, address: tuple[str, int]) -> Store:
        """The store at `address`, served by this process if it is rank 0."""
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined] # late: not every worker has torch

            fd = None if self._listener is None else self._listener.detach()
            self._store = TCPStore(
                address[0],
                address[1],
                is_master=fd is not None,
                wait_for_workers=False,
                master_listen_fd=fd,
            )
        return self._store

    def close(self) -> None:
        """Release the socket, if it was not taken over."""
        if self._listener is not None and self._store is None:
            self._listener.close()
