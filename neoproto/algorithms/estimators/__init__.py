"""Advantage estimators, one a file: its function and what is known of it (`CHOICE`).

A new file here is a new value of `algorithm.adv_estimator`: checks, help and the critic's use follow from its
entry. torch is imported inside the functions, as the configuration reads the entries.
"""

from __future__ import annotations

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator
from neoproto.choices import Choices

ESTIMATORS = Choices(__name__, Estimator)


def compute_advantages(name: str, inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """(advantages_bt, returns_bt) by the estimator called `name`, one of `ESTIMATORS`.

    Raises:
        ValueError: unknown name, a tensor the estimator needs is missing, shapes that differ.
    """
    import torch

    if name not in ESTIMATORS:
        raise ValueError(f"adv_estimator must be one of {', '.join(ESTIMATORS)}, got {name!r}")
    with torch.no_grad():
        return ESTIMATORS[name].compute(inputs, options)
