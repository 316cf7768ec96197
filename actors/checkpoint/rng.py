"""The state of a process's random generators, as JSON: torch's (CPU, one GPU), Python's, NumPy's."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Any]:
    """What `set_rng_state` takes; JSON carries it without loss.

    Args:
        device: where this process computes; a GPU has a generator of its own.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "python": [version, list(internal), gauss_next],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue where `rng_state` was taken. A GPU's generator is left alone if it was taken without one."""
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def seed_all(*of: object) -> None:
    """Seed every generator from the text of `of`."""
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(seed)  # GPUs' too
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
