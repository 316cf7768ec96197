"""Which built-in reward judges a row, and rows that none can."""

from __future__ import annotations

from typing import Any

import pytest

from actors.reward.builtin import check_rows, choose_built_in
from neoproto.data.rows import rows_from_dicts
from neoproto.errors import ConfigError
from neoproto.rewards.builtin import REWARDS


def test_a_rows_style_chooses_unless_the_name_does() -> None:
    for name in REWARDS:
        assert choose_built_in("auto", name, "anything") == name
        assert choose_built_in(name, "whatever", "anything") == name
    assert choose_built_in("auto", "rule", "openai/gsm8k") == "last_number"
    assert choose_built_in("auto", "rule", "lighteval/MATH") == "math_verify"
    with pytest.raises(ConfigError, match=r"reward_model\.style='rule' of data source 'mine'"):
        choose_built_in("auto", "rule", "mine")
    with pytest.raises(ConfigError, match=r"reward\.name: 'bleu' is not known; known: auto, exact_match"):
        choose_built_in("bleu", "exact_match", "x")


def judged_row(ground_truth: Any, extra_info: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "?"}],
        "data_source": "mine",
        "reward_model": {"style": "exact_match", "ground_truth": ground_truth},
        "extra_info": extra_info,
    } | more


ENTRY = {"question": "q", "answer": "a", "metadata": {}}
SPELLING = {"data_source": "reasoning_gym/spell_backward"}


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("last_number", judged_row("1,000 or so"), None),
        ("last_number", judged_row("ih"), "the ground truth 'ih' has no number (judged by last_number)"),
        (
            "last_number",
            judged_row({"a": 1}),
            "reward_model.ground_truth: a text or a number is needed, got {",
        ),
        ("auto", judged_row(7), None),
        ("auto", judged_row(None), "reward_model.ground_truth: a text or a number is needed, got None"),
        ("auto", judged_row(["a"]), "reward_model.ground_truth: a text or a number is needed, got ['a']"),
        ("math_verify", judged_row("3/4"), None),
        ("math_verify", judged_row(r"$\frac{1}{2}$"), None),
        ("math_verify", judged_row("ih"), "math-verify finds no expression in the ground truth 'ih'"),
        ("reasoning_gym", judged_row(None, ENTRY, **SPELLING), None),
        ("reasoning_gym", judged_row("a", None, **SPELLING), "extra_info lacks question, answer, metadata"),
        ("reasoning_gym", judged_row("a", ENTRY), "data_source: reasoning-gym has no task 'mine'"),
        (
            "reasoning_gym",
            judged_row("a", ENTRY | {"metadata": "m"}, **SPELLING),
            "extra_info.metadata: an object is needed, got 'm'",
        ),
        (
            "auto",
            judged_row(1, reward_model={"style": "reasoning_gym", "ground_truth": 1}),
            "extra_info lacks question, answer, metadata",
        ),
    ],
)
def test_every_row_can_be_judged_by_its_reward(name: str, row: dict[str, Any], said: str | None) -> None:
    good = judged_row("1", ENTRY, **SPELLING)
    rows = rows_from_dicts([good, row, row], name="mine")
    if said is None:
        check_rows(name, rows)
        return
    with pytest.raises(ConfigError) as caught:
        check_rows(name, rows)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == ["mine, row 1", "mine, row 2"]
    assert said in caught.value.problems[0]


def test_rows_without_a_judge_are_refused_once_a_kind() -> None:
    def row(style: str, source: str) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": "?"}],
            "data_source": source,
            "reward_model": {"style": style, "ground_truth": "1"},
        }

    good, bad = row("exact_match", "a"), [row("model", "b"), row("model", "b"), row("model", "c")]
    check_rows("auto", rows_from_dicts([good], name="mine"))
    check_rows("exact_match", rows_from_dicts([good, *bad], name="mine"))
    with pytest.raises(ConfigError) as caught:
        check_rows("auto", rows_from_dicts([good, *bad], name="mine"))
    assert [problem[:13] for problem in caught.value.problems] == ["mine, row 1: ", "mine, row 3: "]
