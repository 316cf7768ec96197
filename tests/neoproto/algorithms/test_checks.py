from __future__ import annotations

import math

import pytest
import torch

from neoproto.algorithms.checks import require_finite
from neoproto.errors import NonFiniteLoss


@pytest.mark.parametrize(
    "value", [0.0, -3, torch.tensor(1.5), torch.ones(2, 3), torch.empty(0), torch.tensor([4])]
)
def test_finite_passes(value: torch.Tensor | float) -> None:
    require_finite("loss", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "actor/pg_loss is nan"),
        (-math.inf, "actor/pg_loss is -inf"),
        (torch.tensor(math.inf, requires_grad=True), "actor/pg_loss is inf"),
        (
            torch.tensor([[0.0, 1.0], [math.nan, math.inf]]),
            "actor/pg_loss has 2 non-finite of 4 elements, the first at [1, 0]: nan",
        ),
    ],
)
def test_not_finite_is_named(value: torch.Tensor | float, message: str) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        require_finite("actor/pg_loss", value)
    assert str(caught.value) == message
