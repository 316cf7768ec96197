"""What weights of a Hugging Face model consist of, without reading any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from neoproto.weights import TensorLayout, check_layout, dtype_name


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLayout:
    """What weights of a model consist of.

    Attributes:
        tensors: layout by name.
        tied: names that share their bytes with an earlier one; weights may carry them or leave them out.
    """

    tensors: Mapping[str, TensorLayout]
    tied: frozenset[str]

    def check(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Refuse weights of another layout, tied names aside.

        Raises:
            WeightMismatch: names, shapes or dtypes differ.
        """
        check_layout(
            {name: form for name, form in layout.items() if name not in self.tied},
            {name: form for name, form in self.tensors.items() if name not in self.tied},
            what=what,
        )


def model_layout(model: str | Path, dtype: torch.dtype) -> ModelLayout:
    """Names, shapes and dtypes of the Hugging Face model of this folder, floating-point ones as `dtype`.

    No weights are read.
    """
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model, local_files_only=True), dtype=dtype
        )
    built.tie_weights()
    return layout_of_model(built, dtype)


def layout_of_model(model: torch.nn.Module, dtype: torch.dtype) -> ModelLayout:
    """The same of a model that is there already."""
    tensors: dict[str, TensorLayout] = {}
    tied: set[str] = set()
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        tensors[name] = TensorLayout(dtype=dtype_name(own_dtype), shape=tuple(parameter.shape))
        if id(parameter) in seen:
            tied.add(name)
        seen.add(id(parameter))
    return ModelLayout(tensors=tensors, tied=frozenset(tied))
