import pytest
import torch

from neoproto.weights import pinning
from neoproto.weights.pinning import Pins


class Cudart:
    """Notes what is registered; `code` is what registering answers."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.calls = code, {}, 0

    def cudaHostRegister(self, pointer, nbytes, flags):  # noqa: N802 - its name in CUDA
        self.calls += 1
        self.registered[pointer] = nbytes
        return self.code

    def cudaHostUnregister(self, pointer):  # noqa: N802 - its name in CUDA
        del self.registered[pointer]


@pytest.fixture
def cudart(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(pinning, "_runtime", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return cudart


def test_without_an_accelerator_nothing_is_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pinning, "_runtime", lambda: pytest.fail("asked"))
    Pins().pin(torch.empty(8, dtype=torch.uint8))


def test_a_slot_is_registered_once_and_let_go(cudart):
    pins, buffers = Pins(most=2), [torch.empty(8, dtype=torch.uint8) for _ in range(3)]
    for _ in range(3):
        pins.pin(buffers[0])
        pins.pin(buffers[1])
    assert cudart.calls == 2
    pins.pin(buffers[2])
    assert cudart.registered == {buffer.data_ptr(): 8 for buffer in buffers[1:]}
    pins.close()
    assert cudart.registered == {}


def test_memory_that_cannot_be_registered_is_used_as_it_is(cudart, caplog):
    cudart.code = 304
    pins = Pins()
    for _ in range(3):
        pins.pin(torch.empty(8, dtype=torch.uint8))
    assert cudart.calls == 1
    assert "cudaHostRegister failed with code 304" in caplog.text
