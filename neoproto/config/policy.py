"""Options of `actor_rollout_ref`: the policy's model, its training, its reference copy and its sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from neoproto.algorithms.losses import POLICY_LOSSES
from neoproto.algorithms.names import KLLossName
from neoproto.config.base import (
    AtMostMax,
    Count,
    EnvName,
    Fraction,
    NonNegative,
    Plain,
    Positive,
    Section,
    Seed,
    Share,
    Size,
)
from neoproto.config.optim import UpdateConfig
from neoproto.config.topology import DevicesPerNode
from neoproto.config.verl import kl_name
from neoproto.rollout.engines import ENGINES

Dtype = Literal["float32", "bfloat16", "float16"]

if TYPE_CHECKING:
    EngineName = str
    PolicyLossName = str
else:
    EngineName = Literal[tuple(ENGINES)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]


def _is_top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("top_k", "wanted -1 (all) or at least 1")
    return value


TopK = Annotated[int, AfterValidator(_is_top_k), AtMostMax]
Temperature = Annotated[float, Field(ge=0.01)]
"""vLLM takes a lower one for this, or for greedy, without a word in the log-probs."""


class TinyModelConfig(Section):
    """The built-in model: a small Llama with tokenizer and chat template, made on first use and cached."""

    hidden_size: Count = 128
    """Width of the residual stream; `num_heads` heads of a size that vLLM has kernels for (32, 64, ...)."""
    intermediate_size: Count = 384
    """Width of the feed-forward layers."""
    num_layers: Count = 2
    """Decoder layers."""
    num_heads: Count = 4
    """Attention heads."""
    warm_start_score: Fraction = 0.45
    """The supervised warm start ends once sampled exact match reaches this score."""
    max_sft_steps: Size = 400
    """The warm start ends after this many steps in any case."""
    seed: Seed = 0
    """Seed of the weights and of the warm start's batches."""


class ModelConfig(Section):
    """Which model is trained."""

    path: Plain | None = None
    """A Hugging Face folder with model and tokenizer; null = a built-in model."""
    built_in: Literal["tiny", "smollm2"] = "tiny"
    """Used when `path` is null. tiny = made on first use; smollm2 = SmolLM2-135M-Instruct, which
    `scripts/make_smollm2` puts into the cache."""
    tiny: TinyModelConfig = TinyModelConfig()
    """The tiny model's shape and warm start."""
    trust_remote_code: Literal[False] = False
    """Code that lies in a model folder is not run."""


class PolicyLossConfig(Section):
    """Which policy-gradient objective."""

    loss_mode: PolicyLossName = Field(default="vanilla", description=f"{POLICY_LOSSES.help}.")


class ActorConfig(UpdateConfig):
    """Training of the policy. Mini batches count prompts, micro batches samples (`rollout.n` a prompt)."""

    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Which objective."""
    clip_ratio: Positive = 0.2
    """PPO's clip range, on both sides unless the next two are set."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Lower side: the ratio is clipped at 1 - this; null = `clip_ratio`."""
    clip_ratio_high: Positive | None = None
    """Upper side: the ratio is clipped at 1 + this; null = `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip: bound on the ratio where the advantage is negative."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term to the reference model to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of that term."""
    kl_loss_type: Annotated[KLLossName, BeforeValidator(kl_name)] = "k3"
    """Estimator of that term; verl's names kl, mse and low_var_kl stand for k1, k2 and k3."""

    def clip_range(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefConfig(Section):
    """The frozen reference model, in use when a KL term is on."""

    log_prob_micro_batch_size_per_gpu: Count = 64
    """Samples per forward pass on one rank."""


class ValKwargsConfig(Section):
    """Sampling in validation."""

    n: Count = 1
    """Samples per prompt."""
    do_sample: bool = True
    """false = greedy; the next three are then not used."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    top_p: Share = 1.0
    """Nucleus; 1 = all tokens."""
    top_k: TopK = -1
    """The k likeliest tokens only; -1 = all."""
    also_greedy: bool = True
    """Report one greedy answer per prompt beside the sampled ones."""


class RolloutConfig(Section):
    """Generation; every rank is a replica that holds the whole model."""

    name: EngineName = Field(default="vllm", description=f"The engine. {ENGINES.help}.")
    n_gpus_per_node: DevicesPerNode | None = None
    """Devices of its own on every node of the preset topology, one replica each, in the asynchronous modes
    (null = 1); in sync mode rollout has those of training."""
    n: Count = 1
    """Samples per prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature; log-probs are compared at this temperature everywhere."""
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Nucleus; training samples from the whole distribution, so only 1."""
    top_k: Literal[-1] = -1
    """The k likeliest tokens; training samples from the whole distribution, so only -1 (all)."""
    seed: Seed = 0
    """Root of the per-request seeds (with prompt, sample and weight version)."""
    max_num_seqs: Count = 256
    """Sequences that one engine runs at once."""
    max_model_len: Count | None = None
    """Context length of the engine; null = max_prompt_length + max_response_length."""
    dtype: Dtype = "float32"
    """Type of weights and activations in the engine."""
    kv_cache_gib: Annotated[float, Field(ge=0.001, le=65536)] | None = None
    """Size of one engine's KV cache in GiB; null = what `max_num_seqs` full sequences need (on a GPU: what
    `gpu_memory_utilization` leaves)."""
    gpu_memory_utilization: Share = 0.5
    """Share of the device's memory that one engine may take on a GPU."""
    enforce_eager: bool = True
    """Do not compile or capture graphs."""
    num_threads: Count = 1
    """Compute threads of an engine on CPU."""
    log_prob_micro_batch_size_per_gpu: Count = 64
    """Samples per forward pass when the policy recomputes the log-probs of what was sampled."""
    tensor_model_parallel_size: Literal[1] = 1
    """Ranks that share one copy of the model."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    """Sampling in validation."""
    env: dict[EnvName, Plain] = Field(default_factory=dict)
    """Environment of the rollout processes, over `runtime.env_vars`."""


class PolicyConfig(Section):
    """`actor_rollout_ref`: everything that holds the policy's weights."""

    model: ModelConfig = ModelConfig()
    """Which model."""
    actor: ActorConfig = ActorConfig()
    """Its training."""
    ref: RefConfig = RefConfig()
    """Its frozen copy."""
    rollout: RolloutConfig = RolloutConfig()
    """Its sampling."""
