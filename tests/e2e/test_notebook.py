"""docs/notebooks/controller.ipynb, as it is, in a real kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from neoproto.report.cli import main as report
from tests.e2e.command import ROOT, json_lines

NOTEBOOK = ROOT / "docs" / "notebooks" / "controller.ipynb"
LEFT = """
import json, threading
from tests.meshes.leftovers import wait_until_clean
left = wait_until_clean(runtime.run_id, None, 2.0)
left += [thread.name for thread in threading.enumerate() if thread.name == "neoproto-steps"]
print(json.dumps([runtime.run_id, left]))
"""


def test_it_is_kept_without_what_a_run_of_it_left() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count, dict(cell.metadata)) == ([], None, {}), cell.source


@pytest.mark.e2e
def test_it_runs_from_top_to_bottom(tmp_path: Path, cache: Path, user_env: dict[str, str]) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(LEFT))  # while the kernel that was the controller lives
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=user_env | {"NEOPROTO_CACHE": str(cache), "PYTHONPATH": str(ROOT)})
    shown = {cell.source.splitlines()[-1]: cell.outputs for cell in notebook.cells if cell.get("outputs")}
    check_displays(shown)
    (folder,) = (tmp_path / "outputs" / "runtime").iterdir()
    run_id, left = json.loads(shown[LEFT.splitlines()[-1]][0].text)
    assert left == []
    assert folder.name.endswith(run_id)
    steps = [row for row in json_lines(folder / "metrics.jsonl") if "training/global_step" in row]
    assert [row["training/global_step"] for row in steps] == [1, 2, 3]
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in steps)
    assert report([str(folder)]) == 0


def check_displays(shown: Mapping[str, list[Any]]) -> None:
    """Every cell that shows something shows the right thing, and nothing complained."""
    for cell, outputs in shown.items():
        if cell != "runtime.close()":  # Monarch may complain there of the hosts that are ended
            assert [one for one in outputs if one.get("name") == "stderr"] == [], cell
    for cell, words in {
        "runtime": ("Topology", "rollout", "actor, critic", "open"),
        "spelling": ("WorkerGroup spelling", "compare, who", "alive"),
        "call": ("RemoteCall spelling.who", "ended with a result", "2 of 2: 0-1"),
        "trainer": ("0 of 3", "actor, critic, reward, registry, rollout-0"),
        "done": ("step 3 of 3", "critic/score/mean", "actor/grad_norm"),
        "batch": ("32 rows", "response_text", "stored", "volume 0", "… 27 more rows"),
    }.items():
        html = shown[cell][-1].data["text/html"]
        assert all(word in html for word in words), html
    assert shown["spelling.who()"][0].data["text/plain"] == "['rank 0 of 2', 'rank 1 of 2']"
    (plot,) = [one for one in shown["done"] if one.output_type == "display_data"]
    assert len(plot.data["image/png"]) > 5000
    (answers,) = [outputs[0].text for cell, outputs in shown.items() if cell.lstrip().startswith("print(f")]
    assert re.fullmatch(r"('.*' +for '\w+' +\d letters right\n){8}", answers), answers
