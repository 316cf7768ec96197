"""Telling sharded tensors (DTensors) from plain ones, without importing them: that takes most of a second."""

from __future__ import annotations

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold parts of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank (collective), any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
