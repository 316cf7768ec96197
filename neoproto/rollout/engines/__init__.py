"""Rollout engines, one a file: what is known of it (`CHOICE`), and where its class is.

A new file here is a new value of `actor_rollout_ref.rollout.name`. Its class is a `StepEngine` or a
`RolloutEngine`, see `actors.rollout.engine`; it is imported in the replica's process only.
"""

from __future__ import annotations

from neoproto.choices import Choices
from neoproto.rollout.engine_kind import EngineKind

ENGINES = Choices(__name__, EngineKind)
