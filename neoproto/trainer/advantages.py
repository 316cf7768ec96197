"""Which advantage estimator a run has: a built-in one, or a function of the user's.

Shape legend: b = samples, t = response tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate
from neoproto.algorithms.estimators import compute_advantages
from neoproto.algorithms.masking import fill_masked
from neoproto.config import RunConfig
from neoproto.config.algorithm import CUSTOM
from neoproto.errors import AdvantageError, ConfigError
from neoproto.files import user_path
from neoproto.text import shown_with_type
from neoproto.user_code import error_place, load_function, run_users

FIELD = "algorithm.custom_advantage_function"
EstimatorFunction = Callable[[AdvantageInputs, AdvantageOptions], Estimate]


def advantage_options(config: RunConfig) -> AdvantageOptions:
    """The options that the configuration gives an estimator."""
    algorithm = config.algorithm
    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        whiten=algorithm.whiten_advantages,
    )


def chosen_estimator(config: RunConfig) -> EstimatorFunction:
    """The estimator that `algorithm` names. A file of the user's is imported again on every call.

    Raises:
        ConfigError: the file or the function cannot be used.
    """
    kind, custom = config.algorithm.adv_estimator, config.algorithm.custom_advantage_function
    if kind != CUSTOM:
        return functools.partial(compute_advantages, kind)
    assert custom.path is not None
    function = load_function(
        custom.path,
        custom.name,
        field=FIELD,
        positional=("inputs", "options"),
        keywords=tuple(custom.options),
    )
    file = str(user_path(custom.path, field=f"{FIELD}.path").resolve())
    return OwnEstimator(function, custom.options, custom.name, file)


class OwnEstimator:
    """A function of the user's, called like the built-in estimators and not trusted like them.

    What it changes in place (tensors, lists and dictionaries among its keywords) are copies of its own.

    Args:
        function: of inputs, options and the keywords.
        keywords: what the configuration gives it beside them.
        name, file: what it is called, and where it is, for messages.
    """

    def __init__(
        self, function: Callable[..., Any], keywords: Mapping[str, Any], name: str, file: str
    ) -> None:
        self._function, self._keywords, self._name, self._file = function, keywords, name, file

    def __call__(self, inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
        """(advantages_bt, returns_bt), 0 outside the mask whatever the function left there.

        Raises:
            AdvantageError: it raised (with the line), or returned something else than two float tensors of
                the rewards' shape.
        """

        def work() -> Any:
            with torch.no_grad():
                return self._function(inputs.copy(), options, **copy.deepcopy(dict(self._keywords)))

        returned = run_users(
            work,
            lambda error: AdvantageError(
                f"{self._name} in {self._file} raised: {error_place(error, self._file)}"
            ),
        )
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise self._no_estimate(f"two tensors, got {shown_with_type(returned)}")
        rewards_bt = inputs.rewards_bt
        for what, found in zip(("advantages", "returns"), returned, strict=True):
            if not isinstance(found, torch.Tensor):
                raise self._no_estimate(f"{what} as a tensor, got {shown_with_type(found)}")
            if found.shape != rewards_bt.shape or not found.is_floating_point():
                got = f"{found.dtype} {list(found.shape)}"
                raise self._no_estimate(f"{what} as a float tensor {list(rewards_bt.shape)}, got {got}")
        advantages_bt, returns_bt = (
            fill_masked(one.detach().to(rewards_bt.dtype), inputs.mask_bt) for one in returned
        )
        return advantages_bt, returns_bt

    def _no_estimate(self, wanted: str) -> AdvantageError:
        return AdvantageError(f"{self._name} in {self._file} should return {wanted}")


def check_estimator(config: RunConfig) -> None:
    """Load an estimator of the user's, and have it judge a small batch that was made up.

    What is loaded here is thrown away: a run's own is loaded when training starts, untouched by this call.

    Raises:
        ConfigError: it cannot be loaded, raises, or returns no estimate.
    """
    if config.algorithm.adv_estimator != CUSTOM:
        return
    estimator, inputs = chosen_estimator(config), made_up_inputs(config)
    try:
        advantages_bt, _ = estimator(inputs, advantage_options(config))
    except AdvantageError as error:
        raise ConfigError(f"{FIELD}: {error}, on a small batch that was made up to try it") from error
    if not bool(torch.isfinite(advantages_bt).all()):
        raise ConfigError(
            f"{FIELD}: {config.algorithm.custom_advantage_function.name} returned advantages that are not "
            "finite, on a small batch that was made up to try it"
        )


def made_up_inputs(config: RunConfig) -> AdvantageInputs:
    """Two prompts' samples, of 1 to 4 tokens each; every second is right, the last is cut at the limit.

    With a critic it has values; where cut responses are masked, the mask of the last one is empty.
    """
    rows, width = 2 * config.actor_rollout_ref.rollout.n, 4
    lengths_b = 1 + torch.arange(rows) % width
    position_t = torch.arange(width)
    truncated_b = torch.arange(rows) == rows - 1
    mask_bt = (position_t < lengths_b[:, None]).long()
    if config.algorithm.truncated == "mask":
        mask_bt[-1] = 0
    scores_b = (torch.arange(rows) % 2).float()
    rewards_bt = torch.where(position_t == lengths_b[:, None] - 1, scores_b[:, None], 0.0) * mask_bt
    values_bt = 0.5 * mask_bt.float() if config.uses_critic else None
    return AdvantageInputs(
        rewards_bt=rewards_bt,
        mask_bt=mask_bt,
        values_bt=values_bt,
        bootstrap_values_b=torch.full((rows,), 0.5) if config.uses_critic else None,
        truncated_b=truncated_b
        if config.algorithm.truncated == "bootstrap"
        else torch.zeros_like(truncated_b),
        group_ids_b=torch.arange(2).repeat_interleave(config.actor_rollout_ref.rollout.n),
    )
