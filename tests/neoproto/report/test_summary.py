from __future__ import annotations

import math
from pathlib import Path

from neoproto.report.reading import read_run
from neoproto.report.summary import differences, figure_rows
from neoproto.report.topology import placement_of
from tests.neoproto.report.runs import write_run


def test_figures_of_runs_stand_side_by_side(tmp_path: Path) -> None:
    whole = read_run(write_run(tmp_path / "a", nulls=True), "a")
    fresh = write_run(tmp_path / "b")
    (fresh / "metrics.jsonl").write_text("")
    found = {row["name"]: row for row in figure_rows([whole, read_run(fresh, "b")])}
    rows = {name: row["values"] for name, row in found.items()}
    assert rows["Steps"] == [6.0, 0.0]
    greedy = "Validation reasoning_gym/spell_backward, greedy"
    # One row says where it began, where it ended, and the best in between.
    assert [name for name in rows if name.startswith(greedy)] == [greedy]
    row = found[greedy]
    assert (row["first"], row["values"][0], row["best"]) == ([0.8, None], 0.806, [0.806, None])
    assert found["Tokens"]["first"] is None
    assert rows["Tokens"][0] == 6 * 3200
    assert rows["Wall time of the loop"][0] == 8.0
    assert math.isfinite(rows["Entropy, last 10 steps"][0])
    assert math.isnan(rows["Entropy, last 10 steps"][1])


def test_a_figure_that_no_run_has_is_left_out(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "b")
    (fresh / "metrics.jsonl").write_text("")
    assert [row["name"] for row in figure_rows([read_run(fresh, "b")])] == ["Steps"]


def test_only_keys_that_differ_are_listed(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "a", "runtime.run_dir=x"), "a")
    other = read_run(write_run(tmp_path / "b", "runtime.run_dir=y", "trainer.seed=3"), "b")
    rows = {row["key"]: row["values"] for row in differences([one, other])}
    assert rows == {
        key: ["0", "3"] for key in ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")
    }
    assert differences([one, one]) == []


def test_topology_puts_models_on_devices(tmp_path: Path) -> None:
    overrides = ("trainer.mode=decoupled_async", "trainer.n_gpus_per_node=2", "data.train_batch_size=64")
    run = read_run(write_run(tmp_path / "a", *overrides), "a")
    topology = placement_of(run.config)
    assert topology["clusters"][0]["nodes"] == [[["actor", "critic"], ["actor", "critic"], ["rollout"]]]
    assert [row["ranks"] for row in topology["rows"]] == [2, 1, 2]
    assert topology["mode"] == "decoupled_async"


def test_a_configuration_of_another_version_is_said_to_be_one() -> None:
    problem = placement_of({"trainer": {"no_such_key": 1}, "data": {"other": 2}})["problem"]
    assert problem.startswith("this version does not take the configuration: ")
    assert "(and 1 more)" in problem


def test_more_devices_than_can_be_drawn_are_a_problem() -> None:
    size = {"name": "train", "n_gpus_per_node": 1}
    models = [
        {"name": name, "worker": name, "config_key": key, "resource_pool": "train"}
        for name, key in (
            ("actor", "actor_rollout_ref"), ("rollout", "actor_rollout_ref"), ("critic", "critic")
        )
    ]  # fmt: skip
    topology = {
        "clusters": [size | {"nnodes": 20_000, "device_type": "cpu"}],
        "device_pools": [size | {"nnodes": 1, "cluster": "train"}],
        "models": models,
    }
    said = placement_of({"topology": topology})["problem"]
    assert said == "more than 10,000 devices are not drawn: 20,000"
    said = placement_of({"trainer": {"nnodes": 100_000}})["problem"]
    assert said.startswith("this version does not take the configuration: ")
