"""A random two-layer Llama folder with a tokenizer, and batches for it, made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 40
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_folder(path: Path, *, seed: int = 0, hidden_size: int = 32, tied: bool = False) -> str:
    """Write the model to `path`; its weights are large enough for log-probs that differ between tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{index}": index for index in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return str(path)


def make_batch(
    rows: int, *, prompt_width: int = 9, response_width: int = 7, seed: int = 0, empty: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """Columns as the trainer sends them, of random lengths; rows in `empty` have an empty response mask."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(most: int) -> Tensor:
        return torch.randint(1, most + 1, (rows, 1), generator=generator)

    def noise() -> Tensor:
        return torch.randn(rows, response_width, generator=generator)

    width = prompt_width + response_width
    prompt_lengths, response_lengths = lengths(prompt_width - 1), lengths(response_width - 1)
    position = torch.arange(width)
    attention = (position >= prompt_width - prompt_lengths) & (position < prompt_width + response_lengths)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator) * attention
    mask = attention[:, prompt_width:].long()
    mask[list(empty)] = 0
    return {
        "input_ids": ids,
        "attention_mask": attention.long(),
        "position_ids": (attention.long().cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, prompt_width:],
        "response_mask": mask,
        "advantages": noise() * mask,
        "old_log_probs": (noise().abs() * -0.3 - 3.0) * mask,
        "ref_log_prob": (noise().abs() * -0.3 - 3.0) * mask,
        "values": noise() * mask,
        "returns": noise() * mask,
    }
