"""What rollout workers are told, the environment their processes need, and which models they can serve.

Importable without vLLM: the controller uses this before any worker exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from neoproto.data.generation import SamplingParams
from neoproto.data.model_files import read_model_config
from neoproto.errors import ConfigError
from neoproto.rollout.engines import ENGINES
from neoproto.text import shown
from neoproto.weights import UpdateOptions

_LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "ForConditionalGeneration")
"""How transformers calls models that generate text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """One replica's engine.

    Attributes:
        name: one of `ENGINES`.
        model: Hugging Face folder the engine starts from.
        dtype: of the weights and the arithmetic, for example "float32".
        device: "cpu" or "gpu".
        max_model_len: most tokens of a prompt and its answer together.
        max_num_seqs: most requests that run at once; more wait.
        eos_token_ids: tokens that end an answer; at least one.
        seed: of whatever requests with a seed of their own do not cover.
        threads: compute threads (CPU).
        kv_cache_bytes: size of the key/value cache; None: what `max_num_seqs` full sequences need (CPU), or
            `gpu_memory_utilization` (GPU).
        gpu_memory_utilization: share of a GPU's memory that the engine may take.
        enforce_eager: compile nothing.
    """

    name: str = "vllm"
    model: str
    dtype: str = "float32"
    device: Literal["cpu", "gpu"] = "cpu"
    max_model_len: int
    max_num_seqs: int = 256
    eos_token_ids: tuple[int, ...]
    seed: int = 0
    threads: int = 1
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True

    def __post_init__(self) -> None:
        if self.device not in ENGINES[self.name].devices:
            fitting = " or ".join(name for name, kind in ENGINES.items() if self.device in kind.devices)
            only = " and ".join(f"{device.upper()}s" for device in ENGINES[self.name].devices)
            raise ConfigError(
                f"actor_rollout_ref.rollout.name={self.name} runs on {only} only; "
                f"on a {self.device.upper()} take {fitting}"
            )
        if not self.eos_token_ids:
            raise ConfigError("rollout: at least one end-of-sequence token is needed, the tokenizer has none")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """A rollout worker.

    Attributes:
        engine: its engine; `max_model_len` must hold P + R.
        max_prompt_length, max_response_length: P and R, widths of the batch columns.
        pad_token_id: what `prompts` and `responses` are padded with.
        seed: the run's; request seeds derive from it.
        n, sampling: samples a prompt, and how they are drawn, in training.
        val_n, val_sampling: the same in validation; a batch's meta_info may say otherwise.
        updates: when and how it takes new weights.
        lease_ttl: seconds after which its lease on weights lapses if its process is gone or stuck.
        transport: how the weights' bytes come; the publisher's.

    Raises:
        ConfigError: sampling in training that cuts the distribution off (`top_p < 1`, `top_k`) or is greedy:
            log-probs of the cut distribution are not comparable with the policy's; or lengths that do not
            fit.
    """

    engine: EngineOptions
    max_prompt_length: int
    max_response_length: int
    pad_token_id: int
    seed: int
    n: int
    sampling: SamplingParams
    val_n: int = 1
    val_sampling: SamplingParams
    updates: UpdateOptions = field(default_factory=UpdateOptions)
    lease_ttl: float = 30.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        problems = []
        where = "actor_rollout_ref.rollout"
        if self.sampling.top_p < 1 or self.sampling.top_k != -1:
            problems.append(
                f"{where}: training needs top_p=1 and top_k=-1, got top_p={self.sampling.top_p} and "
                f"top_k={self.sampling.top_k}: the rollout's log-probs would be of a cut-off distribution "
                "that the policy's cannot be compared with (val_kwargs may set both)"
            )
        if self.sampling.greedy:
            problems.append(f"{where}: training needs sampling, got greedy decoding")
        for name in ("n", "val_n"):
            if getattr(self, name) < 1:
                problems.append(f"{where}.{name}: at least 1 is needed, got {getattr(self, name)}")
        needed = self.max_prompt_length + self.max_response_length
        if self.engine.max_model_len < needed:
            problems.append(
                f"{where}.max_model_len={self.engine.max_model_len}: prompts of up to "
                f"{self.max_prompt_length} and answers of up to {self.max_response_length} tokens "
                f"need {needed}"
            )
        for name in ("sampling", "val_sampling"):
            most = getattr(self, name).max_tokens
            if most > self.max_response_length:
                problems.append(
                    f"{where}: {name} asks for {most} tokens, answers have {self.max_response_length} at most"
                )
        if problems:
            raise ConfigError(*problems)


def rollout_env(options: EngineOptions) -> dict[str, str]:
    """Environment of the replica's process, to be set at spawn, before anything is imported there."""
    env = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(options.threads),
    }
    if options.device == "cpu":
        # Spinning threads take the cores that trainers and other replicas need: seen 3 times slower on a busy
        # machine, and not faster on an idle one.
        env["OMP_WAIT_POLICY"] = "passive"
    return env | dict(ENGINES[options.name].env(options.device, options.enforce_eager))


def check_servable(
    model: str | Path, *, max_model_len: int, device: str, field: str, engine: str | None
) -> None:
    """Refuse a model that a process could only fail on later, by its `config.json`.

    Args:
        model: Hugging Face folder.
        max_model_len: tokens of the longest prompt and answer together.
        device: "cpu" or "gpu".
        field: the configuration key the model comes from, for messages.
        engine: one of `ENGINES`; None for a model that no engine serves, as the critic's.

    Raises:
        ConfigError: a `config.json` that cannot be read; a model without a language-model head; more
            positions asked for than it has; whatever else the engine cannot serve.
    """
    config = read_model_config(model, field=field)
    problems = []
    heads = config.get("architectures")
    if isinstance(heads, list) and heads and not any(str(name).endswith(_LANGUAGE_HEADS) for name in heads):
        problems.append(
            f"{field}: {model} has no language-model head: architectures in its config.json is {shown(heads)}"
        )
    positions = config.get("max_position_embeddings")
    if positions is not None and max_model_len > positions:
        problems.append(
            f"{field}: {model} has {positions} positions (max_position_embeddings), prompts and answers "
            f"need up to {max_model_len}"
        )
    if engine is not None and (problem := ENGINES[engine].model_problem(config, device)) is not None:
        problems.append(f"{field}: {model} {problem}")
    if problems:
        raise ConfigError(*problems)
