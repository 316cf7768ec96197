"""Transformers as a `StepEngine`, for small models on CPUs, on token ids only.

    add ─> waiting ──room?──> prompts, each once: cached ─> rows ──step: one token each──> finished

vLLM's bookkeeping takes Python time for every token of every request, whatever the model. Here a step is one
forward pass and a few operations on whole tensors, so its cost hardly grows with the number of requests; but
attention reads every row up to the longest one, and no prompt is kept from call to call. Where the model
takes longer than the bookkeeping, vLLM is the better engine.

Sequences that have ended leave when they are a quarter of the rows: moving the cache costs as much as a step.

Shapes: b = rows, m = the most tokens that any of them may generate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from actors.models.layout import layout_of_model
from actors.rollout.continuation import Partial, complete
from actors.rollout.hf_cache import RowCache
from actors.rollout.hf_sampling import Drawing, uniforms
from actors.rollout.options import EngineOptions
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.errors import RolloutError, WeightMismatch
from neoproto.weights import TensorLayout, WeightVersion, parse_dtype

_TOKENS_AT_ONCE = 8192
"""Prompt tokens, with padding, of one forward pass."""
_KEPT_SHARE = 0.75
"""Rows are moved together once no more than this share of them is still generating."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits, or has a row."""

    request_id: str
    request: GenerateRequest


class HfEngine:
    """A model folder, served from this thread.

    Raises:
        RolloutError: transformers cannot load the model, or it does not attend to all earlier tokens in
            every layer.
    """

    def __init__(self, options: EngineOptions) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.rollout.num_threads)
        self._options, self._dtype = options, parse_dtype(options.rollout.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                options.model, local_files_only=True, dtype=self._dtype, attn_implementation="sdpa"
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise RolloutError(f"transformers cannot serve {options.model}: {error}") from error
        self._model = model.eval().requires_grad_(False)
        self._check_attention()
        self._layout = layout_of_model(model, self._dtype)
        self._version = 0
        self._ends = torch.tensor(options.eos_token_ids)
        self._waiting: deque[_Asked] = deque()
        self._forget()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._alive_count > 0

    def add(self, request_id: str, request: GenerateRequest) -> None:
        longest = self._options.max_model_len
        if len(request.prompt_ids) + request.sampling.max_tokens > longest:
            raise ValueError(f"the engine holds {longest} tokens a sequence (max_model_len)")
        if not request.prompt_ids:
            raise ValueError("a prompt needs at least one token")
        self._waiting.append(_Asked(request_id, request))

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Generation]]:
        room = self._options.rollout.max_num_seqs - self._alive_count
        if self._waiting and room > 0:
            self._compact()
            self._enter([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        if self._alive_count == 0:
            return []
        ended = self._decode()
        finished = [(self._asked[row].request_id, self._generation(row)) for row in ended]
        self._end(ended)
        if self._alive_count <= _KEPT_SHARE * len(self._asked):
            self._compact()
        return finished

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> None:
        dropped = set(request_ids)
        self._waiting = deque(asked for asked in self._waiting if asked.request_id not in dropped)
        self._end([row for row in self._alive_rows() if self._asked[row].request_id in dropped])
        self._compact()

    def interrupt(self) -> dict[str, Partial]:
        partials = {asked.request_id: Partial() for asked in self._waiting}
        partials |= {self._asked[row].request_id: self._partial(row) for row in self._alive_rows()}
        self._waiting.clear()
        self._forget()
        return partials

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        self._layout.check(layout, what)

    @torch.inference_mode()
    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self._model.named_parameters())
        missing = set(parameters)
        for name, tensor in tensors:
            if name not in self._layout.tied:
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise WeightMismatch(
                f"weights {version} left {len(missing)} parameters unloaded: {', '.join(sorted(missing)[:8])}"
            )
        self._version = version.n
        self._compact()
        self._cache = self._empty_cache()
        made = self._made()
        self._prefill([self._asked[row].request.prompt_ids + tokens for row, tokens in enumerate(made)])

    def _check_attention(self) -> None:
        """Refuse models that look back a limited distance: rows here have no window."""
        config = self._model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise RolloutError(
                f"{self._options.model}: rollout.name=hf needs layers that attend to all earlier tokens"
            )

    def _empty_cache(self) -> RowCache:
        return RowCache(self._model.config.get_text_config().num_hidden_layers)

    def _forget(self) -> None:
        """No rows."""
        self._asked: list[_Asked] = []
        self._alive_count = 0
        self._cache = self._empty_cache()
        self._seeds = np.zeros(0, dtype=np.uint64)
        self._drawing = Drawing.of([])
        none = torch.zeros(0, dtype=torch.int64)
        # Of each row: the last token, what of its prompt is cached at first, tokens made and their limit.
        self._last, self._starts, self._counts, self._limits = none, none, none, none
        self._alive = torch.zeros(0, dtype=torch.bool)
        self._tokens, self._versions = (torch.zeros(0, 0, dtype=torch.int64) for _ in range(2))
        self._log_probs = torch.zeros(0, 0)

    def _alive_rows(self) -> list[int]:
        return [row for row, alive in enumerate(self._alive.tolist()) if alive]

    def _end(self, rows: Sequence[int]) -> None:
        if rows:
            self._alive[list(rows)] = False
            self._alive_count -= len(rows)

    def _enter(self, asked: list[_Asked]) -> None:
        """Give requests rows of their own, all but the last token of their prompts cached."""
        requests = [one.request for one in asked]
        limits = torch.tensor([request.sampling.max_tokens for request in requests])
        most = max(self._tokens.shape[1], int(limits.max()))
        self._tokens, self._versions, self._log_probs = (
            pad(kept, (0, most - kept.shape[1], 0, len(asked)))
            for kept in (self._tokens, self._versions, self._log_probs)
        )
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        self._last = torch.cat([self._last, torch.tensor([request.prompt_ids[-1] for request in requests])])
        self._starts = torch.cat([self._starts, lengths - 1])
        self._counts = pad(self._counts, (0, len(asked)))
        self._limits = torch.cat([self._limits, limits])
        self._alive = torch.cat([self._alive, torch.ones(len(asked), dtype=torch.bool)])
        self._alive_count += len(asked)
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        self._seeds = np.concatenate([self._seeds, seeds])
        self._asked = [*self._asked, *asked]
        self._drawing = Drawing.of([one.request.sampling for one in self._asked])
        self._prefill([request.prompt_ids for request in requests])

    def _compact(self) -> None:
        """Drop the rows that have ended."""
        if self._alive_count == len(self._asked):
            return
        kept = self._alive.nonzero()[:, 0]
        for name in (
            "_last",
            "_starts",
            "_counts",
            "_limits",
            "_alive",
            "_tokens",
            "_versions",
            "_log_probs",
        ):
            setattr(self, name, getattr(self, name)[kept])
        self._seeds = self._seeds[kept.numpy()]
        self._asked = [self._asked[row] for row in kept.tolist()]
        self._drawing = Drawing.of([one.request.sampling for one in self._asked])
        self._cache.select(kept)

    def _prefill(self, texts: list[tuple[int, ...]]) -> None:
        """Cache all but the last token of each text, in new rows; equal texts are computed once."""
        contexts = [text[:-1] for text in texts]
        places = {context: place for place, context in enumerate(dict.fromkeys(contexts))}
        order: list[int] = []
        for piece in _pieces(list(places)):
            width = max(1, max(map(len, piece)))
            # Padding lies on the right, where causal attention does not look.
            padded = torch.tensor([[*context, *(0,) * (width - len(context))] for context in piece])
            made = self._model(input_ids=padded, use_cache=True, logits_to_keep=1).past_key_values
            first = places[piece[0]]
            rows = [row for row, context in enumerate(contexts) if 0 <= places[context] - first < len(piece)]
            self._cache.append(made, torch.tensor([places[contexts[row]] - first for row in rows]))
            order += rows
        if order != sorted(order):
            before = self._cache.rows - len(order)
            places_of = torch.tensor(order).argsort() + before
            self._cache.select(torch.cat([torch.arange(before), places_of]))

    def _decode(self) -> list[int]:
        """One more token on every row; the rows that have ended with it."""
        cache, counts, alive = self._cache, self._counts, self._alive
        cache.at(self._starts + counts)
        output = self._model(
            input_ids=self._last[:, None],
            position_ids=cache.positions[:, None],
            attention_mask=cache.mask,
            past_key_values=cache.cache,
            use_cache=True,
        )
        numbers = torch.from_numpy(uniforms(self._seeds, counts.numpy().astype(np.uint64)))
        tokens, log_probs = self._drawing.draw(output.logits[:, -1], numbers)
        # Rows that have ended and not left yet write behind their answer, or once more over its end.
        rows = alive.nonzero()[:, 0]
        at = counts[rows]
        self._tokens[rows, at], self._log_probs[rows, at] = tokens[rows], log_probs[rows]
        self._versions[rows, at] = self._version
        self._last = torch.where(alive, tokens, self._last)
        self._counts = counts + alive
        over = alive & (torch.isin(tokens, self._ends) | (self._counts >= self._limits))
        ended: list[int] = over.nonzero()[:, 0].tolist()
        return ended

    def _made(self) -> list[tuple[int, ...]]:
        """The tokens of each row's answer so far."""
        return [
            tuple(tokens[:count])
            for tokens, count in zip(self._tokens.tolist(), self._counts.tolist(), strict=True)
        ]

    def _partial(self, row: int) -> Partial:
        count = int(self._counts[row])
        return Partial(
            token_ids=tuple(self._tokens[row, :count].tolist()),
            log_probs=tuple(self._log_probs[row, :count].tolist()),
            weight_versions=tuple(self._versions[row, :count].tolist()),
        )

    def _generation(self, row: int) -> Generation:
        made = self._partial(row)
        ended = made.token_ids[-1] in self._options.eos_token_ids
        return complete(self._asked[row].request, made, "stop" if ended else "length")


def _pieces(contexts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Consecutive contexts, as many as one forward pass takes together."""
    piece: list[tuple[int, ...]] = []
    width = 0
    for context in contexts:
        if piece and max(width, len(context)) * (len(piece) + 1) > _TOKENS_AT_ONCE:
            yield piece
            piece, width = [], 0
        piece.append(context)
        width = max(width, len(context))
    if piece:
        yield piece
