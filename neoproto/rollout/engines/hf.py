"""Transformers, whole tensors at a time: see `HfEngine`."""

from __future__ import annotations

from neoproto.rollout.engine_kind import GIB, EngineKind

CHOICE = EngineKind(
    name="hf",
    about="transformers, whole tensors at a time: faster for tiny models, where vLLM's bookkeeping takes "
    "longer than the model",
    engine="actors.rollout.hf_engine:HfEngine",
    devices=("cpu",),
    library_bytes=0.45 * GIB,
)
