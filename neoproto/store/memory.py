"""An object store inside one process: for tests, and for programs without a runtime."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neoproto.errors import KeyMissing, StoreClosed
from neoproto.store.base import (
    KeyOrRef,
    ObjectRef,
    Rows,
    StoreFuture,
    ValueInfo,
    check_key,
    forget_client,
    fresh_key,
    named_values,
    pair_rows,
    register_client,
)
from neoproto.store.codec import Parts, check_rows, decode, encode, select_rows


class MemoryStore:
    """Keeps encoded values in a dictionary. Every put and get copies, as with a store of processes.

    Attributes:
        bytes_in, bytes_out: bytes put and got so far.
        trips: how many operations were asked for, a batch counting as one.
    """

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.bytes_in = self.bytes_out = self.trips = 0
        self._values: dict[str, tuple[ObjectRef, Parts]] = {}
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        register_client(self)

    def put(self, value: Any, *, key: str | None = None, blocking: bool = True) -> Any:
        name = fresh_key() if key is None else check_key(key)
        return self._run(blocking, lambda: self._put([(name, value)])[0])

    def put_batch(self, values: Mapping[str, Any] | Sequence[Any], *, blocking: bool = True) -> Any:
        named = named_values(values)
        return self._run(blocking, lambda: self._put(named))

    def get(self, key: KeyOrRef, *, rows: Rows | None = None, blocking: bool = True) -> Any:
        return self._run(blocking, lambda: self._get([(key, rows)])[0])

    def get_batch(
        self, keys: Sequence[KeyOrRef], *, rows: Sequence[Rows | None] | None = None, blocking: bool = True
    ) -> Any:
        wanted = pair_rows(keys, rows)
        return self._run(blocking, lambda: self._get(wanted))

    def delete(self, key: KeyOrRef, *, missing_ok: bool = False, blocking: bool = True) -> Any:
        return self._run(blocking, lambda: self._delete([key], missing_ok))

    def delete_batch(
        self, keys: Sequence[KeyOrRef], *, missing_ok: bool = False, blocking: bool = True
    ) -> Any:
        return self._run(blocking, lambda: self._delete(keys, missing_ok))

    def in_place(self) -> None:
        """None: values are kept encoded."""

    def maps(self, ref: ObjectRef) -> bool:
        """Never: a get copies."""
        return False

    def stats(self, *, run: bool = False) -> dict[str, int]:
        """See `ObjectStore.stats`; there is one process, so both are the same."""
        found = [ref for ref, _ in self._values.values()]
        return {
            "objects": len(found),
            "object_bytes": sum(ref.info.nbytes for ref in found),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }

    def keys(self) -> list[str]:
        """The keys of all live values."""
        return list(self._values)

    def close(self) -> None:
        """Drop all values. Closing twice is harmless."""
        self._closed = True
        self._values.clear()
        forget_client(self)

    def _run(self, blocking: bool, operation: Callable[[], Any]) -> Any:
        future: StoreFuture[Any] = StoreFuture()
        try:
            with self._lock:
                if self._closed:
                    raise StoreClosed(f"store {self.name!r} is closed")
                self.trips += 1
                future.set_result(operation())
        except Exception as error:  # noqa: BLE001 - raised where the future is waited for
            future.set_exception(error)
        return future.result() if blocking else future

    def _put(self, named: list[tuple[str, Any]]) -> list[ObjectRef]:
        refs = []
        for key, value in named:
            info, parts = encode(value)
            refs.append(self._keep(key, info, parts))
        return refs

    def _keep(self, key: str, info: ValueInfo, parts: Parts) -> ObjectRef:
        ref = ObjectRef(
            store=self.name, key=key, volume="memory", info=info, generation=next(self._generations)
        )
        self._values[key] = (ref, tuple(part.copy() for part in parts))
        self.bytes_in += info.nbytes
        return ref

    def _find(self, key: KeyOrRef) -> tuple[ObjectRef, Parts] | None:
        found = self._values.get(key.key if isinstance(key, ObjectRef) else key)
        if found and isinstance(key, ObjectRef) and found[0].generation != key.generation:
            return None
        return found

    def _get(self, wanted: list[tuple[KeyOrRef, Rows | None]]) -> list[Any]:
        values = []
        for key, rows in wanted:
            found = self._find(key)
            if found is None:
                raise KeyMissing(f"{_name(key)!r} is not in store {self.name!r}")
            ref, parts = found
            info = ref.info
            if rows is not None:
                info, parts = select_rows(info, parts, check_rows(info, rows, ref.key))
            else:
                parts = tuple(part.copy() for part in parts)
            self.bytes_out += info.nbytes
            values.append(decode(info, parts))
        return values

    def _delete(self, keys: Sequence[KeyOrRef], missing_ok: bool) -> None:
        missing = [_name(key) for key in keys if self._find(key) is None]
        for key in keys:
            if self._find(key) is not None:
                del self._values[_name(key)]
        if missing and not missing_ok:
            raise KeyMissing(f"{', '.join(map(repr, missing))} not in store {self.name!r}")


def _name(key: KeyOrRef) -> str:
    return key.key if isinstance(key, ObjectRef) else key
