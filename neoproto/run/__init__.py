"""`python -m neoproto.run`: trains what a configuration says; see `neoproto.run.cli`.

For notebooks and scripts: `compose_run` makes the configuration, `InteractiveTrainer` takes its steps one by
one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neoproto.run.compose import compose_run
    from neoproto.run.interactive import InteractiveTrainer, StepDone

_HOMES = {"InteractiveTrainer": "interactive", "StepDone": "interactive", "compose_run": "compose"}

__all__ = ["InteractiveTrainer", "StepDone", "compose_run"]


def __getattr__(name: str) -> Any:
    # Imported when used: the command says what is wrong with its words before it loads anything heavy.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
