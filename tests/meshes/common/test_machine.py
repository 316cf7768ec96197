from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

import meshes
from meshes.common import machine
from meshes.monarch.probe import PACKAGES
from neoproto.errors import TopologyError
from neoproto.runtime.backend import compile_placement


@pytest.mark.parametrize(
    ("listed", "gpus"), [("2,3", ("2", "3")), ("", ()), ("GPU-a, GPU-b", ("GPU-a", "GPU-b"))]
)
def test_gpus_are_those_that_this_process_may_use(
    listed: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    assert machine.visible_gpus() == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine.visible_gpus() == ("0", "1")[: len(gpus)]


def test_a_torch_for_cpus_has_no_gpus_whatever_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So every part of the program says: hosts, the topology's default, the check of its size."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert machine.visible_gpus() == ()
    topology = {"clusters": [{"name": "c"}]}
    (cluster,) = compile_placement(topology, hosts_are_here=True).clusters
    assert cluster.device_type == "cpu"
    on_gpus = {"clusters": [{"name": "c", "device_type": "gpu"}]}
    with pytest.raises(TopologyError, match="this machine has 0"):
        compile_placement(on_gpus, hosts_are_here=True)
    assert compile_placement(on_gpus, hosts_are_here=False).clusters[0].device_type == "gpu", (
        "others are asked there"
    )


def test_versions_name_what_all_processes_must_share() -> None:
    found = machine.versions(PACKAGES)
    assert set(found) == {"python", "torch", "torchmonarch", "torchstore", "neoproto"}
    assert found["torchmonarch"] == "0.7.0"
    assert machine.source_digest() in found["neoproto"]
    assert machine.versions(["no-such-package"])["no-such-package"] == "missing"


def test_source_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OURS", ("meshes",))
    before = machine.source_digest()
    copy = tmp_path / "meshes"
    shutil.copytree(Path(meshes.__path__[0]), copy, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.spec_from_file_location(
        "meshes", copy / "__init__.py", submodule_search_locations=[str(copy)]
    )
    monkeypatch.setattr("meshes.common.machine.util.find_spec", lambda _: spec)
    assert machine.source_digest() == before
    (copy / "jobs.py").write_text("changed = True\n")
    assert machine.source_digest() != before


def test_ids_of_processes_belong_to_a_machine() -> None:
    assert machine.machine_id().endswith(os.readlink("/proc/self/ns/pid"))


def test_a_user_without_an_entry_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(machine.getpass, "getuser", unknown)
    monkeypatch.delenv(machine.CACHE_VARIABLE, raising=False)
    assert machine.inductor_cache().endswith(f"/torchinductor_{os.getuid()}")


def test_a_folder_that_is_too_long_for_sockets_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/" + "t" * 39)
    assert (machine.short_tmp(), machine.tmp_note()) == ("/" + "t" * 39, None)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/" + "é" * 20)  # 41 bytes
    assert machine.short_tmp() == "/tmp"
    assert (
        machine.tmp_note() == f"TMPDIR=/{'é' * 20} is longer than 40 bytes, which sockets allow: /tmp is used"
    )
