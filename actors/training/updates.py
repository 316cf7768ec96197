"""The optimizer side of policy and critic: epochs, mini-batches, micro-batches, one step per mini-batch.

update ──> for epoch, mini-batch:  micro-batches: loss share ─> backward    (adds up to the mini-batch)
                                   sums over ranks, gradient norm: finite?  (else NonFiniteLoss)
                                   clip ─> optimizer step
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actors.training.padded_batch import MicroBatch, PaddedBatch, mini_batch_rows
from actors.training.ranks import Ranks
from neoproto.algorithms.aggregate import LossDenominators
from neoproto.algorithms.masking import sequence_lengths
from neoproto.algorithms.schedule import lr_multiplier
from neoproto.config.optim import UpdateConfig
from neoproto.errors import NonFiniteLoss
from neoproto.weights.sharding import whole_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What training on a batch needs beside the model's section of the configuration.

    Attributes:
        samples_per_prompt: consecutive rows of a batch that are one prompt's.
        seed: of the shuffling.
        total_steps: planned calls of `update`, for the learning rate.
    """

    samples_per_prompt: int = 1
    seed: int = 0
    total_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "total_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShare:
    """What one micro-batch adds to its mini-batch.

    Attributes:
        loss: scalar with gradient.
        metrics: scalars without gradient. Both sum over micro-batches and ranks to the mini-batch's value.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


LossFn = Callable[[MicroBatch, LossDenominators], LossShare]


class TrainLoop:
    """Updates one model. All methods are collective: every rank calls them alike.

    Args:
        config: mini and micro batches, epochs, clipping, optimizer.

    Attributes:
        updates: calls of `update` that were completed; it drives the learning rate and the shuffling.
    """

    def __init__(self, model: nn.Module, config: UpdateConfig, options: TrainOptions, ranks: Ranks) -> None:
        self._model, self._config, self._options, self._ranks = model, config, options, ranks
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.updates = 0

    def update(self, batch: PaddedBatch, loss: LossFn) -> dict[str, float]:
        """Go through this rank's rows; the learning rate moves once, at the start.

        Args:
            batch: this rank's rows, as many as every other rank has.
            loss: the share of one micro-batch, given the mini-batch's denominators.

        Returns:
            Means over mini-batches of the metrics and of `grad_norm` (before clipping), and `lr`; the same on
            all ranks. Mini-batches whose mask is empty are left out, of training too.

        Raises:
            NonFiniteLoss: a loss or gradient norm of some mini-batch; it and later ones changed nothing.
            ValueError: the batch cannot be cut into mini-batches.
        """
        config, options = self._config, self._options
        rate = self._set_learning_rate()
        steps: list[dict[str, float]] = []
        for epoch in range(config.ppo_epochs):
            pieces = mini_batch_rows(
                len(batch),
                config.ppo_mini_batch_size * options.samples_per_prompt,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                seed=self._shuffle_seed(epoch),
                samples_per_prompt=options.samples_per_prompt,
            )
            for index, denominators in enumerate(self._denominators(batch, pieces)):
                if denominators.tokens > 0:
                    where = f"update {self.updates}, epoch {epoch}, mini-batch {index}"
                    steps.append(self._step(batch, pieces[index], loss, denominators, where))
        self.updates += 1
        names = steps[0] if steps else {"grad_norm": 0.0}
        means = {name: sum(step[name] for step in steps) / max(len(steps), 1) for name in names}
        return means | {"lr": rate}

    def _step(
        self, batch: PaddedBatch, rows: Tensor, loss: LossFn, denominators: LossDenominators, where: str
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch."""
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for micro in batch.micro_batches(rows, self._config.ppo_micro_batch_size_per_gpu):
            share = loss(micro, denominators)
            # FSDP averages gradients over ranks; the denominators are global already.
            torch.autograd.backward(share.loss * self._ranks.world_size)
            for name, value in {"loss": share.loss.detach(), **share.metrics}.items():
                totals[name] = totals.get(name, 0.0) + value.double()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = whole_tensor(torch.nn.utils.get_total_norm(gradients))
        summed = self._ranks.sum(torch.stack(list(totals.values()))).tolist()
        metrics = dict(zip(totals, summed, strict=True)) | {"grad_norm": float(norm)}
        total = metrics.pop("loss")
        if not (math.isfinite(total) and math.isfinite(metrics["grad_norm"])):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(f"loss {total}, gradient norm {metrics['grad_norm']} in {where}")
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip, norm)
        self.optimizer.step()
        return metrics

    def _denominators(self, batch: PaddedBatch, pieces: list[Tensor]) -> list[LossDenominators]:
        """Of each mini-batch, over all ranks; one reduction for all of them."""
        lengths = sequence_lengths(batch["response_mask"]).double()
        counts = torch.stack(
            [torch.stack([lengths[rows].sum(), (lengths[rows] > 0).double().sum()]) for rows in pieces]
        )
        horizon = float(batch.response_width)
        return [
            LossDenominators(tokens=tokens, sequences=sequences, horizon=horizon)
            for tokens, sequences in self._ranks.sum(counts).tolist()
        ]

    def _set_learning_rate(self) -> float:
        optim = self._config.optim
        rate = optim.lr * lr_multiplier(
            self.updates,
            optim.lr_warmup_steps,
            self._options.total_steps,
            optim.lr_scheduler_type,
            optim.min_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _shuffle_seed(self, epoch: int) -> int | None:
        if not self._config.shuffle:
            return None
        text = f"{self._options.seed}/{self.updates}/{epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
