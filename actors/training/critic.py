"""The critic: the value model of GAE. Body from the policy's folder, a head that starts at zero.

Shapes: B = rows, R = response width of the batch; b, p, r = those of a micro-batch; l = p + r.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from actors.dispatch import SPLIT
from actors.training.padded_batch import MODEL_COLUMNS, MicroBatch, PaddedBatch
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions, load_model, shard
from actors.training.torch_worker import TorchOptions
from actors.training.trained_worker import TrainedWorker
from actors.training.updates import LossShare, TrainLoop, TrainOptions
from neoproto.algorithms.aggregate import LossDenominators
from neoproto.algorithms.value_loss import value_loss
from neoproto.config.critic import CriticConfig
from neoproto.data import DataProto
from neoproto.runtime import Dispatch, register


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticOptions:
    """What a critic worker is built from.

    Attributes:
        model: the folder whose model is the body; its language-model head is not used.
        critic: the section `critic`: the loss, mini-batches, optimizer.
        train: what training needs beside it.
        torch: device, threads, seed of the process.
    """

    model: ModelOptions
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainOptions = field(default_factory=TrainOptions)
    torch: TorchOptions = field(default_factory=TorchOptions)


class ValueModel(nn.Module):
    """A body with one output per token: the value of the state after that token."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        width = body.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        like = next(body.parameters())
        self.head = nn.Linear(width, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, keep: int) -> Tensor:
        """Values float32 [b, keep] of the states after the last `keep` positions."""
        hidden = self.body(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        values: Tensor = self.head(hidden[:, -keep:]).squeeze(-1).float()
        return values


class Critic:
    """Model and training of one rank, on plain tensors: without references, stores or calls."""

    def __init__(self, options: CriticOptions, ranks: Ranks) -> None:
        self._options, self._ranks = options, ranks
        self.model = ValueModel(load_model(options.model, ranks, head=False))
        shard(self.model, ranks)
        self.loop = TrainLoop(self.model, options.critic, options.train, ranks)

    @property
    def update_columns(self) -> tuple[str, ...]:
        """Columns that `update` reads."""
        return (*MODEL_COLUMNS, "values", "returns")

    @torch.no_grad()
    def values(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the critic expects from each state on.

        Returns:
            `values` float32 [B, R]: of the state before each response token, 0 outside the response mask.
            `bootstrap_values` float32 [B]: of the state after the last response token, what a response that
            was cut at the length limit is continued with.
        """
        batch = PaddedBatch(columns, self._ranks.device)
        values, bootstrap = torch.zeros(len(batch), batch.response_width), torch.zeros(len(batch))
        rows = torch.arange(len(batch))
        for micro in batch.micro_batches(rows, self._options.critic.ppo_micro_batch_size_per_gpu):
            states = self._state_values(micro)
            kept = micro["response_mask"] != 0
            before = torch.where(kept, states[:, :-1], 0.0)
            values[micro.rows, : micro.response_width] = before.cpu()
            after = states.gather(1, micro.response_lengths.unsqueeze(1)).squeeze(1)
            bootstrap[micro.rows] = after.cpu()
        return {"values": values, "bootstrap_values": bootstrap}

    def update(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Train on `update_columns` of this rank's rows.

        Returns:
            `critic/…`: vf_loss, vf_clipfrac, vpred_mean, grad_norm, lr (means over mini-batches) and
            vf_explained_var (of the values that the returns were made with); the same on all ranks.

        Raises:
            NonFiniteLoss, ValueError: see `TrainLoop.update`.
        """
        batch = PaddedBatch(columns, self._ranks.device)
        metrics = self.loop.update(batch, self.loss_share)
        metrics["vf_explained_var"] = self._explained_variance(batch)
        return {f"critic/{name}": value for name, value in metrics.items()}

    def loss_share(self, micro: MicroBatch, denominators: LossDenominators) -> LossShare:
        """Clipped value loss of one micro-batch."""
        found = value_loss(
            vpreds_bt=self._state_values(micro)[:, :-1],
            returns_bt=micro["returns"],
            old_values_bt=micro["values"],
            mask_bt=micro["response_mask"],
            cliprange_value=self._options.critic.cliprange_value,
            loss_agg_mode=self._options.critic.loss_agg_mode,
            denominators=denominators,
        )
        metrics = {
            "vf_loss": found.loss.detach(),
            "vf_clipfrac": found.vf_clipfrac,
            "vpred_mean": found.vpred_mean,
        }
        return LossShare(loss=found.loss, metrics=metrics)

    def _state_values(self, micro: MicroBatch) -> Tensor:
        """Values [b, r + 1]: column t is the state before response token t, column r after the last."""
        values: Tensor = self.model(
            micro.input_ids, micro.attention_mask, micro.position_ids, keep=micro.response_width + 1
        )
        return values

    def _explained_variance(self, batch: PaddedBatch) -> float:
        """`explained_variance` over the rows of all ranks, from sums: 1 - Var(R - v) / Var(R)."""
        kept = batch["response_mask"] != 0
        returns, values = batch["returns"][kept].double(), batch["values"][kept].double()
        left = returns - values
        moments = torch.stack(
            [kept.sum().double(), returns.sum(), returns.square().sum(), left.sum(), left.square().sum()]
        )
        count, total, total_squares, rest, rest_squares = self._ranks.sum(moments).tolist()
        if count < 2:
            return 0.0
        variance = total_squares - total * total / count
        unexplained = rest_squares - rest * rest / count
        return 1.0 - unexplained / variance if variance > 1e-12 * total_squares else 0.0


class CriticWorker(TrainedWorker):
    """One rank of the critic. Calls come in one order on all ranks; every method is collective."""

    def __init__(self, options: CriticOptions) -> None:
        super().__init__(options.torch)
        self._critic = Critic(options, self.ranks)
        self._trains(self._critic.model, self._critic.loop, options.torch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=True)
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` [B, R] and `bootstrap_values` [B], see `Critic.values`."""
        return DataProto.from_dict(tensors=self._critic.values(self.read(batch, MODEL_COLUMNS)))

    @register(dispatch_mode=SPLIT)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """One update on the batch; metrics as `Critic.update`, one dictionary for all ranks."""
        return self._critic.update(self.read(batch, self._critic.update_columns))
