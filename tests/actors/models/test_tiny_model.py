"""The default model: the folder it makes, that it makes it again bit for bit, and the cache."""

from __future__ import annotations

import dataclasses
import datetime
import json
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.models import tiny_model
from actors.models.tiny_model import (
    TinyModelOptions,
    cache_folder,
    ensure_tiny_model,
    main,
    make_tiny_model,
    model_key,
)
from actors.models.warm_start import WarmStart
from neoproto.errors import ConfigError

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Say the letter: {letter}{other}"}],
        "reward_model": {"style": "exact_match", "ground_truth": letter},
    }
    for letter in string.ascii_lowercase[:4]
    for other in string.ascii_lowercase
]
SMALL = TinyModelOptions(
    hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, max_positions=32,
    batch_size=16, max_steps=4, check_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    make_tiny_model(path, SMALL, ROWS)
    return path


def test_transformers_loads_it(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(ROWS[0]["prompt"], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] <= ids["input_ids"].shape[1] + 3


def test_the_record_says_how_it_was_made(folder: Path) -> None:
    record = json.loads((folder / tiny_model.RECORD_FILE).read_text())
    assert record["options"]["hidden_size"] == 32
    assert record["phrases"] == ["Say the letter: "]
    assert (record["rows"], record["rows_too_long"]) == (len(ROWS), 0)
    assert record["warm_start"]["steps"] == 4


def test_the_same_again_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    make_tiny_model(tmp_path, SMALL, ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_seed_makes_another_model(folder: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, dataclasses.replace(SMALL, seed=1), ROWS)
    assert (tmp_path / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_the_key_changes_with_whatever_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        model_key(SMALL, ROWS),
        model_key(SMALL, ROWS[1:]),
        model_key(dataclasses.replace(SMALL, num_layers=2), ROWS),
        model_key(dataclasses.replace(SMALL, max_steps=5), ROWS),
    }
    monkeypatch.setattr(tiny_model, "RECIPE", 1000)
    keys.add(model_key(SMALL, ROWS))
    assert len(keys) == 5


def test_messages_may_hold_whatever_a_row_may() -> None:
    """A Parquet file can have a date beside each message."""

    def key(day: int) -> str:
        message = {"role": "user", "content": "a", "written": datetime.date(2026, 1, day)}
        return model_key(SMALL, [{**ROWS[0], "prompt": [message]}])

    assert key(1) == key(1) != key(2)


def test_the_cache_makes_it_once(tmp_path: Path, folder: Path) -> None:
    calls: list[WarmStart] = []
    first = ensure_tiny_model(SMALL, ROWS, tmp_path, calls.append)
    assert [state.step for state in calls] == [0, 2, 4]
    assert (first / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert ensure_tiny_model(SMALL, ROWS, tmp_path, calls.append) == first
    assert len(calls) == 3
    assert [path.name for path in (tmp_path / "models").iterdir()] == [first.name]


def test_a_maker_that_comes_second_takes_the_firsts(tmp_path: Path) -> None:
    def first_maker(state: WarmStart) -> None:
        if state.step == 0:
            won.append(ensure_tiny_model(SMALL, ROWS, tmp_path))

    won: list[Path] = []
    assert ensure_tiny_model(SMALL, ROWS, tmp_path, first_maker) == won[0]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [won[0].name]


def test_a_damaged_folder_is_made_again(tmp_path: Path) -> None:
    made = ensure_tiny_model(SMALL, ROWS, tmp_path)
    (made / "model.safetensors").unlink()
    assert ensure_tiny_model(SMALL, ROWS, tmp_path) == made
    assert (made / "model.safetensors").is_file()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [made.name]


def test_an_interrupted_maker_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: WarmStart) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_model(SMALL, ROWS, tmp_path, interrupt)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["cache", "a" * 300])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    if name == "cache":
        (tmp_path / name).mkdir()
        (tmp_path / name / "models").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"the model cache .*models cannot be written .*NEOPROTO_CACHE"):
        ensure_tiny_model(SMALL, ROWS, tmp_path / name)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NEOPROTO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/neoproto")),
        ({}, Path.home() / ".cache/neoproto"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], expected: Path) -> None:
    assert cache_folder(environment) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_heads": 5}, "hidden_size: 128 does not divide by num_heads 5"),
        ({"num_heads": 8}, "no CPU kernel for heads of 16; known sizes: 32"),
        (
            {"num_layers": 0, "num_heads": 0},
            "(?s)num_layers: at least 1, got 0.*num_heads: at least 1, got 0",
        ),
        ({"stop_score": 2}, r"tiny model: stop_score: from 0 to 1, got 2"),
        ({"batch_size": 0}, r"batch_size: at least 1, got 0"),
        ({"learning_rate": 0}, r"learning_rate: above 0, got 0"),
        ({"num_threads": 10**6}, "num_threads: at most 1024, got 1000000"),
        (
            {"hidden_size": 128_000, "num_heads": 1000},
            "num_layers: 1,000,000,000 parameters at most, these have",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TinyModelOptions(**options)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = (
        "--hidden-size 32 --intermediate-size 32 --num-heads 1 --num-layers 1 --max-steps 1 --batch-size 8"
    )
    chain = ["--task", "chain_sum", "--options", "{}", "--size", "40", "--val-size", "10"]
    assert main(["--out", str(tmp_path), *chain, *shape.split()]) == 0
    out = capsys.readouterr()
    assert out.out == f"{tmp_path}\n"
    assert out.err.splitlines()[-1].startswith("step 1/1, loss ")
    assert AutoTokenizer.from_pretrained(tmp_path).encode(
        "State the final answer to the following arithmetic "
    )
    assert main(["--task", "chain_sun"]) == 2
    assert "did you mean chain_sum" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file", "file/x", "x" * 300])
def test_a_folder_that_cannot_be_made_is_said_before_the_warm_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(tiny_model, "make_tiny_model", None)
    assert main(["--out", out, "--size", "20", "--val-size", "5"]) == 2
    assert capsys.readouterr().err.startswith(f"--out: {out}")


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON: Expecting"), ("[1]", "a JSON object is needed, got [1]")]
)
def test_options_of_a_task_are_a_json_object(
    capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--options", text])
    assert f"argument --options: {said}" in capsys.readouterr().err


def test_the_command_uses_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEOPROTO_CACHE", str(tmp_path))
    shape = "--hidden-size 32 --intermediate-size 32 --num-heads 1 --num-layers 1 --max-steps 0"
    assert main([*shape.split(), "--size", "20", "--val-size", "5"]) == 0
    out = capsys.readouterr()
    assert Path(out.out.strip()).parent == tmp_path / "models"
    assert out.err.startswith("step 0/0: exact match")


def test_importing_it_is_light() -> None:
    heavy = "{'transformers', 'vllm', 'monarch', 'reasoning_gym'}"
    code = f"import sys, actors.models.tiny_model; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
