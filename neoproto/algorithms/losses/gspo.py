"""Group sequence policy optimisation. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.policy_loss import PolicyLoss, PolicyLossInputs, PolicyLossKind, PolicyLossOptions

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The log-ratio of a sequence is clamped from above at 10 (verl's bound)."""


def gspo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5-7; the token form is its section 4.3).

        s_i = exp(mean_t (logp - old));   l = max(-A s_i, -A clip(s_i, 1 - low, 1 + high))

    All tokens of a row share the ratio s_i in value; each token's gradient is s_i A times that of its own
    log-prob, so that token advantages are allowed. The paper's objective is `loss_agg_mode =
    seq-mean-token-mean`; other modes weigh rows by their lengths. No dual clip: the log-ratio is clamped at
    `SEQUENCE_LOG_RATIO_LIMIT`, beyond which a row has no gradient.
    """
    import torch

    from neoproto.algorithms import ratios
    from neoproto.algorithms.aggregate import aggregate_loss
    from neoproto.algorithms.masking import fill_masked, masked_mean

    mask_bt, denominators = inputs.mask_bt, inputs.denominators
    log_ratio_bt = ratios.log_ratio(inputs)
    row_log_ratio_b1 = masked_mean(log_ratio_bt, mask_bt, dim=-1).detach().unsqueeze(-1)
    # Zero in value, the token's own gradient: log s_i + logp - stop_gradient(logp).
    own_bt = log_ratio_bt - log_ratio_bt.detach()
    ratio_bt = (row_log_ratio_b1 + own_bt).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    advantages_bt = fill_masked(inputs.advantages_bt, mask_bt)
    free_bt, clipped_bt = ratios.surrogates(ratio_bt, advantages_bt, options)
    loss_bt = ratios.weighted(torch.maximum(free_bt, clipped_bt), inputs.weights_bt)
    share = ratios.token_share(mask_bt, denominators)
    return PolicyLoss(
        loss=aggregate_loss(loss_bt, mask_bt, options.loss_agg_mode, denominators),
        pg_clipfrac=share(clipped_bt > free_bt),
        pg_clipfrac_lower=torch.zeros_like(row_log_ratio_b1.sum()),
        ppo_kl=share(-log_ratio_bt),
    )


CHOICE = PolicyLossKind(name="gspo", about="one ratio per sequence", compute=gspo)
