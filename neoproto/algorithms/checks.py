"""Refusing what is not finite, before it reaches an optimizer step."""

from __future__ import annotations

import math

import torch

from neoproto.errors import NonFiniteLoss


def require_finite(name: str, value: torch.Tensor | float) -> None:
    """Raise unless every element of `value` is finite.

    Args:
        name: what is checked, in the words of the metrics ("actor/pg_loss").
        value: a number or a tensor of any shape and dtype (reading it waits for the device).

    Raises:
        NonFiniteLoss: naming `name`, and for a tensor how many elements and the first of them.
    """
    if not isinstance(value, torch.Tensor):
        if not math.isfinite(value):
            raise NonFiniteLoss(f"{name} is {value}")
        return
    value = value.detach()
    finite = torch.isfinite(value)
    if bool(finite.all()):
        return
    if value.dim() == 0:
        raise NonFiniteLoss(f"{name} is {value.item()}")
    where = torch.nonzero(~finite)
    first = tuple(int(index) for index in where[0].tolist())
    raise NonFiniteLoss(
        f"{name} has {len(where)} non-finite of {value.numel()} elements, the first at {list(first)}: "
        f"{value[first].item()}"
    )
