from __future__ import annotations

import pickle

import pytest

from neoproto.errors import RemoteError, WorkerDied
from neoproto.runtime.wire import CallHeader, decode, decode_failure, encode, encode_failure


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class LeavingError(Exception):
    """Leaves by everything that is asked of it."""

    def __str__(self) -> str:
        raise SystemExit(0)

    def __reduce__(self) -> str:
        raise SystemExit(0)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - it is what the test is about
        return caught


def test_an_exception_travels_as_itself_with_its_traceback() -> None:
    error = decode_failure(encode_failure(raised(KeyError("k")), "w[0] on here"))
    assert isinstance(error, KeyError)
    assert error.args == ("k",)
    (note,) = error.__notes__
    assert note.startswith("--- traceback of w[0] on here ---")
    assert "in raised" in note
    died = decode_failure(encode_failure(raised(WorkerDied("w", 1, "h", "signal 9")), "x"))
    assert isinstance(died, WorkerDied)
    assert died.rank == 1


@pytest.mark.parametrize("error", [UnpicklableError("a", "b"), MuteError()])
def test_an_exception_that_cannot_be_rebuilt_is_named(error: Exception) -> None:
    rebuilt = decode_failure(encode_failure(raised(error), "there"))
    if isinstance(error, UnpicklableError):
        assert isinstance(rebuilt, RemoteError)
        assert rebuilt.type_name.endswith("test_wire.UnpicklableError")
        assert "in raised" in rebuilt.traceback
        assert isinstance(pickle.loads(pickle.dumps(rebuilt)), RemoteError)
    else:
        assert type(rebuilt).__name__ == "MuteError"


def test_an_exception_that_leaves_while_it_is_written_is_named() -> None:
    rebuilt = decode_failure(encode_failure(raised(LeavingError()), "there"))
    assert isinstance(rebuilt, RemoteError)
    assert rebuilt.type_name.endswith("test_wire.LeavingError")


def test_functions_travel_by_value() -> None:
    offset = 3
    add = decode(encode(lambda value: value + offset))
    assert add(4) == 7


def test_a_header_knows_each_ranks_turn() -> None:
    same = CallHeader(call_id=1, role="", method="m", sequence=4, ranks=None, budget_s=None)
    assert [same.turn(0), same.turn(9)] == [4, 4]
    apart = CallHeader(call_id=1, role="", method="m", sequence=(4, 7), ranks=(2, 5), budget_s=None)
    assert [apart.turn(2), apart.turn(5)] == [4, 7]
    unordered = CallHeader(call_id=1, role="", method="m", sequence=None, ranks=None, budget_s=None)
    assert unordered.turn(0) is None
