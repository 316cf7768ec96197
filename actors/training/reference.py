"""The reference: a frozen copy of the model that training starts from, for KL terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from actors.training.log_probs import score_responses
from actors.training.padded_batch import MODEL_COLUMNS, PaddedBatch
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions, load_model, shard
from actors.training.torch_worker import TorchOptions, TorchWorker
from neoproto.data import DataProto
from neoproto.runtime import Dispatch, register


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOptions:
    """What a reference worker is built from.

    Attributes:
        model: the folder.
        torch: device, threads, seed of the process.
        temperature: the one responses are sampled with.
        log_prob_micro_batch_size: samples per forward pass on one rank.
    """

    model: ModelOptions
    torch: TorchOptions = field(default_factory=TorchOptions)
    temperature: float = 1.0
    log_prob_micro_batch_size: int = 64


class Reference:
    """The frozen model of one rank."""

    def __init__(self, options: ReferenceOptions, ranks: Ranks) -> None:
        self._options, self._ranks = options, ranks
        self.model = load_model(options.model, ranks, head=True).requires_grad_(False)
        shard(self.model, ranks)

    def log_probs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`ref_log_prob`, float32 [B, R]; see `score_responses`."""
        scores = score_responses(
            self.model,
            PaddedBatch(columns, self._ranks.device),
            temperature=self._options.temperature,
            micro_batch_size=self._options.log_prob_micro_batch_size,
            entropy=False,
        )
        return {"ref_log_prob": scores["log_probs"]}


class ReferenceWorker(TorchWorker):
    """One rank of the reference."""

    def __init__(self, options: ReferenceOptions) -> None:
        super().__init__(options.torch)
        self._reference = Reference(options, self.ranks)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob`, float32 [B, R], at the sampling temperature, 0 outside the mask."""
        return DataProto.from_dict(tensors=self._reference.log_probs(self.read(batch, MODEL_COLUMNS)))
