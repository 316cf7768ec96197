"""Where stock TorchStore clients look for a store: a controller actor of the root process, under its name.

    get_or_spawn_controller(name) ──> Directory ──> placement: the store's index and volumes

Monarch 0.7 keeps such an actor, with a thread and seven descriptors, as long as the program lives, and gives
its name to no other. A program that opens one runtime after another would grow by that each time, so a
directory whose store has closed answers for the next one, and the closed name leads to one that refuses.
"""

# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, endpoint, get_or_spawn_controller

from neoproto.errors import StoreClosed
from neoproto.private_api.monarch import rename_controller

if TYPE_CHECKING:
    from neoproto.store.torchstore.stock import StockStrategy

_CLOSED = "neoproto-closed-stores"
_idle: list[Any] = []
_lock = threading.Lock()


class Directory(Actor):
    """Answers for one store at a time."""

    def __init__(self, name: str, *places: Any) -> None:
        self._name, self._places = name, places

    @endpoint
    async def open(self, name: str, *places: Any) -> None:
        """Answer for another store from now on."""
        self._name, self._places = name, places

    @endpoint
    async def get_controller_strategy(self) -> StockStrategy:
        """The placement, which carries the index; what a stock client asks."""
        from neoproto.store.torchstore.stock import StockStrategy

        if not self._places:
            raise StoreClosed(f"store {self._name!r} is closed")
        return StockStrategy(*self._places)

    @endpoint
    async def close(self) -> None:
        """Refuse from now on."""
        self._places = ()


async def open_directory(name: str, *places: Any) -> Any:
    """The directory of a new store.

    Args:
        places: the volumes' mesh, the volumes by id, and the index.
    """
    with _lock:
        directory = _idle.pop() if _idle else None
    if directory is None:
        return await get_or_spawn_controller(name, Directory, name, *places)
    await directory.open.call_one(name, *places)
    rename_controller(name, directory)
    return directory


async def close_directory(name: str, directory: Any) -> None:
    """Have the store's directory refuse, and keep it for the next store if it can be renamed then."""
    await directory.close.call_one()
    refusing = await get_or_spawn_controller(_CLOSED, Directory, "of an earlier run")
    if not rename_controller(name, refusing):
        return
    with _lock:
        _idle.append(directory)
