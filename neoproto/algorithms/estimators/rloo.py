"""REINFORCE leave-one-out. Shapes: b = rows, t = response tokens."""

from __future__ import annotations

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator


def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740), the same for all tokens of a row.

        A_i = s_i - mean_{j != i in group} s_j,   s_i = sum_t r_{i,t}

    Rows with an empty mask are in no group; a row alone in its group has no baseline: A = 0.
    """
    from neoproto.algorithms.groups import GroupScores

    rewards_bt, mask_bt = inputs.rewards_bt, inputs.mask_bt
    groups = GroupScores.of(rewards_bt, mask_bt, inputs.required("rloo", "group_ids_b"))
    # s_i - (n mean - s_i) / (n - 1) = (s_i - mean) n / (n - 1)
    scale_b = groups.size_b / (groups.size_b - 1).clamp(min=1)
    return groups.onto_tokens((groups.scores_b - groups.mean_b()) * scale_b, rewards_bt, mask_bt)


CHOICE = Estimator(
    name="rloo",
    about="a sample's score against the mean of its prompt's other samples",
    compute=rloo,
    compares_samples=True,
)
