"""What rollout workers are given, the environment their processes need, and which models they can serve.

Importable without vLLM: the controller uses this before any worker exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from neoproto.config import RolloutConfig
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
        rollout: `actor_rollout_ref.rollout`: which engine, and how it runs.
        model: Hugging Face folder the engine starts from.
        device: "cpu" or "gpu".
        max_model_len: most tokens of a prompt and its answer together.
        eos_token_ids: tokens that end an answer; at least one.

    Raises:
        ConfigError: the engine does not run on the device, or no token ends an answer.
    """

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: str
    device: Literal["cpu", "gpu"] = "cpu"
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        name = self.rollout.name
        if self.device not in ENGINES[name].devices:
            fitting = " or ".join(name for name, kind in ENGINES.items() if self.device in kind.devices)
            only = " and ".join(f"{device.upper()}s" for device in ENGINES[name].devices)
            raise ConfigError(
                f"actor_rollout_ref.rollout.name={name} runs on {only} only; "
                f"on a {self.device.upper()} take {fitting}"
            )
        if not self.eos_token_ids:
            raise ConfigError("rollout: at least one end-of-sequence token is needed, the tokenizer has none")

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the key/value cache; None is the engine's own choice."""
        return None if self.rollout.kv_cache_gib is None else int(self.rollout.kv_cache_gib * 2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """A rollout worker.

    Attributes:
        engine: its engine, with the section of the configuration, which has the sampling too.
        max_prompt_length, max_response_length: P and R, widths of the batch columns.
        pad_token_id: what `prompts` and `responses` are padded with.
        updates: when and how it takes new weights.
        lease_ttl: seconds after which its lease on weights lapses if its process is gone or stuck.
        transport: how the weights' bytes come; the publisher's.

    Raises:
        ConfigError: `max_model_len` of the engine does not hold P + R.
    """

    engine: EngineOptions
    max_prompt_length: int
    max_response_length: int
    pad_token_id: int
    updates: UpdateOptions = field(default_factory=UpdateOptions)
    lease_ttl: float = 30.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        needed = self.max_prompt_length + self.max_response_length
        if self.engine.max_model_len < needed:
            raise ConfigError(
                f"actor_rollout_ref.rollout.max_model_len={self.engine.max_model_len}: prompts of up to "
                f"{self.max_prompt_length} and answers of up to {self.max_response_length} tokens "
                f"need {needed}"
            )

    @property
    def sampling(self) -> SamplingParams:
        """How answers are drawn in training: from the whole distribution, as the schema enforces. Log-probs
        of one that is cut off (`top_p`, `top_k`) could not be compared with the policy's."""
        return SamplingParams(
            temperature=self.engine.rollout.temperature, max_tokens=self.max_response_length
        )

    @property
    def val_sampling(self) -> SamplingParams:
        """How answers are drawn in validation; a batch's meta_info may ask for greedy ones."""
        validation = self.engine.rollout.val_kwargs
        return SamplingParams(
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            max_tokens=self.max_response_length,
            greedy=not validation.do_sample,
        )


def rollout_env(options: EngineOptions) -> dict[str, str]:
    """Environment of the replica's process, to be set at spawn, before anything is imported there."""
    env = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(options.rollout.num_threads),
    }
    if options.device == "cpu":
        # Spinning threads take the cores that trainers and other replicas need: seen 3 times slower on a busy
        # machine, and not faster on an idle one.
        env["OMP_WAIT_POLICY"] = "passive"
    return env | dict(ENGINES[options.rollout.name].env(options.device, options.rollout.enforce_eager))


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
