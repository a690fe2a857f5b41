"""Linear layers that read the same input become one product in compiled steps.

Their weights move into one matrix, of which each layer's own weight is a view: state dicts, PEFT
and everything that runs eagerly see the layers they knew. Compiled, each layer asks for the whole
product and takes its columns; `fuse.FusePass` keeps one of the equal products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

# Names of layers that read the same input, by transformers' convention.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PACK = "_hf_cascade_pack"


class PackedLinear(Linear):
    """A linear layer whose weight is some rows of a larger matrix."""

    def forward(self, x: Tensor) -> Tensor:
        pack = vars(self).get(_PACK)
        if pack is None or not torch.compiler.is_compiling():
            return super().forward(x)
        matrix, start = pack
        out = linear(x, matrix)[..., start : start + self.out_features]
        return out if self.bias is None else out + self.bias

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _PACK}


def pack_linears(model: Any) -> None:
    """Pack what can be packed, and anew what no longer is (weights that were moved or replaced)."""
    for layers in _groups(model):
        if not _is_packed(layers):
            with torch.no_grad(), torch.inference_mode(False):
                matrix = torch.cat([layer.weight for layer in layers])
                start = 0
                for layer in layers:
                    layer.weight.data = matrix[start : start + layer.out_features]
                    layer.__class__ = PackedLinear
                    vars(layer)[_PACK] = (matrix, start)
                    start += layer.out_features


def unpack_linears(model: Any) -> None:
    """Make them plain linear layers again; their weights stay where they are."""
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop(_PACK, None)
            module.__class__ = Linear  # type: ignore[assignment]


def _groups(model: Any) -> Iterator[list[Linear]]:
    for module in model.modules():
        for names in _SIBLINGS:
            layers = [module._modules.get(name) for name in names]
            plain = [layer for layer in layers if type(layer) in (Linear, PackedLinear)]
            if len(plain) == len(names) and len({_kind(layer) for layer in plain}) == 1:
                yield plain


def _kind(layer: Any) -> tuple:
    """Layers of one kind fit into one matrix."""
    weight = layer.weight
    return layer.in_features, weight.dtype, weight.device, weight.is_contiguous(), type(weight)


def _is_packed(layers: Sequence[Linear]) -> bool:
    """Whether the layers' weights are where their matrix is."""
    packs = [pack for layer in layers if (pack := vars(layer).get(_PACK)) is not None]
    if len(packs) < len(layers) or len({id(matrix) for matrix, _ in packs}) > 1:
        return False
    return all(
        layer.weight.dtype == matrix.dtype and layer.weight.data_ptr() == matrix[start].data_ptr()
        for layer, (matrix, start) in zip(layers, packs, strict=True)
    )
