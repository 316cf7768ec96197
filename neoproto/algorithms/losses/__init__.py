"""Policy losses, one a file: its function and what is known of it (`CHOICE`).

A new file here is a new value of `actor_rollout_ref.actor.policy_loss.loss_mode`. torch is imported inside
the functions, as the configuration reads the entries.
"""

from __future__ import annotations

from neoproto.algorithms.policy_loss import PolicyLoss, PolicyLossInputs, PolicyLossKind, PolicyLossOptions
from neoproto.choices import Choices

POLICY_LOSSES = Choices(__name__, PolicyLossKind)


def policy_loss(loss_mode: str, inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """The loss called `loss_mode`, one of `POLICY_LOSSES`.

    Raises:
        ValueError: unknown mode, or shapes that differ.
    """
    if loss_mode not in POLICY_LOSSES:
        known = ", ".join(POLICY_LOSSES)
        raise ValueError(f"policy_loss.loss_mode must be one of {known}, got {loss_mode!r}")
    return POLICY_LOSSES[loss_mode].compute(inputs, options)
