from __future__ import annotations

import pytest

from neoproto.runtime import Dispatch, Execute, Worker, mesh_dispatch, register
from neoproto.runtime.group import public_methods
from neoproto.runtime.registration import CustomDispatch, MeshDispatch, MethodSpec


class Base(Worker):
    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def inherited(self) -> None: ...


class Sample(Base):
    def plain(self) -> None: ...

    async def later(self) -> None: ...

    @register(dispatch_mode=mesh_dispatch("actor"), execute_mode=Execute.RANK_ZERO, pad=True)
    async def marked(self) -> None: ...

    def _private(self) -> None: ...

    attribute = 3


def test_the_table_has_the_public_methods_of_the_class_and_no_others() -> None:
    table = public_methods(Sample)
    assert table == {
        "inherited": MethodSpec(dispatch_mode=Dispatch.RANK_ZERO, blocking=False),
        "plain": MethodSpec(),
        "later": MethodSpec(is_async=True),
        "marked": MethodSpec(
            dispatch_mode=MeshDispatch(mesh_name="actor"),
            execute_mode=Execute.RANK_ZERO,
            pad=True,
            is_async=True,
        ),
    }


def test_a_custom_pair_is_taken_whole_or_refused() -> None:
    pair = {"dispatch_fn": lambda group: ((), {}), "collect_fn": lambda group, results: results}

    @register(dispatch_mode=pair)
    def method(self: object) -> None: ...

    spec = method._neoproto_method_spec  # type: ignore[attr-defined]
    assert isinstance(spec.dispatch_mode, CustomDispatch)
    with pytest.raises(ValueError, match="dispatch_fn"):
        register(dispatch_mode={"dispatch_fn": print})
    with pytest.raises(ValueError, match="dispatch_mode"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="execute_mode"):
        register(execute_mode="ALL")  # type: ignore[arg-type]
