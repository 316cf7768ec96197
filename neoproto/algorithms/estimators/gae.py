"""Generalised advantage estimation. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator


def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   R_t = A_t + V_t

    A finished response ends in a terminal state: V after its last token is 0. A truncated one was cut off
    in the middle: V after its last token is the critic's value of the state reached,
    `bootstrap_values_b`, and A there is 0. The advantages are whitened if `whiten` is true; the returns never
    are.
    """
    import torch

    from neoproto.algorithms.masking import fill_masked, masked_whiten, require_same_shape

    rewards_bt, mask_bt = inputs.rewards_bt, inputs.mask_bt
    values_bt, truncated_b = inputs.required("gae", "values_bt"), inputs.required("gae", "truncated_b")
    bootstrap_values_b = inputs.required("gae", "bootstrap_values_b")
    require_same_shape(rewards_bt=rewards_bt, values_bt=values_bt, mask_bt=mask_bt)
    require_same_shape(
        bootstrap_values_b=bootstrap_values_b, truncated_b=truncated_b, rows_b=mask_bt.any(dim=1)
    )
    generated_bt = mask_bt != 0
    next_value_b = torch.where(truncated_b, bootstrap_values_b.to(values_bt.dtype), 0.0)
    advantage_b = torch.zeros_like(next_value_b)
    advantages_bt = torch.zeros_like(values_bt)
    for t in reversed(range(values_bt.shape[1])):
        here_b, value_b = generated_bt[:, t], values_bt[:, t]
        delta_b = rewards_bt[:, t] + options.gamma * next_value_b - value_b
        advantage_b = torch.where(here_b, delta_b + options.gamma * options.lam * advantage_b, advantage_b)
        next_value_b = torch.where(here_b, value_b, next_value_b)
        advantages_bt[:, t] = advantage_b
    returns_bt = fill_masked(advantages_bt + values_bt, mask_bt)
    if options.whiten:
        return masked_whiten(advantages_bt, mask_bt), returns_bt
    return fill_masked(advantages_bt, mask_bt), returns_bt


CHOICE = Estimator(
    name="gae",
    about="generalised advantage estimation",
    compute=gae,
    needs_critic=True,
    options=("gamma", "lam", "whiten"),
)
