"""The tiny model's tokenizer: one token a byte, one for a task's fixed phrases, and a chat template.

Any text survives encoding and decoding, since every byte has a token. What all questions of a task share (its
instruction sentence) is one token, so prompts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["BOS", "CHAT_TEMPLATE", "EOS", "PAD", "SPECIAL_TOKENS", "build_tokenizer", "shared_phrases"]

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>")
"""Their ids are their places here, so the padding token is 0, the first 1 and the last 2."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('roles are system, user and assistant, got ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- if message['role'] == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

_SHORTEST_PHRASE = 2


def shared_phrases(questions: Sequence[str]) -> tuple[str, ...]:
    """What all questions begin and end with, cut between words; phrases of one character are left out."""
    if len(set(questions)) < 2:
        return ()
    start = _common_start(questions)
    start = start[: start.rfind(" ") + 1]
    end = _common_start([question[len(start) :][::-1] for question in questions])[::-1]
    end = end[end.find(" ") :] if " " in end else ""
    return tuple(dict.fromkeys(phrase for phrase in (start, end) if len(phrase) >= _SHORTEST_PHRASE))


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def build_tokenizer(phrases: Sequence[str], *, max_length: int) -> Any:
    """A `PreTrainedTokenizerFast` with the special tokens, one token for each of 256 bytes, and the phrases.

    Args:
        phrases: texts that become one token wherever they stand.
        max_length: the model's positions, for the tokenizer's own warning.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
