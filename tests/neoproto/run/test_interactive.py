"""What a trainer driven by hand refuses, and what it leaves when it cannot start. No process is started."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import RunConfig
from neoproto.data import DataProto
from neoproto.errors import ConfigError, DeadlineExceeded, NeoProtoError
from neoproto.run import InteractiveTrainer, StepDone, compose_run
from neoproto.run.checks import place
from neoproto.run.interactive import check_stepwise
from neoproto.runtime import ResourcePool
from neoproto.runtime.failures import ProcessFailure
from neoproto.runtime.placement import Placement
from neoproto.runtime.pool import model_pool
from neoproto.runtime.settings import RuntimeSettings
from tests.neoproto.html_reading import Page
from tests.neoproto.run.inputs import overrides


class SlowRuntime:
    """Its workers do not start in time."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        self.run_dir, self.placement = folder, placement

    def model_resource_pool(self, name: str) -> ResourcePool:
        return model_pool(self.placement, name)

    def create_resource_pool(self, **_: Any) -> str:
        return "pool"

    def watch_failures(self, _: Collection[str]) -> ProcessFailure:
        return ProcessFailure()

    def create_worker_group(self, *_: Any, name: str, timeout: float, **__: Any) -> None:
        raise DeadlineExceeded("__init__", name, [0], timeout, {})


@pytest.fixture
def configured(model: Path, train_file: Path) -> Callable[..., RunConfig]:
    return lambda *more: compose_run("ppo_monarch", overrides(model, train_file, *more))


def test_a_runtime_takes_the_preset_topology_of_a_whole_configuration(
    configured: Callable[..., RunConfig],
) -> None:
    config = configured("trainer.n_gpus_per_node=2")
    assert config.topology is None
    assert RuntimeSettings.from_config(config).topology == config.resolved_topology()
    assert RuntimeSettings.from_config({}).topology is None


def test_what_cannot_be_had_step_by_step_is_refused_at_once(configured: Callable[..., RunConfig]) -> None:
    check_stepwise(configured())
    config = configured(
        "trainer.mode=separate_async",
        "trainer.on_failure=restart",
        "trainer.trace=true",
        "trainer.save_freq=1",
    )
    with pytest.raises(ConfigError) as caught:
        check_stepwise(config)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "trainer.mode",
        "trainer.on_failure",
        "trainer.trace",
    ]
    assert "got separate_async" in str(caught.value)


def test_a_runtime_with_another_topology_is_refused(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    two = configured("trainer.n_gpus_per_node=2")
    other = place(two, two.roles)
    runtime: Any = SlowRuntime(tmp_path / "run", other)
    with pytest.raises(ConfigError, match=r"topology: .* Runtime\.from_config\(config\) takes this one"):
        InteractiveTrainer(configured(), runtime)
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_can_be_tried_again(configured: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The folder's lock, the log and the runtime's mark are given back; the trainer's own error comes out."""
    config = configured()
    runtime: Any = SlowRuntime(tmp_path / "run", place(config, config.roles))
    for _ in range(2):
        with pytest.raises(NeoProtoError, match=r"trainer\.timeouts\.start=180"):
            InteractiveTrainer(config, runtime)
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_what_has_started_is_released_when_the_rest_does_not(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """At once what is there, later what is still on its way, though the exception is kept."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    late = threading.Event()

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, drain_s: float) -> None:
            ended.put(self.name)

    class Partly(SlowRuntime):
        def create_worker_group(self, *args: Any, name: str, **options: Any) -> Any:
            if name == "reward":
                return super().create_worker_group(*args, name=name, **options)
            if name == "actor":
                assert late.wait(20)
            return Group(name)

    config = configured()
    runtime: Any = Partly(tmp_path / "run", place(config, config.roles))
    with pytest.raises(NeoProtoError, match="did not answer") as kept:
        InteractiveTrainer(config, runtime)
    assert {ended.get(timeout=20) for _ in range(3)} == {"critic", "registry", "rollout-0"}
    late.set()
    assert ended.get(timeout=20) == "actor"
    assert kept.value is not None


def test_a_second_trainer_on_a_runtime_is_told_what_to_do(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = configured()
    inner: list[BaseException] = []

    class Busy(SlowRuntime):
        def create_worker_group(self, *args: Any, **options: Any) -> None:
            with pytest.raises(RuntimeError, match=r"close it first with its close\(\)") as caught:
                InteractiveTrainer(config, self)  # type: ignore[arg-type]
            inner.append(caught.value)
            super().create_worker_group(*args, **options)

    runtime: Any = Busy(tmp_path / "run", place(config, config.roles))
    with pytest.raises(NeoProtoError, match="did not answer"):
        InteractiveTrainer(config, runtime)
    assert inner


def test_a_step_is_shown_with_the_figures_one_looks_at_first() -> None:
    metrics = {"critic/score/mean": 0.5, "actor/pg_loss": 1e-9, "timing_s/gen": 1.0, "perf/throughput": 12.0}
    done = StepDone(step=2, total_steps=3, metrics=metrics, batch=DataProto())
    cells = Page(done._repr_html_()).cells
    assert [cell for cell in cells if cell] == [
        "step 2 of 3", "actor/pg_loss", "1e-09", "critic/score/mean", "0.5", "perf/throughput", "12",
    ]  # fmt: skip
