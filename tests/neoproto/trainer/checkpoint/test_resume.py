"""The controller's state as it is read from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.trainer.checkpoint.folder import Checkpoint
from neoproto.trainer.checkpoint.resume import STATE, RolloutProgress, TrainerState, code_of, read_state
from neoproto.weights import WeightVersion

WHOLE = TrainerState(
    step=3,
    version=WeightVersion(epoch=1, n=3),
    loader={"epoch": 0},
    kl={},
    recorder={"tokens": 5},
    positions={"metrics.jsonl": 4},
    ranks={"actor": 1},
    fixed={"trainer.mode": "sync"},
    rollout=RolloutProgress(batches=4, wanted=WeightVersion(epoch=1, n=2)),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(WHOLE.to_json())
    assert read_state(Checkpoint(step=3, path=tmp_path)) == WHOLE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged: JSONDecodeError: "),
        (b"\xe9", "is damaged: UnicodeDecodeError: "),
        (b"[]", "is damaged: AttributeError: "),
        (b'{"format": 1}', "is damaged: KeyError: 'rollout'"),
        (WHOLE.to_json().replace(b'"step": 3', b'"step": null'), "is damaged: TypeError: "),
        (WHOLE.to_json().replace(b'"kl": {}', b'"kl": 3'), "is damaged: TypeError: "),
        (b'{"format": 2}', "got format 2, this version reads 1"),
    ],
)
def test_what_was_not_written_by_a_run_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / STATE
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_state(Checkpoint(step=3, path=tmp_path))
    assert str(caught.value).replace(": got", " got").startswith(f"{path} {said}")


def test_code_is_known_by_its_file_and_the_neighbours_that_it_imports(tmp_path: Path) -> None:
    def written(folder: str, **others: str) -> str:
        files = {
            "reward.py": "import json, torch\nfrom helper import x\ndef f():\n    import package.part\n",
            "helper.py": "from . import further",
            "further.py": "import reward, json",
            "package/__init__.py": "",
            "package/part.py": "",
            "unused.py": "",
            "json.py": "",
            "torch/readme.py": "",
        } | {name.replace("__", "/") + ".py": text for name, text in others.items()}
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return code_of(tmp_path / folder / "reward.py", "f")

    first = written("a")
    assert first.startswith("f in a file of SHA-256 ")
    assert " with 4 neighbours of " in first
    assert written("b", unused="1", json="1", torch__readme="1") == first
    for number, changed in enumerate(("helper", "further", "package__part")):
        assert written(f"c{number}", **{changed: "import further"}) != first
    assert code_of(tmp_path / "a" / "unused.py", "f").startswith("f in a file of SHA-256 ")
    assert code_of(tmp_path / "absent.py", "f") == "f in a file that cannot be read"
    (tmp_path / "broken.py").write_text("def")
    assert code_of(tmp_path / "broken.py", "f").startswith("f in a file of SHA-256 ")
