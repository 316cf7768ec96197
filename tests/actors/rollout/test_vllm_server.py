"""What a vLLM server is told to do, by an agent beside it; the server is a stub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.rollout.vllm_server import ServerEngine
from neoproto.errors import RolloutError, WeightMismatch
from neoproto.weights import TensorLayout, WeightVersion
from tests.actors.stub_http import serving

WEIGHTS = {"w": torch.arange(4.0), "v": torch.ones(2, dtype=torch.bfloat16)}
WEIGHTS["tied"] = WEIGHTS["w"]
LAYOUT = {name: TensorLayout.of(tensor) for name, tensor in WEIGHTS.items()}


def told(act: Callable[[ServerEngine], Any], answer: Callable[[str, dict[str, Any]], object]) -> None:
    with serving(answer) as url:
        asyncio.run(asyncio.wait_for(act(ServerEngine(url + "/", LAYOUT)), 20))


def test_a_load_pauses_hands_over_a_file_and_names_the_version() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    found: dict[str, torch.Tensor] = {}

    def answer(route: str, body: dict[str, Any]) -> None:
        if route == "/update_weights":
            found.update(load_file(body["update_info"]["path"]))
            body = {"update_info": sorted(body["update_info"])}
        said.append((route, body))

    async def act(server: ServerEngine) -> None:
        await server.check_layout(LAYOUT, "weights 0.3")
        with pytest.raises(WeightMismatch, match="1 missing: v"):
            await server.check_layout({name: LAYOUT[name] for name in ("w", "tied")}, "weights 0.3")
        with pytest.raises(ValueError, match="cannot drain"):
            await server.pause("keep", 1.0)
        await server.pause("keep", 0.0)
        await server.load(WeightVersion(epoch=0, n=3), WEIGHTS)
        await server.resume()

    told(act, answer)
    assert said == [
        ("/pause?mode=keep", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": ["path"]}),
        ("/finish_weight_update", {"weight_version": "3"}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/resume", {}),
    ]
    assert found.keys() == {"w", "v"}
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in found)


def test_a_server_that_refuses_is_quoted_and_one_that_failed_stays_paused() -> None:
    said: list[str] = []

    def answer(route: str, body: dict[str, Any]) -> None:
        said.append(route)
        if route == "/update_weights":
            raise ValueError("no such file")

    async def act(server: ServerEngine) -> None:
        with pytest.raises(RolloutError, match="/update_weights answered 500: no such file") as caught:
            await server.load(WeightVersion(epoch=0, n=3), WEIGHTS)
        await server.fail(caught.value)
        await server.resume()

    told(act, answer)
    assert said == ["/start_weight_update", "/update_weights", "/pause?mode=abort"]


def test_a_server_that_is_gone_is_said() -> None:
    async def act() -> None:
        with pytest.raises(RolloutError, match="did not answer"):
            await ServerEngine("http://127.0.0.1:9", LAYOUT).resume()

    asyncio.run(act())
