"""vLLM, inside the replica's process: see `VllmEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neoproto.rollout.engine_kind import GIB, EngineKind

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM's CPU kernels have."""


def environment(device: str, eager: bool) -> Mapping[str, str]:
    """vLLM's own variables, and those of the libraries that it opens sockets with."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        # A replica is one process: no other process connects to what its engine listens on.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    if device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if eager:
            # vLLM's sampler compiles one small function even in eager mode: seconds, and a C++ compiler.
            env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def model_problem(config: Mapping[str, Any], device: str) -> str | None:
    """The CPU kernels know certain head sizes."""
    from neoproto.data.model_files import head_dim

    found = head_dim(config)
    if device != "cpu" or found is None or found in CPU_HEAD_DIMS:
        return None
    return (
        f"has attention heads of size {found}; vLLM on CPU has kernels for "
        f"{', '.join(map(str, CPU_HEAD_DIMS))}"
    )


CHOICE = EngineKind(
    name="vllm",
    about="vLLM",
    engine="actors.rollout.vllm_engine:VllmEngine",
    env=environment,
    modules=("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    model_problem=model_problem,
    library_bytes=0.75 * GIB,
    options=("kv_cache_gib", "gpu_memory_utilization", "enforce_eager"),
)
