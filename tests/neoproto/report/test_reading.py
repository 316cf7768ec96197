from __future__ import annotations

import math
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.report.reading import read_config, read_run, read_runs, run_names
from tests.neoproto.report.runs import write_rows, write_run


def test_curves_samples_and_times_of_a_whole_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    assert list(run.curves["actor/entropy"]) == [1, 2, 3, 4, 5, 6]
    assert list(run.curves["val-core/reasoning_gym/spell_backward/acc/greedy"]) == [0, 3, 6]
    assert run.seconds[0] == 0
    # A step and the validation after it have one step and two lines: the later time counts.
    assert run.seconds[3] == 4
    assert [sample.step for sample in run.samples] == [0] * 4 + [3] * 4 + [6] * 4
    assert (run.last_step, run.complete, run.notes) == (6, True, ())
    assert run.config["trainer"]["total_training_steps"] == 6


def test_null_and_nan_are_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", nulls=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time": 1.0, "actor/entropy": NaN, "actor/lr": Infinity}\n')
    run = read_run(folder, "a")
    assert math.isnan(run.curves["actor/entropy"][3])
    assert math.isnan(run.curves["actor/entropy"][7])
    assert math.isinf(run.curves["actor/lr"][7])


def test_of_a_killed_run_the_cut_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", complete=False)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[: whole.rindex(b"}") - 40])
    run = read_run(folder, "a")
    assert run.last_step == 6
    assert list(run.curves["actor/entropy"])[-1] == 6  # its line is whole; the validation behind it is cut
    assert len(run.curves["val-core/reasoning_gym/spell_backward/acc/greedy"]) == 2
    assert run.notes == ("metrics.jsonl ends in a cut line: the run was killed, or is writing it now",)
    assert not run.complete


def test_a_run_that_trains_on_is_not_complete(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert read_run(folder, "a").complete
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("total_training_steps: 6", "total_training_steps: 7"))
    assert not read_run(folder, "a").complete
    (folder / "config.yaml").write_text(
        config.replace("total_training_steps: 6", "total_training_steps: null")
    )
    assert read_run(folder, "a").complete


def test_a_step_that_was_logged_twice_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time": 1.0, "actor/lr": 0.5}\n')
    run = read_run(folder, "a")
    assert run.curves["actor/lr"][2] == 0.5
    assert list(run.curves["actor/lr"]) == [1, 2, 3]


def test_a_run_that_has_not_stepped_and_one_without_samples(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "fresh")
    (fresh / "metrics.jsonl").write_text("")
    assert read_run(fresh, "fresh").curves == {}
    bare = write_run(tmp_path / "bare")
    for path in (bare / "validation").iterdir():
        path.unlink()
    assert read_run(bare, "bare").notes == ("validation/ has no samples, although the run validated",)
    (bare / "validation").rmdir()
    assert read_run(bare, "bare").samples == ()


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("metrics.jsonl", "{broken}", "metrics.jsonl:3: not JSON"),
        ("metrics.jsonl", "\xff", "metrics.jsonl:3: not JSON"),
        ("metrics.jsonl", "[" * 100_000, "metrics.jsonl:3: not JSON"),
        ("metrics.jsonl", "[1]", "metrics.jsonl:3: wanted a JSON object, got list"),
        ("metrics.jsonl", '{"time": 1}', "metrics.jsonl:3: 'step' is None, wanted a number of steps"),
        ("metrics.jsonl", '{"step": -1}', "'step' is -1"),
        ("metrics.jsonl", '{"step": true}', "'step' is True"),
        ("metrics.jsonl", f'{{"step": {"1" * 400}}}', f"'step' is {'1' * 59}…, wanted a number of steps"),
        ("metrics.jsonl", '{"step": 1, "a": "b"}', "metrics.jsonl:3: 'a' is 'b', wanted a number or null"),
        ("metrics.jsonl", '{"step": 1, "a": true}', "'a' is True"),
        ("metrics.jsonl", '{"step": 1, "a": [[1]]}', "'a' is [[1]], wanted a number or null"),
        ("metrics.jsonl", f'{{"step": 1, "a": {"1" * 400}}}', f"'a' is {'1' * 59}…, which no float holds"),
        ("metrics.jsonl", '{"step": 1, "time": "b"}', "'time' is 'b'"),
        ("validation/step_3.jsonl", "{broken}", "step_3.jsonl:3: not JSON"),
        ("validation/step_3.jsonl", '{"step": 3, "uid": "a"}', "step_3.jsonl:3: a sample without 'label', "),
    ],
)
def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, name: str, line: str, complaint: str) -> None:
    folder = write_run(tmp_path / "a")
    whole = read_run(folder, "a")
    lines = (folder / name).read_text().splitlines(keepends=True)
    lines.insert(2, line + "\n")
    (folder / name).write_bytes("".join(lines).encode("latin-1"))
    run = read_run(folder, "a")
    (note,) = run.notes
    assert note.startswith("left out: ")
    assert complaint in note
    assert (run.curves, run.samples) == (whole.curves, whole.samples)
    assert run.seconds == whole.seconds


def test_of_a_damaged_line_the_other_values_stay_and_the_notes_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "actor/lr": "b", "actor/entropy": 0.5, "time": 1e9}\n{"step": \n[1]\n')
    run = read_run(folder, "a")
    assert run.curves["actor/entropy"][7] == 0.5
    assert 7 not in run.curves["actor/lr"]
    where = f"{folder / 'metrics.jsonl'}:10"
    assert run.notes == (f"left out: {where}: 'actor/lr' is 'b', wanted a number or null (and 2 more)",)


def test_samples_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "validation" / "step_9.jsonl").mkdir()
    run = read_run(folder, "a")
    assert len(run.samples) == 12
    path = folder / "validation" / "step_9.jsonl"
    assert run.notes == (f"left out: {path}: cannot be read: Is a directory",)


def test_folders_that_are_none_of_a_run_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    half = write_run(tmp_path / "half")
    (half / "config.yaml").unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        read_runs([tmp_path / "absent", tmp_path / "file", half, tmp_path / "empty"])
    missing = "not the folder of a run that trains: it has no"
    assert caught.value.problems == (
        f"{tmp_path / 'absent'}: no such folder",
        f"{tmp_path / 'file'}: wanted the folder of a run, got a file",
        f"{half}: {missing} config.yaml",
        f"{tmp_path / 'empty'}: {missing} config.yaml and no metrics.jsonl",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1\nb: 2\n", r"config\.yaml:2: not YAML \(expected ',' or '\]'"),
        ("a: \x00", r"config\.yaml: not YAML \(unacceptable character"),
        ("a: " + "[" * 3000, r"config\.yaml: not YAML \(maximum recursion"),
        ("a: " + "1" * 5000, r"config\.yaml: not YAML \(Exceeds the limit"),
        ("a: !!timestamp b", r"config\.yaml: not YAML"),
        ("a: {b: [1, 0x" + "f" * 5000 + "]}", r"config\.yaml: a\.b\.1 is a number of more than 300 digits"),
        ("? 0x" + "f" * 5000 + "\n: 1", r"config\.yaml: a key is a number of more than 300 digits"),
        ("a: &a {b: *a}", r"config\.yaml: a holds itself, or has more than 50 levels"),
        ("a: &a [*a]", r"config\.yaml: a holds itself"),
        ("a: &a [0,0,0,0,0,0,0,0,0,0]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
         "e: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]", r"config\.yaml: it has more than 100,000 values"),
        ("", "wanted a mapping, got NoneType"),
        ("- 1\n", "wanted a mapping, got list"),
    ],
)  # fmt: skip
def test_a_broken_configuration_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_run(folder, "a")


def test_dates_and_keys_that_are_no_texts_become_texts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("null: 3\n2020-01-01: {2021-02-03: [{1: 2021-02-03}]}\nb: !!set {x}\n")
    assert read_config(path) == {
        "None": 3,
        "2020-01-01": {"2021-02-03": [{"1": "2021-02-03"}]},
        "b": ["x"],
    }


def test_other_files_beside_the_samples_are_left_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for name in ("last", "²5"):
        write_rows(folder / "validation" / f"step_{name}.jsonl", [{"other": 1}])
    assert len(read_run(folder, "a").samples) == 12


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["x/a", "y/b"], ["a", "b"]),
        (["x/a", "y/a"], ["x/a", "y/a"]),
        (["p/ppo/2026-01-31_12-00-00"], ["ppo/2026-01-31_12-00-00"]),
        (["p/ppo/2026-01-31_12-00-00", "p/grpo/2026-01-31_12-00-00_1"],
         ["ppo/2026-01-31_12-00-00", "grpo/2026-01-31_12-00-00_1"]),
        (["x/a", "x/a"], ["a (1)", "a (2)"]),
    ],
)  # fmt: skip
def test_names_are_as_short_as_they_can_be(folders: list[str], names: list[str]) -> None:
    assert run_names([Path(folder) for folder in folders]) == names
