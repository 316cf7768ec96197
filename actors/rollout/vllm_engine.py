"""vLLM as a `StepEngine`: one `LLMEngine` in this process, on token ids only.

Log-probs are those of the distribution the token was drawn from, that is of the logits divided by the
temperature (`processed_logprobs`). With `top_p < 1` or a `top_k` that distribution is cut off and
renormalised, which the policy's own log-probs are not, so an importance ratio of the two would be biased;
training refuses such sampling (`RolloutOptions`), validation may use it. Log-probs of greedy requests are
those at temperature 1.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from actors.models.layout import model_layout
from actors.rollout.continuation import Partial, complete
from actors.rollout.options import EngineOptions
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.data.model_files import head_dim, read_model_config
from neoproto.errors import RolloutError, WeightMismatch
from neoproto.files import is_full
from neoproto.weights import TensorLayout, WeightVersion, parse_dtype

_SHM = Path("/dev/shm")
_KV_BLOCK = 32
_KV_SPARE_BLOCKS = 64
_MOST_DEFAULT_KV_BYTES = 4 << 30
_MIN_BATCHED_TOKENS = 2048


class VllmEngine:
    """A model folder, served from this thread.

    Raises:
        RolloutError: vLLM does not take the model or the options; with its reason.
    """

    def __init__(self, options: EngineOptions) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RolloutError(
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 is needed (see rollout_env): the engine runs in process"
            )
        self._max_model_len = options.max_model_len
        self._layout = model_layout(options.model, parse_dtype(options.rollout.dtype))
        self._stop_ids = list(options.eos_token_ids)
        self._requests: dict[str, GenerateRequest] = {}
        self._public_ids: dict[str, str] = {}
        try:
            self._engine = LLMEngine.from_engine_args(engine_args(options))
        except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC and is_full(_SHM)
            reason = f"{_short(error)} ({_SHM} is full)" if full else _short(error)
            raise RolloutError(f"vLLM cannot serve {options.model}: {reason}") from error
        # At the end of the process vLLM would take itself apart, with three looks through all objects: two
        # seconds of a core, for memory that the end of the process gives back anyway.
        for owner in (self._engine, self._engine.engine_core):
            if (finalizer := getattr(owner, "_finalizer", None)) is not None:
                finalizer.atexit = False
        self._loaded: set[str] = set()
        self._parameters: frozenset[str] = self._engine.apply_model(self._watch_loading)[0]
        self._engine.set_weight_version("0")

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add(self, request_id: str, request: GenerateRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > self._max_model_len:
            # vLLM would cut the answer without a word.
            raise ValueError(f"the engine holds {self._max_model_len} tokens a sequence (max_model_len)")
        internal = self._engine.add_request(
            request_id, tokens_input(list(request.prompt_ids)), sampling_params(request, self._stop_ids)
        )
        self._requests[request_id] = request
        self._public_ids[request_id] = internal

    def step(self) -> list[tuple[str, Generation]]:
        finished = []
        for output in self._engine.step():
            if not output.finished:
                continue
            request = self._requests.pop(output.request_id, None)
            if request is not None:
                del self._public_ids[output.request_id]
                finished.append((output.request_id, to_generation(request, output.outputs[0])))
        if not self._engine.has_unfinished_requests() and self._requests:
            raise RolloutError(f"vLLM lost {len(self._requests)} requests")
        return finished

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._requests.pop(request_id, None)]
        self._engine.abort_request([self._public_ids.pop(request_id) for request_id in known], internal=True)

    def interrupt(self) -> dict[str, Partial]:
        """Drop all requests; the beginnings of their answers.

        Outputs are asked for when they are final only, so vLLM's own record of each request is read.
        """
        states = self._engine.output_processor.request_states
        partials = {}
        for request_id, request in self._requests.items():
            output: Any = states[self._public_ids[request_id]].make_request_output(
                [], None, FinishReason.ABORT, None
            )
            partials[request_id] = sampled_tokens(request, output.outputs[0])
        self.abort(list(partials))
        return partials

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        self._layout.check(layout, what)

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights.

        vLLM only logs parameters that no tensor was loaded into (they would keep the old version's values),
        so what it loaded is compared with what the model has.
        """
        self._loaded.clear()
        kept = ((name, tensor) for name, tensor in tensors if name not in self._layout.tied)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": kept})
        if missing := sorted(self._parameters - self._loaded):
            raise WeightMismatch(
                f"weights {version} left {len(missing)} parameters unloaded: {', '.join(missing[:8])}"
            )
        self._engine.apply_model(refresh_tied)
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(version.n))

    def _watch_loading(self, model: torch.nn.Module) -> frozenset[str]:
        """Record which parameters `load_weights` returns as loaded; returns the names of all."""
        load: Any = model.load_weights

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded: set[str] = load(weights)
            self._loaded |= loaded
            return loaded

        model.load_weights = load_weights  # type: ignore[assignment]
        return frozenset(name for name, _ in model.named_parameters())


def engine_args(options: EngineOptions) -> EngineArgs:
    """vLLM's own options. Nothing is compiled and nothing profiled: both cost more than they bring here."""
    on_cpu = options.device == "cpu"
    sizes: dict[str, Any] = {}
    if on_cpu or options.kv_cache_bytes is not None:
        sizes["kv_cache_memory_bytes"] = options.kv_cache_bytes or default_kv_bytes(options)
    else:
        sizes["gpu_memory_utilization"] = options.rollout.gpu_memory_utilization
    if on_cpu:
        sizes["block_size"] = _KV_BLOCK
        # No prompt is cut in two: of such a one vLLM 0.32 draws a token too early, and takes it back by the
        # offset of the request's generator, which a CPU's does not have. The engine would end.
        sizes["enable_chunked_prefill"] = False
    return EngineArgs(
        model=str(options.model),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=options.rollout.dtype,
        seed=options.rollout.seed & 0xFFFFFFFF,  # vLLM seeds NumPy too, which takes no more
        max_model_len=options.max_model_len,
        max_num_seqs=options.rollout.max_num_seqs,
        max_num_batched_tokens=max(
            _MIN_BATCHED_TOKENS, options.max_model_len, 4 * options.rollout.max_num_seqs
        ),
        enforce_eager=options.rollout.enforce_eager,
        enable_prefix_caching=True,  # the samples of a prompt share its cache
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        async_scheduling=False,
        **sizes,
    )


def default_kv_bytes(options: EngineOptions) -> int:
    """Room for `max_num_seqs` sequences of full length, at most 4 GiB: more could never be in use."""
    config = read_model_config(options.model, field="model")
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    token_bytes = kv_heads * (head_dim(config) or 0) * parse_dtype(options.rollout.dtype).itemsize
    block_bytes = 2 * config["num_hidden_layers"] * token_bytes * _KV_BLOCK
    blocks = options.rollout.max_num_seqs * -(-options.max_model_len // _KV_BLOCK) + _KV_SPARE_BLOCKS
    return int(min(_MOST_DEFAULT_KV_BYTES, block_bytes * blocks))


def sampling_params(request: GenerateRequest, stop_ids: list[int]) -> VllmSamplingParams:
    """vLLM's form of a request's sampling; the sampled token's log-prob is asked for, no text."""
    sampling = request.sampling
    return VllmSamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy or sampling.top_k < 0 else sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=None if sampling.greedy else request.seed,
        stop_token_ids=stop_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def to_generation(request: GenerateRequest, output: Any) -> Generation:
    """Our form of a finished `CompletionOutput`.

    Raises:
        RolloutError: it ended for another reason than its end token or its length, or log-probs or weight
            versions do not match its tokens.
    """
    if output.finish_reason not in ("stop", "length"):
        raise RolloutError(f"sample {request.uid}/{request.sample_index} ended with {output.finish_reason!r}")
    return complete(request, sampled_tokens(request, output), output.finish_reason)


def sampled_tokens(request: GenerateRequest, output: Any) -> Partial:
    """Tokens, log-probs and weight versions of a `CompletionOutput`.

    Raises:
        RolloutError: their numbers do not match.
    """
    where = f"sample {request.uid}/{request.sample_index}"
    tokens = tuple(output.token_ids)
    flat = output.logprobs
    if not isinstance(flat, FlatLogprobs) or tuple(flat.token_ids) != tokens:
        raise RolloutError(f"{where}: vLLM's log-probs are not those of its {len(tokens)} tokens")
    versions = tuple(
        int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)
    )
    if len(versions) != len(tokens):
        raise RolloutError(f"{where}: vLLM names the weights of {len(versions)} of {len(tokens)} tokens")
    return Partial(token_ids=tokens, log_probs=tuple(flat.logprobs), weight_versions=versions)


def refresh_tied(model: torch.nn.Module) -> None:
    """Have modules that share a parameter prepare it again.

    On CPUs a linear layer multiplies with a packed copy of its weight. vLLM repacks it in the module that a
    tensor is loaded into; an output head tied to the embedding gets no tensor of its own and would continue
    with the old copy.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
