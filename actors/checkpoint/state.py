"""What a checkpoint holds of a model in training: which tensors, under which names, and copies of them.

Names are `model.PARAMETER` and `optimizer.state.PARAMETER.{step,exp_avg,exp_avg_sq}`, PARAMETER being the
fully qualified name, the same on any number of ranks. A tied weight has the first of its names only.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actors.training.torch_model import named_weights
from neoproto.weights.pinning import Pins
from neoproto.weights.sharding import local_box, local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors of a parameter's shape; `step` is a scalar of its own."""
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What this rank holds of one tensor.

    Attributes:
        local: the values, of any device; of shape `shape` from `start` on in the whole, and perhaps empty.
        start: where it begins in the whole.
        whole: the whole tensor's shape.
    """

    local: Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]


def part_of(name: str, tensor: Tensor) -> Part:
    """The part of a plain tensor or DTensor that is here, without a copy.

    Raises:
        ValueError: it is sharded in a way that is no rectangular part.
    """
    box = local_box(tensor)
    if box is None:
        raise ValueError(f"{name} is sharded as {tensor.placements}, which checkpoints cannot hold")  # type: ignore[attr-defined]
    return Part(local=local_tensor(tensor).detach(), start=box.start, whole=tuple(tensor.shape))


OptimizerState = Mapping[Tensor, Mapping[str, Tensor]]


def training_parts(model: nn.Module, state: OptimizerState) -> dict[str, Part]:
    """Weights, persistent buffers and optimizer, as this rank holds them, by their names; no copies.

    A parameter without optimizer state has not been stepped yet. (torch's `get_optimizer_state_dict` would
    step an optimizer that has none to get some, and so change the bias correction of every later step.)

    Raises:
        ValueError: see `part_of`.
    """
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_weights(model).items():
        distinct.setdefault(id(tensor), (f"model.{name}", tensor))
    tensors = dict(distinct.values())
    for name, parameter in model.named_parameters():
        tensors |= {_state_name(name, key): value for key, value in state.get(parameter, {}).items()}
    return {name: part_of(name, tensor) for name, tensor in tensors.items()}


def blank_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Container[str]
) -> dict[Tensor, dict[str, Tensor]]:
    """State to read a checkpoint into, of the parameters for which it has any, in the form AdamW makes.

    Args:
        stored: the names in the checkpoint.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    blank: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        wanted = [_state_name(name, key) for key in ("step", *MOMENTS)]
        if id(parameter) in trained and any(one in stored for one in wanted):
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            blank[parameter] = {"step": step, **moments}
    return blank


def _state_name(parameter: str, key: str) -> str:
    return f"optimizer.state.{parameter}.{key}"


class HostCopies:
    """Copies of tensors in host memory that is kept and filled again by the next save.

    New memory costs a page fault every 4 KiB, several times what copying does; it is paid once. It is pinned
    where there is an accelerator.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pins = Pins(most=1)
        self._layout: Sequence[tuple[object, ...]] = ()
        self._copies: dict[str, Part] = {}

    def room_for(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Parts of the same kind for `fill`, in the memory of what was returned before."""
        layout = [
            (name, part.local.dtype, part.local.shape, part.start, part.whole) for name, part in parts.items()
        ]
        if layout != self._layout:
            self._layout, self._copies = (), {}  # views of the memory, which may have to go
            self._copies = self._make_room(parts)
            self._layout = layout
        return self._copies

    def _make_room(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        needed = sum(_room(part.local) for part in parts.values())
        if needed > self._memory.numel():
            self._pins.close()
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(needed, dtype=torch.uint8)
            self._pins.pin(self._memory)
        copies: dict[str, Part] = {}
        for (name, part), memory in zip(parts.items(), self._cut(parts), strict=True):
            local = memory.view(part.local.dtype).view(part.local.shape)
            copies[name] = Part(local=local, start=part.start, whole=part.whole)
        return copies

    @staticmethod
    @torch.no_grad()
    def fill(copies: Mapping[str, Part], parts: Mapping[str, Part]) -> None:
        """Copy the values of `parts`; on any thread. Complete when this returns."""
        for name, part in parts.items():
            copies[name].local.copy_(part.local, non_blocking=True)
        if any(part.local.is_cuda for part in parts.values()):
            torch.cuda.synchronize()

    def _cut(self, parts: Mapping[str, Part]) -> Iterator[Tensor]:
        begin = 0
        for part in parts.values():
            yield self._memory[begin : begin + part.local.nbytes]
            begin += _room(part.local)


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
