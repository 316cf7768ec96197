"""vLLM's weight-transfer plug point: how a stock vLLM server, which is no process of ours, gets our versions.

    UpdateAgent ─> ServerEngine ──────────────── HTTP ───────────────> vLLM server ─> FileTransferEngine
    pull, lease    pause, start, update(path), finish(version), resume                in each of its workers

The agent holds the lease while the server loads; the bytes go through a file in shared memory. See
`actors.rollout.vllm_server` for the other end, and docs/weights-rollout.md for how such a server is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.rollout.vllm_engine import refresh_tied


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc] # types of vLLM are not followed
    """Nothing is agreed on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights of one version are.

    Attributes:
        path: a safetensors file of all tensors, under their Hugging Face names, on the server's machine.
    """

    path: str


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """One worker's side: maps the file and loads what its model takes of it."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        # Before: while it reloads, tied parameters are apart, and one of them gets no tensor of its own.
        self._parameters = frozenset(name for name, _ in self.model.named_parameters())
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does it, which however asks for an accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load all tensors of the file.

        Raises:
            RuntimeError: parameters of the model are not in it; vLLM itself would keep the old ones.
        """
        with safe_open(update_info.path, framework="pt") as file:
            loaded = self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        missing = self._parameters - loaded
        if missing:
            raise RuntimeError(
                f"{update_info.path} left {len(missing)} parameters unloaded: {sorted(missing)[:8]}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""
