"""REINFORCE++. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator


def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, normalised over all tokens of the batch.

        R_t = r_t + gamma R_{t+1};   A_t = (R_t - mean R) / std R

    `whiten=False` leaves the normalisation out: A = R. There is no critic, hence no bootstrap: what a
    truncated response would still have earned counts as 0.
    """
    import torch

    from neoproto.algorithms.masking import fill_masked, masked_whiten, require_same_shape

    rewards_bt, mask_bt = inputs.rewards_bt, inputs.mask_bt
    require_same_shape(rewards_bt=rewards_bt, mask_bt=mask_bt)
    generated_bt = mask_bt != 0
    return_b = torch.zeros_like(rewards_bt[:, :1]).sum(dim=1)
    returns_bt = torch.zeros_like(rewards_bt)
    for t in reversed(range(rewards_bt.shape[1])):
        return_b = torch.where(generated_bt[:, t], rewards_bt[:, t] + options.gamma * return_b, return_b)
        returns_bt[:, t] = return_b
    returns_bt = fill_masked(returns_bt, mask_bt)
    return (masked_whiten(returns_bt, mask_bt) if options.whiten else returns_bt.clone()), returns_bt


CHOICE = Estimator(
    name="reinforce_plus_plus",
    about="discounted rewards, normalised over the tokens of the batch",
    compute=reinforce_plus_plus,
    options=("gamma", "whiten"),
)
