"""Which built-in reward judges a row: chosen by name, or by the row's `reward_model.style` and source."""

from __future__ import annotations

from collections.abc import Iterable

from neoproto.data.rows import PromptRow
from neoproto.errors import ConfigError
from neoproto.rewards.builtin import REWARDS
from neoproto.rewards.score import RowError
from neoproto.text import Problems

AUTO = "auto"


def choose_built_in(name: str, style: str, data_source: str) -> str:
    """Which built-in judges a row.

    Args:
        name: `reward.name`: a built-in, or "auto": the row's style, if it is the name of one; style "rule",
            as verl's data sets have it, goes by the data source.
        style, data_source: the row's.

    Raises:
        ConfigError: no built-in fits.
    """
    if name in REWARDS:
        return name
    if name != AUTO:
        raise ConfigError(f"reward.name: {name!r} is not known; known: {', '.join((AUTO, *REWARDS))}")
    if style in REWARDS:
        return style
    if style == "rule":
        for built_in, reward in REWARDS.items():
            if data_source in reward.data_sources:
                return built_in
    raise ConfigError(
        f"reward.name={AUTO}: no built-in reward for reward_model.style={style!r} of data source "
        f"{data_source!r}; set reward.name to one of {', '.join(REWARDS)}, or "
        "reward.custom_reward_function.path"
    )


def check_rows(name: str, rows: Iterable[PromptRow]) -> None:
    """Refuse rows that no built-in reward judges, or by which theirs could judge no answer.

    Args:
        name: `reward.name`.
        rows: training and validation rows; needless with a custom reward function.

    Raises:
        ConfigError: for each style and data source without a judge, naming the first such row; and for each
            row whose ground truth or `extra_info` its judge cannot use. The first ten problems are listed and
            the rest counted.
    """
    problems = Problems()
    without_judge = set()
    for row in rows:
        kind = (str(row.reward_model.get("style")), row.data_source)
        if kind in without_judge:
            continue
        try:
            chosen = choose_built_in(name, *kind)
        except ConfigError as error:
            without_judge.add(kind)
            problems.add(f"{row.origin}: {error}")
            continue
        try:
            REWARDS[chosen].check_row(row)
        except RowError as error:
            problems.add(f"{row.origin}: {error} (judged by {chosen})")
    problems.raise_any()
