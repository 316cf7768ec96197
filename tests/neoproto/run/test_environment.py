"""What worker processes begin with."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.preload import WORKER_MODULES
from meshes.common.warm import make_plan
from neoproto.config import RunConfig
from neoproto.run.environment import expected_workers, torch_env, worker_modules
from neoproto.runtime.placement import DeviceType, Placement


def placed(device: DeviceType) -> Placement:
    return cast(Any, SimpleNamespace(models=[SimpleNamespace(worker="rollout", device_type=device)]))


def config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate({"actor_rollout_ref": {"rollout": rollout}})


def test_a_root_has_what_all_workers_share_and_a_branch_the_engine() -> None:
    expected = expected_workers(config(num_threads=1), placed("cpu"))
    plan = make_plan("/logs", "a:b", [(one.modules, one.env) for one in expected])
    assert plan.modules == WORKER_MODULES == worker_modules("cpu")
    assert plan.env == torch_env(1)
    (branch,) = plan.branches
    assert branch.modules == worker_modules("cpu", "vllm")
    assert branch.modules[len(WORKER_MODULES)] == "actors.rollout.vllm_engine"
    assert branch.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_differ_are_not_the_roots(threads: int) -> None:
    expected = expected_workers(config(num_threads=threads, name="hf", env={"A": "b"}), placed("cpu"))
    plan = make_plan("/logs", "a:b", [(one.modules, one.env) for one in expected])
    assert ("OMP_NUM_THREADS" in plan.env) == (threads == 1)
    assert plan.branches[0].env["A"] == "b"


def test_nothing_is_forked_for_gpus() -> None:
    assert expected_workers(config(), placed("gpu")) == []
    assert worker_modules("gpu") == worker_modules("gpu", "vllm") == ()


def test_it_is_known_without_torch() -> None:
    code = "import neoproto.run.environment, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_a_root_imports_brings_nothing_that_must_not_be_there() -> None:
    """Monarch starts threads when it is imported, vLLM patches torch."""
    names = ", ".join(WORKER_MODULES)
    code = (
        f"import {names}, os, sys; sys.exit(bool({{'monarch', 'torchstore', 'vllm'}} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
