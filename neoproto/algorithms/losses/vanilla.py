"""PPO's clipped surrogate with dual clip. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.policy_loss import PolicyLoss, PolicyLossInputs, PolicyLossKind, PolicyLossOptions

LOG_RATIO_LIMIT = 20.0
"""Per-token log-ratios are clamped to +-20 (verl's bound): exp(20) = 5e8, finite in all but half."""


def vanilla(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with dual clip (Ye et al., arXiv 1912.09729).

        l = max(-A r, -A clip(r, 1 - low, 1 + high));   A < 0: l = min(l, -A c);   r = exp(logp - old)

    The dual clip bounds the loss where A < 0 and r is large, the one side PPO leaves open. The log-ratio is
    clamped to +-`LOG_RATIO_LIMIT`; beyond it a token has no gradient.
    """
    import torch

    from neoproto.algorithms import ratios
    from neoproto.algorithms.aggregate import aggregate_loss
    from neoproto.algorithms.masking import fill_masked

    mask_bt, denominators = inputs.mask_bt, inputs.denominators
    log_ratio_bt = ratios.log_ratio(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages_bt = fill_masked(inputs.advantages_bt, mask_bt)
    free_bt, clipped_bt = ratios.surrogates(log_ratio_bt.exp(), advantages_bt, options)
    upper_bt = torch.maximum(free_bt, clipped_bt)
    negative_bt = advantages_bt < 0
    # Filled where it does not apply: with c = inf, -A c would be NaN at A = 0.
    bound_bt = torch.where(negative_bt, -advantages_bt * options.clip_ratio_c, torch.inf)
    loss_bt = ratios.weighted(torch.minimum(upper_bt, bound_bt), inputs.weights_bt)
    share = ratios.token_share(mask_bt, denominators)
    return PolicyLoss(
        loss=aggregate_loss(loss_bt, mask_bt, options.loss_agg_mode, denominators),
        pg_clipfrac=share(clipped_bt > free_bt),
        pg_clipfrac_lower=share(upper_bt > bound_bt),
        ppo_kl=share(-log_ratio_bt),
    )


CHOICE = PolicyLossKind(
    name="vanilla", about="PPO's clipped ratio per token (with dual clip)", compute=vanilla
)
