"""The tiny tokenizer: nothing is lost, instructions are cheap, the chat template says who speaks."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from actors.models.tiny_tokenizer import build_tokenizer, shared_phrases

SPELL = "Spell this word backward (example: sun -> nus): "
SUM = "State the final answer to the following arithmetic problem: "
MESSAGES = [{"role": "user", "content": f"{SPELL}word"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer((SPELL, " ="), max_length=64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(saved: Path) -> Any:
    return AutoTokenizer.from_pretrained(saved)


def test_prompt_of_the_default_task(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>",
        "<|user|>",
        SPELL,
        "w",
        "o",
        "r",
        "d",
        "<|assistant|>",
    ]


def test_a_whole_conversation(tokenizer: Any) -> None:
    talk = [
        {"role": "system", "content": "s"},
        *MESSAGES,
        {"role": "assistant", "content": "drow"},
        *MESSAGES,
    ]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    asked = f"<|user|>{SPELL}word"
    assert text == f"<s><|system|>s{asked}<|assistant|>drow</s>{asked}"


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="roles are system, user and assistant, got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_letters_are_single_tokens(tokenizer: Any) -> None:
    text = string.printable
    assert len(tokenizer.encode(text)) == len(text)


@given(text=st.one_of(st.text(), st.text(alphabet=string.printable), st.just(f"x {SPELL} 1 + 2 = ")))
def test_nothing_is_lost(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([*tokenizer.encode("cba"), 2], skip_special_tokens=True) == "cba"


@pytest.mark.parametrize(
    ("questions", "phrases"),
    [
        ([f"{SPELL}abc", f"{SPELL}abd"], (SPELL,)),
        ([f"{SUM}1 + 2 =", f"{SUM}1 + 30 ="], (f"{SUM}1 + ", " =")),
        ([f"{SUM}1 + 2 =", f"{SUM}4 - 30 ="], (SUM, " =")),
        (["one", "two"], ()),
        (["same question", "same question"], ()),
        ([], ()),
    ],
)
def test_shared_phrases(questions: list[str], phrases: tuple[str, ...]) -> None:
    assert shared_phrases(questions) == phrases
