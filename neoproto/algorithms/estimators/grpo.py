"""Group-relative advantages. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator


def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2), the same for all tokens of a row.

        A_i = (s_i - mean_group s) / (std_group s + epsilon),   s_i = sum_t r_{i,t}

    std is the unbiased one. `norm_by_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). Rows
    with an empty mask are in no group; a row alone in its group has nothing to be compared with: A = 0.
    """
    from neoproto.algorithms.groups import GroupScores

    rewards_bt, mask_bt = inputs.rewards_bt, inputs.mask_bt
    groups = GroupScores.of(rewards_bt, mask_bt, inputs.required("grpo", "group_ids_b"))
    centred_b = groups.scores_b - groups.mean_b()
    if options.norm_by_std:
        variance_b = groups.sum(centred_b.square()) / (groups.size_b - 1).clamp(min=1)
        centred_b = centred_b / (variance_b.sqrt() + options.epsilon)
    return groups.onto_tokens(centred_b, rewards_bt, mask_bt)


CHOICE = Estimator(
    name="grpo",
    about="a sample's score against the mean of its prompt's samples, over their deviation",
    compute=grpo,
    compares_samples=True,
    options=("norm_by_std", "epsilon"),
)
