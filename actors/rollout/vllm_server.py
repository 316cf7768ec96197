"""A stock vLLM server on this machine as the engine of an update agent; see `vllm_transfer`."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from neoproto.errors import RolloutError
from neoproto.weights import PauseMode, TensorLayout, WeightVersion, check_layout
from neoproto.weights.agent import run_to_end

BACKEND = "neoproto"
"""What the server's `--weight-transfer-config` names."""

_SHARED_MEMORY = Path("/dev/shm")


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes (`vllm.general_plugins`)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "actors.rollout.vllm_transfer", "FileTransferEngine")


class ServerEngine:
    """Implements `ServingEngine` by the server's own routes.

    A load writes the tensors to one file in shared memory, which the server's workers map. In mode "abort"
    the server's clients get what they have so far, and continue it themselves. A process that is killed
    during a load leaves the file behind, in a folder `/dev/shm/neoproto-weights-*`.

    Args:
        url: of the server, for example "http://127.0.0.1:8000".
        layout: the model's tensors.
        timeout: seconds that an answer of the server may take.
    """

    def __init__(self, url: str, layout: Mapping[str, TensorLayout], timeout: float = 120.0) -> None:
        self._url, self._layout, self._timeout = url.rstrip("/"), layout, timeout
        self._failed = False

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless names, shapes and dtypes are the model's."""
        check_layout(layout, self._layout, what=what)

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        """Pause the server. It drains until everything has ended or not at all: `drain_s` of 0 is taken.

        Raises:
            ValueError: `drain_s` is not 0.
            RolloutError: the server refused, or is gone; and so for the methods below.
        """
        if drain_s:
            raise ValueError(f"a vLLM server cannot drain for a time (drain_timeout={drain_s}), set 0")
        await self._post("/pause?" + urllib.parse.urlencode({"mode": mode}))

    async def load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        """Have all workers of the server load the tensors; its answers name the version's number."""
        await run_to_end(self._load(version, tensors))

    async def _load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory(prefix="neoproto-weights-", dir=_SHARED_MEMORY) as folder:
            path = Path(folder) / "weights.safetensors"
            await asyncio.to_thread(save_file, _apart(tensors), path)
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {"path": str(path)}})
            await self._post("/finish_weight_update", {"weight_version": str(version.n)})
        # Frozen requests hold keys and values of the old weights.
        await self._post("/reset_prefix_cache?reset_running_requests=true")

    async def resume(self) -> None:
        """Resume the server, unless it has failed."""
        if not self._failed:
            await self._post("/resume")

    async def fail(self, cause: BaseException) -> None:
        """Leave the server paused, and end what it has in flight: its weights were not verified."""
        self._failed = True
        await self._post("/pause?mode=abort")

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        await asyncio.to_thread(self._post_now, route, body)

    def _post_now(self, route: str, body: Mapping[str, Any] | None) -> None:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._url + route, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout):
                return
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise RolloutError(f"{self._url}{route} answered {error.code}: {said}") from error
        except OSError as error:
            raise RolloutError(f"{self._url}{route} did not answer: {error}") from error


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of tied tensors, which a safetensors file does not hold twice."""
    found: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape) if tensor.numel() else (name,)
        found.setdefault(place, name)
    return {name: tensors[name].contiguous() for name in found.values()}
