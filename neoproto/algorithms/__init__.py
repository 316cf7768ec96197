"""Pure tensor arithmetic of policy optimisation: advantages, losses, KL, masking, schedules.

Nothing here knows of processes, batches or stores. Import from the modules:
`masking`, `aggregate`, `advantages`, `logprobs`, `policy_loss`, `rollout_correction`, `value_loss`, `kl`,
`schedule`, `checks`.

Shape suffixes, in every file: b = rows (one response each), t = response tokens, v = vocabulary. A mask is
int64 or bool, 1 on the tokens the policy generated; whatever lies under a 0 (padding, tool output) never
reaches a result or a gradient, not even when it is NaN.
"""
