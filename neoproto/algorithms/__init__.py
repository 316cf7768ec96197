"""Pure tensor arithmetic of policy optimisation: advantages, losses, KL, masking, schedules.

Nothing here knows of processes, batches or stores. Import from the modules. Advantage estimators and policy
losses are one a file, in `estimators` and `losses`; what they read and their options are in `advantages` and
`policy_loss`.

Shape suffixes, in every file: b = rows (one response each), t = response tokens, v = vocabulary. A mask is
int64 or bool, 1 on the tokens the policy generated; whatever lies under a 0 (padding, tool output) never
reaches a result or a gradient, not even when it is NaN.
"""
