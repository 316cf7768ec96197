"""The policy: the model that is trained, whose weights the rollout replicas serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from actors.dispatch import REPLICATED, SPLIT
from actors.training.log_probs import response_logits, score_responses
from actors.training.padded_batch import MODEL_COLUMNS, MicroBatch, PaddedBatch
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions, load_model, named_weights, save_hf_folder, shard
from actors.training.torch_worker import TorchOptions
from actors.training.trained_worker import ANSWER_S, TrainedWorker
from actors.training.updates import LossShare, TrainLoop, TrainOptions
from actors.weight_registry import Group, GroupRegistry
from neoproto.algorithms.aggregate import LossDenominators, aggregate_loss
from neoproto.algorithms.kl import kl_estimate
from neoproto.algorithms.logprobs import entropy_from_logits, log_probs_from_logits
from neoproto.algorithms.losses import policy_loss
from neoproto.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions
from neoproto.config.policy import ActorConfig
from neoproto.data import DataProto
from neoproto.errors import StoreError
from neoproto.runtime import Dispatch, register
from neoproto.store import active_store
from neoproto.weights import Manifest, Publisher, WeightOptions, WeightVersion

_LONGEST_WAIT_S = 600.0
"""How long leases are waited for in a call without a deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """What a policy worker is built from.

    Attributes:
        model: the folder training starts from.
        actor: `actor_rollout_ref.actor`: the loss, mini-batches, optimizer.
        train: what training needs beside it.
        torch: device, threads, seed of the process.
        temperature: the one responses are sampled with; all log-probs are those at this temperature.
        use_rollout_is: multiply each token's policy loss by `rollout_is_weights`; needs that column.
        log_prob_micro_batch_size: samples per forward pass of `compute_log_prob` on one rank.
        weights: how they are published.
    """

    model: ModelOptions
    actor: ActorConfig = field(default_factory=ActorConfig)
    train: TrainOptions = field(default_factory=TrainOptions)
    torch: TorchOptions = field(default_factory=TorchOptions)
    temperature: float = 1.0
    use_rollout_is: bool = False
    log_prob_micro_batch_size: int = 64
    weights: WeightOptions = field(default_factory=WeightOptions)


class Policy:
    """Model and training of one rank, on plain tensors: without references, stores or calls."""

    def __init__(self, options: PolicyOptions, ranks: Ranks) -> None:
        self._options, self._ranks = options, ranks
        self.model = load_model(options.model, ranks, head=True)
        shard(self.model, ranks)
        self.loop = TrainLoop(self.model, options.actor, options.train, ranks)
        low, high = options.actor.clip_range()
        self._loss = PolicyLossOptions(
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=options.actor.clip_ratio_c,
            loss_agg_mode=options.actor.loss_agg_mode,
        )

    @property
    def update_columns(self) -> tuple[str, ...]:
        """Columns that `update` reads."""
        reference = ("ref_log_prob",) if self._options.actor.use_kl_loss else ()
        weights = ("rollout_is_weights",) if self._options.use_rollout_is else ()
        return (*MODEL_COLUMNS, "old_log_probs", "advantages", *reference, *weights)

    def log_probs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`old_log_probs` and `entropys`, float32 [B, R], of the current weights; see `score_responses`."""
        scores = score_responses(
            self.model,
            PaddedBatch(columns, self._ranks.device),
            temperature=self._options.temperature,
            micro_batch_size=self._options.log_prob_micro_batch_size,
            entropy=True,
        )
        return {"old_log_probs": scores["log_probs"], "entropys": scores["entropys"]}

    def update(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Train on `update_columns` of this rank's rows.

        Returns:
            `actor/…`: pg_loss, pg_clipfrac, pg_clipfrac_lower, ppo_kl, entropy, kl_loss (where it is used),
            grad_norm, lr; means over mini-batches, the same on all ranks.

        Raises:
            NonFiniteLoss, ValueError: see `TrainLoop.update`.
        """
        metrics = self.loop.update(PaddedBatch(columns, self._ranks.device), self.loss_share)
        return {f"actor/{name}": value for name, value in metrics.items()}

    def loss_share(self, micro: MicroBatch, denominators: LossDenominators) -> LossShare:
        """Policy loss, minus the entropy bonus, plus the KL term, of one micro-batch."""
        options, actor, mask = self._options, self._options.actor, micro["response_mask"]
        mode = actor.loss_agg_mode
        logits = response_logits(self.model, micro)
        log_probs = log_probs_from_logits(logits, micro["responses"], options.temperature)
        policy = policy_loss(
            actor.policy_loss.loss_mode,
            PolicyLossInputs(
                log_probs_bt=log_probs,
                old_log_probs_bt=micro["old_log_probs"],
                advantages_bt=micro["advantages"],
                mask_bt=mask,
                denominators=denominators,
                weights_bt=micro["rollout_is_weights"] if options.use_rollout_is else None,
            ),
            self._loss,
        )
        with_bonus = actor.entropy_coeff != 0
        entropy = entropy_from_logits(logits if with_bonus else logits.detach(), options.temperature)
        loss = policy.loss
        if with_bonus:
            loss = loss - actor.entropy_coeff * aggregate_loss(entropy, mask, mode, denominators)
        metrics = {
            "pg_loss": policy.loss.detach(),
            "pg_clipfrac": policy.pg_clipfrac,
            "pg_clipfrac_lower": policy.pg_clipfrac_lower,
            "ppo_kl": policy.ppo_kl,
            "entropy": aggregate_loss(entropy.detach(), mask, "token-mean", denominators),
        }
        if actor.use_kl_loss:
            per_token = kl_estimate(log_probs, micro["ref_log_prob"], mask, actor.kl_loss_type)
            kl_loss = aggregate_loss(per_token, mask, mode, denominators)
            loss = loss + actor.kl_loss_coef * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        return LossShare(loss=loss, metrics=metrics)

    def save(self, path: str) -> None:
        """Write a Hugging Face folder, see `save_hf_folder`; collective."""
        save_hf_folder(self.model, self._options.model.path, path, self._ranks)


class PolicyWorker(TrainedWorker):
    """One rank of the policy. Calls come in one order on all ranks; every method is collective."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options.torch)
        self._options = options
        self._policy = Policy(options, self.ranks)
        self._trains(self._policy.model, self._policy.loop, options.torch)
        self._publisher: Publisher | None = None
        self._registry: GroupRegistry | None = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=True)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropys`, float32 [B, R], at the sampling temperature, 0 outside the mask."""
        return DataProto.from_dict(tensors=self._policy.log_probs(self.read(batch, MODEL_COLUMNS)))

    @register(dispatch_mode=SPLIT)
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """One PPO update on the batch; metrics as `Policy.update`, one dictionary for all ranks."""
        return self._policy.update(self.read(batch, self._policy.update_columns))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def attach_registry(self, registry: Group) -> None:
        """Announce versions in the registry of this worker group; call it before the first publish.

        Raises:
            RuntimeError: weights were published already.
        """
        if self._publisher is not None:
            raise RuntimeError("a registry must be attached before the first weights are published")
        self._registry = GroupRegistry(registry)

    @register(dispatch_mode=REPLICATED)
    def publish_weights(self, version: WeightVersion) -> Manifest:
        """Put the current weights into the run's store as `version`; ready to be pulled when this returns.

        Raises:
            WeightsInUse: a replica kept reading the oldest version until this call's time ran out.
        """
        timeout = min(max(self.remaining() - ANSWER_S, 0.0), _LONGEST_WAIT_S)
        return self._publishing().publish(version, named_weights(self._policy.model), timeout=timeout)

    @register(dispatch_mode=REPLICATED)
    def save_hf(self, path: str) -> None:
        """Write weights, config and tokenizer to `path`, a folder that transformers and vLLM load."""
        self._policy.save(path)

    def _publishing(self) -> Publisher:
        if self._publisher is None:
            store = active_store()
            if store is None:
                raise StoreError("weights are published through the run's object store, and there is none")
            self._publisher = Publisher(
                store,
                self._registry,
                self._options.weights,
                prefix=f"weights/{self.group_name}",
                peers=self.ranks,
            )
        return self._publisher
