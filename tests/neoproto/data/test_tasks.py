"""Tasks as rows: the split, the layout, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction

import pytest

from neoproto.data.rows import rows_from_dicts
from neoproto.data.tasks import TaskRows, _without_fractions, load_task
from neoproto.errors import ConfigError

WORDS = {"min_word_len": 3, "max_word_len": 4}


@pytest.fixture(scope="module")
def words() -> TaskRows:
    return load_task("spell_backward", 4096, 0, WORDS, 600)


def questions(rows: tuple[dict, ...]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_the_default_task_has_what_is_asked_for(words: TaskRows) -> None:
    assert (len(words.train), len(words.val)) == (4096, 600)
    assert words.draws == 4096 + 600 + words.duplicates + words.held_out_variants
    assert words.duplicates > 0


def test_no_held_out_question_is_trained_on_not_even_in_other_capitals(words: TaskRows) -> None:
    train, val = questions(words.train), questions(words.val)
    assert len(set(train)) == len(train)
    assert len(set(val)) == len(val)
    assert not {q.casefold() for q in train} & {q.casefold() for q in val}
    assert words.held_out_variants > 0  # the word list has such pairs, so the rule was exercised


def test_rows_have_verls_layout(words: TaskRows) -> None:
    row = words.val[3]
    word = row["extra_info"]["metadata"]["word"]
    assert row["prompt"] == [
        {"role": "user", "content": f"Spell this word backward (example: sun -> nus): {word}"}
    ]
    assert row["data_source"] == "reasoning_gym/spell_backward"
    assert row["reward_model"] == {"style": "exact_match", "ground_truth": word[::-1]}
    assert {key: row["extra_info"][key] for key in ("index", "split")} == {"index": 3, "split": "val"}
    assert json.loads(json.dumps(words.train))[0]["prompt"] == words.train[0]["prompt"]
    checked = rows_from_dicts([*words.train, *words.val], name="spell_backward")
    assert len({row.uid for row in checked}) == 4696


def test_the_tasks_own_scorer_takes_the_row_back(words: TaskRows) -> None:
    from reasoning_gym.factory import get_score_answer_fn

    score = get_score_answer_fn("spell_backward")
    entry = words.train[0]["extra_info"]
    assert score(answer=entry["answer"], entry=entry) == 1.0
    assert score(answer="", entry=entry) == 0.0


def test_word_problems_whose_metadata_have_fractions_can_be_kept() -> None:
    rows = load_task("gsm_symbolic", 120, 0, {}, 0).train
    assert json.loads(json.dumps(rows))[0]["extra_info"] == rows[0]["extra_info"]


def test_fractions_become_numbers_wherever_they_are() -> None:
    found = _without_fractions({"a": Fraction(4, 2), "b": [Fraction(1, 4), "x"], "c": (1, 2), "d": True})
    assert found == {"a": 2, "b": [0.25, "x"], "c": (1, 2), "d": True}
    assert type(found["a"]) is int


def test_the_same_arguments_give_the_same_rows(words: TaskRows) -> None:
    assert load_task("spell_backward", 4096, 0, WORDS, 600) == words
    assert load_task("spell_backward", 4096, 1, WORDS, 600) != words


def test_what_is_held_out_does_not_depend_on_the_training_size(words: TaskRows) -> None:
    assert load_task("spell_backward", 100, 0, WORDS, 600).val == words.val


def test_a_task_with_fewer_questions_gives_what_it_has() -> None:
    rows = load_task("chain_sum", 1000, 0, {"min_terms": 2, "max_terms": 2, "max_digits": 1}, 20)
    assert len(rows.val) == 20
    assert 100 < len(rows.train) < 1000
    assert rows.draws == 4 * 1020


def test_a_task_that_has_no_more_questions_is_not_asked_for_ever() -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = load_task("chain_sum", 1_000_000_000, 0, few, 20)
    assert len(rows.val) == 20
    assert 100 < len(rows.train) < 1000
    assert rows.duplicates >= 10_000
    assert rows.draws < 30_000


def test_a_split_without_validation_is_possible() -> None:
    rows = load_task("spell_backward", 10, 0, WORDS, 0)
    assert (len(rows.train), rows.val) == (10, ())


def test_an_answer_that_is_not_unique_needs_the_tasks_scorer() -> None:
    with pytest.raises(ConfigError, match="no single right answer"):
        load_task("graph_color", 2, 0, None, 1)
    rows = load_task("graph_color", 2, 0, None, 1, reward_style="reasoning_gym")
    assert rows.train[0]["reward_model"] == {"style": "reasoning_gym", "ground_truth": None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "spel_backward"}, r"data\.task\.name: .*'spel_backward'; did you mean spell_backward"),
        ({"name": "zzzz"}, r"no task 'zzzz'$"),
        (
            {"options": {"min_len": 3}},
            r"data\.task\.options\.min_len: .*it has .*max_word_len, min_word_len$",
        ),
        ({"options": {"seed": 3}}, r"data\.task\.options\.seed: set data\.task\.seed instead"),
        (
            {"options": {"min_word_len": 5, "max_word_len": 4}},
            r"data\.task\.options: .*must be >= min_word_len",
        ),
        ({"options": {"min_word_len": "3"}}, r"data\.task\.options: spell_backward refuses .*'3'"),
        ({"options": {"data_file": "absent.txt"}}, r"data\.task\.options: .*absent\.txt"),
        ({"options": {"min_word_len": 40, "max_word_len": 41}}, r"cannot make question 0"),
        ({"size": 0, "val_size": -1}, r"size: at least 1, got 0\n.*val_size: at least 0, got -1"),
        (
            {"val_size": 100_000},
            r"data\.task\.val_size: 100000 .* only 65\d\d distinct ones in \d{5,6} draws",
        ),
        ({"reward_style": "vibes"}, r"unknown reward style 'vibes'"),
    ],
)
def test_bad_input_is_named(arguments: dict, said: str) -> None:
    given = {"name": "spell_backward", "size": 10, "seed": 0, "options": WORDS, "val_size": 5} | arguments
    with pytest.raises(ConfigError, match=said):
        load_task(**given)


def test_importing_the_module_does_not_import_reasoning_gym() -> None:
    code = "import sys, neoproto.data.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
