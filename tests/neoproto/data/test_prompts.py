"""Tokenising prompts, and walking through them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

from neoproto.data.prompts import (
    EncodedPrompts,
    PromptLoader,
    PromptRow,
    encode_prompts,
    load_tokenizer,
    today,
)
from neoproto.errors import ConfigError

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "b", "c", "user", "go"]
TEMPLATE = "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}go"


def tokenizer(chat_template: str | None = TEMPLATE, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = chat_template
    return made


class Spy:
    """A tokenizer that remembers what it was given."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self._inner, self.texts = inner, list[str]()

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.texts = texts
        return self._inner(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def prompt(text: str, index: int = 0) -> PromptRow:
    return PromptRow(
        uid=f"u{index}",
        messages=({"role": "user", "content": text},),
        data_source="letters",
        reward_model={"style": "exact_match", "ground_truth": [index]},
        extra_info={},
        origin=f"letters.jsonl:{index}",
    )


def encoded(count: int) -> EncodedPrompts:
    rows = [prompt("a " * (1 + index % 3), index) for index in range(count)]
    return encode_prompts(rows, tokenizer(), 8)


def test_the_chat_template_and_its_generation_prompt_are_used() -> None:
    done = encode_prompts([prompt("a b")], tokenizer(), 8)
    assert [WORDS[i] for i in done.token_ids[0]] == ["<bos>", "user", "a", "b", "go"]


def test_plain_joins_contents_and_a_text_is_a_template() -> None:
    two = PromptRow(
        uid="u",
        messages=({"role": "system", "content": "a"}, {"role": "user", "content": "b c"}),
        data_source="letters",
        reward_model={"style": "x", "ground_truth": 0},
        extra_info={},
        origin="here",
    )
    bare = tokenizer(chat_template=None)
    assert [WORDS[i] for i in encode_prompts([two], bare, 8, chat_template="plain").token_ids[0]] == [
        "a",
        "b",
        "c",
    ]
    own = encode_prompts([two], bare, 8, chat_template="{{ messages[1].content }} go")
    assert [WORDS[i] for i in own.token_ids[0]] == ["b", "c", "go"]


def test_no_template_at_all_is_an_error_that_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"^data\.chat_template: .* no chat template.*=plain"):
        encode_prompts([prompt("a")], tokenizer(chat_template=None), 8)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (r"{{ raise_exception('no\nsystem') }}", "no system"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_names_the_row(template: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encode_prompts([prompt("a")], tokenizer(template), 8)
    assert str(caught.value).startswith(f"letters.jsonl:0: the chat template cannot be rendered: {said}")
    assert "\n" not in str(caught.value)


def test_a_prompt_that_cannot_be_tokenised_is_named() -> None:
    made = tokenizer("{{ messages[0].content }}")
    made.backend_tokenizer.model = models.WordLevel({"a": 0}, unk_token="<unk>")
    with pytest.raises(ConfigError, match=r"^letters\.jsonl:1: the tokenizer in .* cannot tokenise .*UNK"):
        encode_prompts([prompt("a", 0), prompt("z", 1)], made, 8)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    rows = [prompt("a", 0), prompt("c", 1), prompt("b", 2), prompt("c", 3)]
    plain = tokenizer("{{ messages[0].content }}")
    with pytest.raises(ConfigError) as caught:
        encode_prompts(rows, plain, 8, vocab_size=6)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "letters.jsonl:1",
        "letters.jsonl:3",
    ]
    assert "gives token number 6 ('c'), but the model knows 6 tokens" in str(caught.value)
    assert len(encode_prompts(rows, plain, 8, vocab_size=7)) == 4


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"letters\.jsonl:4: the prompt has no tokens"):
        encode_prompts([prompt("", 4)], tokenizer(), 8, chat_template="plain")


def test_overlong_prompts_by_policy() -> None:
    rows = [prompt("a", 0), prompt("a b c a b c", 1)]
    said = r"^data\.max_prompt_length=5: 1 of 2 prompts are longer, first letters\.jsonl:1 with 9 tokens \("
    with pytest.raises(ConfigError, match=said):
        encode_prompts(rows, tokenizer(), 5)

    words = {}
    for side in ("left", "right"):
        cut = encode_prompts(rows, tokenizer(), 5, truncation=side)  # type: ignore[arg-type]
        assert (cut.truncated, cut.filtered, len(cut)) == (1, 0, 2)
        words[side] = [WORDS[i] for i in cut.token_ids[1]]
    assert words == {"left": ["c", "a", "b", "c", "go"], "right": ["<bos>", "user", "a", "b", "c"]}

    kept = encode_prompts(rows, tokenizer(), 5, truncation="filter")
    assert (kept.truncated, kept.filtered, [r.uid for r in kept.rows]) == (0, 1, ["u0"])
    with pytest.raises(ConfigError, match=r"none of the 2 prompts is short enough"):
        encode_prompts(rows, tokenizer(), 2, truncation="filter")


def test_an_unknown_truncation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.truncation: one of error, left, right, filter .* 'middle'"):
        encode_prompts([prompt("a")], tokenizer(), 5, truncation="middle")  # type: ignore[arg-type]


def test_columns_are_left_padded_and_keep_objects_whole() -> None:
    columns = encoded(3).columns([2, 0])
    assert columns.tensors["prompt_len"].tolist() == [6, 4]
    assert columns.tensors["prompts"].tolist() == [[0, 0, 1, 7, 4, 4, 4, 8], [0, 0, 0, 0, 1, 7, 4, 8]]
    assert columns.tensors["prompts"].dtype == torch.int64
    assert list(columns.non_tensors["uid"]) == ["u2", "u0"]
    assert columns.non_tensors["reward_model"][0] == {"style": "exact_match", "ground_truth": [2]}
    assert columns.non_tensors["raw_prompt"].shape == (2,)
    assert columns.non_tensors["raw_prompt"][1] == [{"role": "user", "content": "a "}]


def test_batches_cover_every_prompt_once() -> None:
    uids = [list(batch.non_tensors["uid"]) for batch in encoded(5).batches(2)]
    assert uids == [["u0", "u1"], ["u2", "u3"], ["u4"]]


def test_each_epoch_is_a_permutation_of_its_own_and_repeatable() -> None:
    first, again = PromptLoader(encoded(10), 3, seed=1), PromptLoader(encoded(10), 3, seed=1)
    other = PromptLoader(encoded(10), 3, seed=2)
    assert first.steps_per_epoch == 3
    epochs = [[first.next_indices() for _ in range(3)] for _ in range(2)]
    assert epochs == [[again.next_indices() for _ in range(3)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [other.next_indices() for _ in range(3)]
    for epoch in epochs:
        drawn = [index for batch in epoch for index in batch]
        assert len(set(drawn)) == len(drawn) == 9


def test_without_shuffling_the_order_is_the_datas() -> None:
    loader = PromptLoader(encoded(5), 2, shuffle=False)
    assert [loader.next_indices() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert list(loader.next_batch().non_tensors["uid"]) == ["u2", "u3"]


def test_the_epoch_is_that_of_the_next_batch() -> None:
    loader = PromptLoader(encoded(4), 2)
    seen = []
    for _ in range(5):
        seen.append(loader.epoch)
        loader.next_indices()
    assert seen == [0, 0, 1, 1, 2]


CHATML = (
    "{% for m in messages %}[{{ m.role }}] {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def asked(*messages: tuple[str, str]) -> PromptRow:
    return dataclasses.replace(
        prompt(""), messages=tuple({"role": role, "content": content} for role, content in messages)
    )


def test_an_answer_continues_the_assistants_last_message() -> None:
    spy = Spy(tokenizer(CHATML))
    rows = [
        asked(("user", "a"), ("assistant", "b")),
        asked(("user", "a")),
        asked(("user", "a"), ("assistant", "")),
    ]
    encode_prompts(rows, spy, 16)
    assert spy.texts == [
        "[user] a </s> [assistant] b",
        "[user] a </s> [assistant] ",
        "[user] a </s> [assistant] ",
    ]
    encode_prompts(rows[:1], spy, 16, chat_template="plain")
    assert spy.texts == ["a\nb"]


def test_a_message_of_tool_calls_alone_needs_no_content() -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "b"}}]}
    row = asked(("user", "a"), ("tool", "c"))
    row = dataclasses.replace(row, messages=(row.messages[0], calls, row.messages[1]))
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }} {% endfor %}"
    spy = Spy(tokenizer(template))
    for chosen, text in ((None, "a b c "), ("plain", "a\nc")):
        encode_prompts([row], spy, 16, chat_template=chosen)
        assert spy.texts == [text]


def test_a_last_message_that_the_template_drops_cannot_be_continued() -> None:
    one_turn = "{% for m in messages if m.role == 'user' %}{{ m['content'] }}{% endfor %}"
    said = r"^letters\.jsonl:0: the chat template cannot be rendered: continue_final_message is set but"
    with pytest.raises(ConfigError, match=said):
        encode_prompts([asked(("user", "a"), ("assistant", "b"))], tokenizer(one_turn), 16)


def test_a_role_that_neither_we_nor_the_template_know_is_refused() -> None:
    said = r"^letters\.jsonl:0: prompt\[0\]\.role: system, .*or one that the chat template names, .*got "
    for role in ("human", "", "User"):
        with pytest.raises(ConfigError, match=said + repr(role)):
            encode_prompts([asked((role, "a"))], tokenizer(CHATML), 16)
    names_it = CHATML + "{# m['role'] == 'human' #}"
    assert len(encode_prompts([asked(("human", "a"), ("tool", "b"))], tokenizer(names_it), 16)) == 1


TELLS_DATE = "{{ strftime_now('%d %b %Y %H:%M') }} {% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_a_template_is_told_the_date_of_the_run_and_nothing_of_the_clock() -> None:
    spy = Spy(tokenizer(TELLS_DATE))
    done = encode_prompts([prompt("a")], spy, 16, date="2026-02-28")
    assert (spy.texts, done.date) == (["28 Feb 2026 00:00 a"], "2026-02-28")
    assert encode_prompts([prompt("a")], spy, 16).date == today()
    assert spy.texts[0].startswith(datetime.date.today().strftime("%d %b %Y 00:00"))
    assert encode_prompts([prompt("a")], tokenizer(), 16, date="2026-02-28").date is None
    assert encode_prompts([prompt("a")], spy, 16, chat_template="plain").date is None


def test_a_position_in_prompts_of_another_day_is_named_as_that() -> None:
    def loader(day: str) -> PromptLoader:
        return PromptLoader(encode_prompts([prompt("a")], tokenizer(TELLS_DATE), 16, date=day), 1)

    state = loader("2026-02-28").state_dict()
    loader("2026-02-28").load_state_dict(state)
    said = r"^data\.date: got 2026-03-01, but the saved position is of prompts told 2026-02-28$"
    with pytest.raises(ConfigError, match=said):
        loader("2026-03-01").load_state_dict(state)
    del state["date"]
    with pytest.raises(ConfigError, match=r"; they are told the date 2026-03-01, data.date names another$"):
        loader("2026-03-01").load_state_dict(state | {"fingerprint": "other"})


def test_a_restored_loader_goes_on_where_the_other_stopped() -> None:
    loader = PromptLoader(encoded(10), 3, seed=1)
    for _ in range(4):
        loader.next_indices()
    state = loader.state_dict()
    fresh = PromptLoader(encoded(10), 3, seed=1)
    fresh.load_state_dict(state)
    assert [fresh.next_indices() for _ in range(4)] == [loader.next_indices() for _ in range(4)]


def test_a_position_in_other_data_is_refused() -> None:
    state = PromptLoader(encoded(10), 3, seed=1).state_dict()
    with pytest.raises(ConfigError, match="of other training data: fingerprint"):
        PromptLoader(encoded(9), 3, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed 1 there, 2 here"):
        PromptLoader(encoded(10), 3, seed=2).load_state_dict(state)


def test_fewer_prompts_than_a_batch_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=4: the data have only 3 prompts"):
        PromptLoader(encoded(3), 4)


def model_folder(folder: Path, made: Any, vocab_size: int = 16) -> Path:
    LlamaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    made.save_pretrained(folder)
    return folder


def test_a_folders_tokenizer_is_loaded_and_always_pads(tmp_path: Path) -> None:
    loaded = load_tokenizer(model_folder(tmp_path, tokenizer(pad=None)))
    assert loaded.pad_token_id == loaded.eos_token_id == 2
    assert encode_prompts([prompt("a")], loaded, 4).token_ids == ((1, 7, 4, 8),)


@pytest.mark.parametrize("case", ["Llama", "another model", "no tokenizer_config"])
def test_the_tokenizer_is_the_one_that_transformers_chooses(tmp_path: Path, case: str) -> None:
    folder = model_folder(tmp_path, tokenizer())
    if case == "another model":
        MistralConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    if case == "no tokenizer_config":
        about = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": about["eos_token"]}))
        (folder / "tokenizer_config.json").unlink()
    auto = AutoTokenizer.from_pretrained(folder)
    if case == "no tokenizer_config":
        auto.pad_token = auto.eos_token  # as `load_tokenizer` does
    loaded = load_tokenizer(folder)
    assert type(loaded) is type(auto)
    assert loaded.special_tokens_map == auto.special_tokens_map
    assert loaded.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    assert loaded.chat_template == auto.chat_template


def test_a_plain_llamas_tokenizer_is_loaded_without_models(tmp_path: Path) -> None:
    """AutoTokenizer imports them, and torch's compiler with them."""
    folder = model_folder(tmp_path, tokenizer())
    code = (
        "import sys; from neoproto.data.prompts import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{}", "the tokenizer in {folder} cannot be loaded: "),
        ("tokenizer.json", "[]", "{folder}/tokenizer.json: a JSON object is needed, got []"),
        ("tokenizer_config.json", "{", "{folder}/tokenizer_config.json cannot be read: Expecting"),
        ("special_tokens_map.json", "[]", "{folder}/special_tokens_map.json: a JSON object is needed"),
    ],
)
def test_a_broken_tokenizer_is_an_error_of_its_file(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    folder = model_folder(tmp_path, tokenizer())
    (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith("actor_rollout_ref.model.path: " + said.format(folder=folder))


def test_code_in_a_folder_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask at the terminal, and run it on "y"."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    model_folder(tmp_path, tokenizer())
    (tmp_path / "mine.py").write_text("open('was_run', 'w').close()\n")
    own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    assert asked == []
    assert not (tmp_path / "was_run").exists()


def test_special_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    said = r"^actor_rollout_ref\.model\.path: .* the eos_token '<eos>' as number 2, .* knows 2 tokens"
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(model_folder(tmp_path / "a", tokenizer(), vocab_size=2))
    made = tokenizer(pad="go")
    assert load_tokenizer(model_folder(tmp_path / "b", made, vocab_size=9)).pad_token_id == 8
    with pytest.raises(ConfigError, match="the pad_token 'go' as number 8"):
        load_tokenizer(model_folder(tmp_path / "c", made, vocab_size=8))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    made = tokenizer()
    made.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load_tokenizer(model_folder(tmp_path, made))
