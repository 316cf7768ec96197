"""An advantage estimator of the user's: how it is found, tried, called, and what is made of its mistakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions
from neoproto.config import RunConfig, load_config
from neoproto.data import DataProto
from neoproto.errors import AdvantageError, ConfigError, NeoProtoError
from neoproto.trainer.advantages import check_estimator, chosen_estimator, made_up_inputs
from neoproto.trainer.checkpoint.restarts import of_a_process
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.step import StepSettings, ppo_step
from neoproto.user_code import noted_interrupts
from tests.neoproto.trainer.fakes import World, prompt_batch

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "median_baseline.py"
TWICE = "def compute_advantages(inputs, options, by=2.0): return by * inputs.rewards_bt, inputs.rewards_bt\n"


def configured(path: Path | str, *, options: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    function = {"path": str(path), "options": options or {}}
    algorithm = {"adv_estimator": "custom", "custom_advantage_function": function}
    return load_config(
        {
            "algorithm": algorithm | sections.pop("algorithm", {}),
            "actor_rollout_ref": {"rollout": {"n": 4}},
            **sections,
        }
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def one_step(config: RunConfig, **groups: bool) -> tuple[DataProto, dict[str, float]]:
    world = World(scores=(1.0, 3.0))
    settings = StepSettings.from_config(config)
    return asyncio.run(ppo_step(world.workers(**groups), prompt_batch(), settings, PhaseClock()))


@pytest.mark.usefixtures("store")
def test_a_step_uses_it_with_its_options(tmp_path: Path) -> None:
    config = configured(write(tmp_path, TWICE), options={"by": 3.0})
    batch, metrics = one_step(config, critic=False)
    assert metrics["critic/advantages/max"] == 9.0
    assert metrics["critic/returns/max"] == 3.0
    assert batch.batch["advantages"].sum().item() == 12.0


@pytest.mark.usefixtures("store")
def test_with_a_critic_it_gets_values(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def compute_advantages(inputs, options):\n"
        "    values = inputs.required('mine', 'values_bt')\n"
        "    return inputs.rewards_bt - values, inputs.rewards_bt\n",
    )
    config = configured(path, critic={"enable": True})
    assert config.uses_critic
    check_estimator(config)
    _, metrics = one_step(config)
    assert metrics["critic/vf_loss"] == 0.75  # the critic was trained too
    with pytest.raises(ConfigError, match=r"line 2: ValueError: advantage estimator 'mine' needs values_bt"):
        check_estimator(configured(path))


def test_the_example_is_right_on_numbers_done_by_hand() -> None:
    estimator = chosen_estimator(configured(EXAMPLE))
    mask_bt = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [1, 0], [1, 0]])
    inputs = AdvantageInputs(
        rewards_bt=torch.tensor([[0.0, 4.0], [1.0, 0.0], [0.0, 0.0], [9.0, 9.0], [0.0, 0.0], [0.02, 0.0]]),
        mask_bt=mask_bt,
        group_ids_b=torch.tensor([0, 0, 0, 0, 1, 1]),
    )
    advantages_bt, returns_bt = estimator(inputs, AdvantageOptions())
    deviation = (3.0 + 0.0 + 1.0) / 3  # scores 4, 1, 0: median 1
    expected_b = torch.tensor([3 / deviation, 0.0, -1 / deviation, 0.0, -0.01 / 0.1, 0.01 / 0.1])
    torch.testing.assert_close(advantages_bt, expected_b[:, None] * mask_bt)
    torch.testing.assert_close(returns_bt, advantages_bt)


@pytest.mark.parametrize("truncated", ["zero", "mask"])
def test_the_example_passes_the_trial(truncated: str) -> None:
    check_estimator(configured(EXAMPLE, options={"floor": 0.2}, algorithm={"truncated": truncated}))


def test_what_lies_outside_the_mask_never_counts(tmp_path: Path) -> None:
    text = "import torch\ndef compute_advantages(i, o):\n    a = torch.full_like(i.rewards_bt, 5.0)\n"
    text += "    a[i.mask_bt == 0] = float('nan')\n    return a.double(), a\n"
    inputs = made_up_inputs(config := configured(write(tmp_path, text)))
    advantages_bt, returns_bt = chosen_estimator(config)(inputs, AdvantageOptions())
    assert advantages_bt.dtype == torch.float32
    torch.testing.assert_close(advantages_bt, 5.0 * inputs.mask_bt)
    torch.testing.assert_close(returns_bt, advantages_bt)
    check_estimator(config)


def test_the_trial_leaves_no_trace(tmp_path: Path) -> None:
    text = "calls = []\ndef compute_advantages(i, o):\n    calls.append(1)\n"
    text += "    return len(calls) + 0 * i.rewards_bt, i.rewards_bt\n"
    config = configured(write(tmp_path, text))
    check_estimator(config)
    inputs = made_up_inputs(config)
    advantages_bt, _ = chosen_estimator(config)(inputs, AdvantageOptions())
    assert advantages_bt.max() == 1.0


SPOILS = """
def compute_advantages(inputs, options, table):
    advantages_bt = inputs.rewards_bt.clone()
    given = (inputs.rewards_bt, inputs.values_bt, inputs.bootstrap_values_b, inputs.truncated_b)
    for tensor in (*given, inputs.group_ids_b):
        if tensor is not None:
            tensor.fill_(1)
    inputs.mask_bt.zero_()
    table["seen"].append(len(table["seen"]))
    assert table["seen"] == [0], "options of an earlier call"
    return advantages_bt, advantages_bt
"""
KEEPS = SPOILS.replace(".fill_(1)", ".clone()").replace("mask_bt.zero_()", "mask_bt.clone()")
MASKED = {"truncated": "mask", "rollout_correction": {"rollout_is": "token"}}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("algorithm", [{}, MASKED])
def test_what_it_changes_in_place_changes_nothing_else(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    def run(text: str) -> tuple[dict[str, list[Any]], dict[str, float]]:
        config = configured(
            write(tmp_path, text),
            options={"table": {"seen": []}},
            algorithm=algorithm,
            critic={"enable": True},
        )
        check_estimator(config)
        world = World(scores=(1.0, 3.0), values=0.25, truncated=(False, True), rollout=-1.25)
        settings = StepSettings.from_config(config)
        batch, metrics = asyncio.run(ppo_step(world.workers(), prompt_batch(), settings, PhaseClock()))
        columns = {name: column.tolist() for name, column in batch.batch.items()}
        assert config.algorithm.custom_advantage_function.options == {"table": {"seen": []}}
        return columns, metrics

    assert run(SPOILS) == run(KEEPS)


@pytest.mark.usefixtures("store")
def test_an_estimator_that_a_loop_puts_into_the_settings_gets_copies_too() -> None:
    def spoils(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[torch.Tensor, torch.Tensor]:
        made = inputs.rewards_bt.clone()
        inputs.rewards_bt.fill_(9.0)
        inputs.mask_bt.zero_()
        return made, made

    settings = StepSettings.from_config(load_config({"algorithm": {"adv_estimator": "reinforce_plus_plus"}}))
    world = World(scores=(1.0, 3.0))
    workers = world.workers(critic=False)
    _, metrics = asyncio.run(
        ppo_step(workers, prompt_batch(), replace(settings, estimator=spoils), PhaseClock())
    )
    assert metrics["critic/rewards/mean"] == 2.0
    assert metrics["critic/advantages/max"] == 3.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", r"mine\.py raised: line 2: ZeroDivisionError: division by zero, on a small batch"),
        ("raise SystemExit(0)", r"mine\.py raised: line 2: SystemExit: 0, on a small batch"),
        ("raise KeyboardInterrupt", r"mine\.py raised: line 2: KeyboardInterrupt, on a small batch"),
        ("raise GeneratorExit", r"mine\.py raised: line 2: GeneratorExit, on a small batch"),
        ("return i.rewards_bt", r"should return two tensors, got tensor\("),
        ("return 1, i.rewards_bt", r"should return advantages as a tensor, got 1 \(int\)"),
        (
            "return i.rewards_bt, i.rewards_bt.sum(1)",
            r"returns as a float tensor \[8, 4\], got torch.float32 \[8\]",
        ),
        (
            "return i.mask_bt, i.rewards_bt",
            r"advantages as a float tensor \[8, 4\], got torch.int64 \[8, 4\]",
        ),
        ("return i.rewards_bt / 0, i.rewards_bt", r"returned advantages that are not finite"),
    ],
)
def test_mistakes_are_one_line_before_a_run(tmp_path: Path, body: str, said: str) -> None:
    path = write(tmp_path, f"def compute_advantages(i, o):\n    {body}\n")
    said = rf"^algorithm\.custom_advantage_function: .*{said}"
    with noted_interrupts(), pytest.raises(ConfigError, match=said) as caught:
        check_estimator(configured(path))
    assert "\n" not in str(caught.value)


def test_an_option_it_does_not_take_is_refused(tmp_path: Path) -> None:
    config = configured(write(tmp_path, TWICE), options={"bye": 3.0})
    with pytest.raises(ConfigError, match=r"cannot be called as compute_advantages\(inputs, options, bye\)"):
        check_estimator(config)


@pytest.mark.usefixtures("store")
def test_a_failure_in_a_run_names_the_line_and_is_not_tried_again(tmp_path: Path) -> None:
    """The trial has eight rows; here there are two."""
    text = "def compute_advantages(i, o):\n    assert len(i.rewards_bt) == 8, 'eight'\n"
    config = configured(write(tmp_path, text + "    return i.rewards_bt, i.rewards_bt\n"))
    check_estimator(config)
    with pytest.raises(AdvantageError, match=r"mine\.py raised: line 2: AssertionError: eight") as caught:
        one_step(config, critic=False)
    assert isinstance(caught.value, NeoProtoError)
    assert not of_a_process(caught.value)
