"""The built-in rewards, by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from actors.reward.builtin import (
    BUILT_INS,
    check_rows,
    choose_built_in,
    exact_match,
    find_last_number,
    last_number,
    number_text,
    reasoning_gym_score,
)
from neoproto.data.rows import rows_from_dicts
from neoproto.errors import ConfigError


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        ("cba", "cba", 1),
        (" cba\n", "cba", 1),
        ("cba", " cba ", 1),
        ("Cba", "cba", 0),
        ("c ba", "cba", 0),
        ("7", 7, 1),
    ],
)
def test_exact_match_ignores_outer_white_space_only(solution: str, truth: Any, right: int) -> None:
    assert (exact_match(solution, truth).score, exact_match(solution, truth).acc) == (right, right)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 12", "12"),
        ("3 plus 4 makes 7.", "7"),
        ("1,234.50 in all", "1234.50"),
        ("-3", "-3"),
        ("x=.5", ".5"),
        ("from 10,20", "20"),
        ("12,345,678", "12345678"),
        ("#### 42", "42"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert find_last_number(text) == Decimal(number)


def test_last_number_compares_values() -> None:
    assert last_number("so 5 … 1,000", "1000.0").score == 1
    assert last_number("1000 so 5", "1000").score == 0
    assert last_number("none at all", "1").score == 0
    assert last_number("18", "… #### 18").acc == 1
    with pytest.raises(ValueError, match="the ground truth 'x' has no number"):
        last_number("1", "x")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (("3", "3.0", "3.00", "+3", "003"), "3"),
        (("100", "100.0", "1e2"), "100"),
        (("0", "-0", "0.0", "-0.00"), "0"),
        (("-.50", "-0.5"), "-0.5"),
        (("1" + 40 * "0" + "1.0", "1" + 40 * "0" + "1"), "1" + 40 * "0" + "1"),
    ],
)
def test_equal_numbers_share_a_text(numbers: tuple[str, ...], text: str) -> None:
    assert {number_text(Decimal(number)) for number in numbers} == {text}


def test_reasoning_gyms_verifier_gives_partial_credit_and_acc_is_exact() -> None:
    extra = {"question": "Spell abcd backward", "answer": "dcba", "metadata": {"word": "abcd"}}

    def judged(solution: str) -> tuple[float, float]:
        made = reasoning_gym_score(solution, "dcba", "reasoning_gym/spell_backward", extra)
        return made.score, made.acc

    assert judged(" dcba ") == (1.0, 1.0)
    score, acc = judged("dcbx")
    assert 0 < score < 1
    assert acc == 0
    with pytest.raises(ValueError, match="extra_info lacks answer, metadata"):
        reasoning_gym_score("x", "y", "reasoning_gym/spell_backward", {"question": "q"})
    with pytest.raises(ValueError, match="reasoning-gym has no task 'no_such_task'"):
        reasoning_gym_score("x", "y", "reasoning_gym/no_such_task", extra)


def test_a_rows_style_chooses_unless_the_name_does() -> None:
    for name in BUILT_INS:
        assert choose_built_in("auto", name, "anything") == name
        assert choose_built_in(name, "whatever", "anything") == name
    assert choose_built_in("auto", "rule", "openai/gsm8k") == "last_number"
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
