"""The documented path of what a stock vLLM server needs; see `actors.rollout.vllm_server`."""

from actors.rollout.vllm_server import ServerEngine, register

__all__ = ["ServerEngine", "register"]
