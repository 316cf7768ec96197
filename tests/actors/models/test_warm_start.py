"""The warm start: what it scores, when it stops, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.models.tiny_tokenizer import build_tokenizer
from actors.models.warm_start import (
    Encoded,
    Example,
    WarmStart,
    WarmStartOptions,
    encode,
    exact_match,
    examples_of,
    warm_start,
)
from neoproto.errors import ConfigError


class Bigrams(nn.Module):
    """A language model whose next token depends on the last one only."""

    def __init__(self, logits_vv: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits_vv)

    def forward(self, input_ids_bt: Tensor, use_cache: bool) -> Any:
        logits = self.table[input_ids_bt]
        return type("Output", (), {"logits": logits})


def encoded(*rows: tuple[list[int], list[int]], width: int = 5) -> Encoded:
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return Encoded(ids, labels[:, 1:])


def test_exact_match_is_the_probability_of_the_whole_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Bigrams(torch.randn(6, 6, generator=generator))
    batch = encoded(([3, 4], [5, 2]), ([1], [3, 3, 2]))
    probs = torch.softmax(model.table.detach(), dim=-1)
    by_hand = (probs[4, 5] * probs[5, 2] + probs[1, 3] * probs[3, 3] * probs[3, 2]) / 2
    sampled, greedy = exact_match(model, batch)
    assert sampled == pytest.approx(float(by_hand))
    best = probs.argmax(dim=-1)
    right = [best[4] == 5 and best[5] == 2, best[1] == 3 and best[3] == 3 and best[3] == 2]
    assert greedy == pytest.approx(sum(map(bool, right)) / 2)


def test_greedy_counts_rows_whose_every_token_is_the_most_probable() -> None:
    model = Bigrams(10.0 * torch.eye(6).roll(1, dims=1))  # the next token is one more
    sampled, greedy = exact_match(model, encoded(([2], [3, 4]), ([2], [3, 3])))
    assert greedy == 0.5
    assert sampled == pytest.approx(0.5, abs=1e-3)


def test_prompt_and_padding_are_not_learnt() -> None:
    tokenizer = build_tokenizer((), max_length=64)
    batch = encode(
        [
            Example([{"role": "user", "content": "ab"}], "c"),
            Example([{"role": "user", "content": "a"}], "bcd"),
        ],
        tokenizer,
        longest=64,
    )
    a, b, c, d = tokenizer.encode("abcd")
    assert batch.input_ids_bt.tolist() == [[1, 4, a, b, 5, c, 2, 0], [1, 4, a, 5, b, c, d, 2]]
    assert batch.labels_bt.tolist() == [[-100] * 4 + [c, 2, -100], [-100] * 3 + [b, c, d, 2]]


def test_rows_that_do_not_fit_are_left_out() -> None:
    tokenizer = build_tokenizer((), max_length=64)
    long, short = (Example([{"role": "user", "content": text}], text) for text in ("12345", "123"))
    assert encode([long, short, long], tokenizer, longest=13).input_ids_bt.shape == (1, 10)
    with pytest.raises(ConfigError, match="takes 10 tokens or more, the model has 9"):
        encode([long, short], tokenizer, longest=9)


def run(seed: int = 0, **options: Any) -> tuple[Bigrams, WarmStart, list[WarmStart]]:
    model = Bigrams(torch.zeros(6, 6))
    seen: list[WarmStart] = []
    settings = WarmStartOptions(batch_size=4, check_every=3, learning_rate=0.5, **options)
    rows = encoded(*(([1], [3, 2]) for _ in range(20)))
    return model, warm_start(model, rows, settings, seed=seed, progress=seen.append), seen


def test_it_stops_at_the_score() -> None:
    _, end, seen = run(stop_score=0.6, max_steps=1000)
    assert end.sampled >= 0.6
    assert end == seen[-1]
    assert all(state.sampled < 0.6 for state in seen[:-1])
    assert [state.step for state in seen] == list(range(0, end.step + 1, 3))


def test_it_stops_at_the_most_steps() -> None:
    _, end, _ = run(stop_score=1.0, max_steps=4)
    assert (end.step, end.max_steps) == (4, 4)
    assert end.loss is not None


def test_no_steps_leave_the_weights_alone() -> None:
    model, end, _ = run(max_steps=0)
    assert (end.step, end.loss) == (0, None)
    assert torch.equal(model.table.detach(), torch.zeros(6, 6))


def test_the_learning_rate_rises_from_nothing() -> None:
    slow, _, _ = run(max_steps=1, learning_rate_warmup=100, weight_decay=0.0)
    fast, _, _ = run(max_steps=1, learning_rate_warmup=0, weight_decay=0.0)
    ratio = slow.table.detach().abs().max() / fast.table.detach().abs().max()
    assert float(ratio) == pytest.approx(0.01, rel=1e-3)


def test_rows_that_judge_are_not_trained_on() -> None:
    model = Bigrams(torch.zeros(6, 6))
    rows = encoded(*(([1], [3, 2]) for _ in range(5)), *(([1], [4, 2]) for _ in range(15)))
    options = WarmStartOptions(batch_size=5, learning_rate=0.5, stop_score=1.0, max_steps=30)
    end = warm_start(model, rows, options, seed=0)
    assert end.sampled < 0.05  # the first quarter judges, and says 3 where the others say 4


def test_a_step_has_fewer_rows_where_they_are_long() -> None:
    shapes: list[tuple[int, ...]] = []

    class Watched(Bigrams):
        def forward(self, input_ids_bt: Tensor, use_cache: bool) -> Any:
            shapes.append(tuple(input_ids_bt.shape))
            return super().forward(input_ids_bt, use_cache)

    rows = encoded(*(([1], [3, 2]) for _ in range(300)), width=1024)
    warm_start(Watched(torch.zeros(6, 6)), rows, WarmStartOptions(batch_size=128, max_steps=1), seed=0)
    assert shapes == [(64, 1023), (4, 1023), (64, 1023)]


def test_label_smoothing_keeps_the_policy_unsure() -> None:
    sharp, _, _ = run(stop_score=1.0, max_steps=200, label_smoothing=0.0)
    smooth, _, _ = run(stop_score=1.0, max_steps=200, label_smoothing=0.3)
    probs = [torch.softmax(model.table.detach(), dim=-1)[1, 3] for model in (sharp, smooth)]
    assert float(probs[0]) > 0.95
    assert float(probs[1]) == pytest.approx(0.7 + 0.3 / 6, abs=0.02)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no training rows"),
        ([{"uid": "a:7", "prompt": [], "reward_model": {"ground_truth": None}}], "row a:7 .* got None"),
        ([{"prompt": [], "reward_model": {}}], "row 0 needs a text"),
    ],
)
def test_rows_without_answers_are_refused(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        examples_of(rows)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "human", "content": "a"}, "roles are system, user and assistant, got human"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "'dict object' has no attribute 'content'"),
    ],
)
def test_a_row_that_the_chat_template_does_not_take_is_named(message: dict[str, Any], said: str) -> None:
    row = {
        "uid": "a.jsonl:7",
        "prompt": [message, {"role": "user", "content": "b"}],
        "reward_model": {"style": "exact_match", "ground_truth": "c"},
    }
    expected = f"^warm start: row a.jsonl:7: the tiny model's chat template refuses it: {said}$"
    with pytest.raises(ConfigError, match=expected):
        encode(examples_of([row]), build_tokenizer((), max_length=64), longest=64)


def test_an_answer_may_continue_what_the_assistant_has_begun() -> None:
    tokenizer = build_tokenizer((), max_length=64)
    begun = Example([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "c")
    (ids,) = encode([begun], tokenizer, longest=64).input_ids_bt.tolist()
    assert tokenizer.decode(ids).replace(" ", "").endswith("<|user|>a<|assistant|>bc" + tokenizer.eos_token)
