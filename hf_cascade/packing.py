"""Linear layers that read the same input become one product in compiled steps.

Their weights move into one matrix, and each layer's weight becomes a view of it. State dicts, PEFT
and eager code see the same layers as before; but `torch.save` of one weight writes the whole
matrix, as it does for any view. In compiled code each layer computes the whole product and takes
its columns, and `fuse.FusePass` keeps one of the equal products.
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
        if pack is None or not _owns_weight(self) or not torch.compiler.is_compiling():
            # Not super(): a hook may hold this bound method after the class was changed back to
            # Linear.
            return Linear.forward(self, x)
        matrix, start = pack
        out = linear(x, matrix)[..., start : start + self.out_features]
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if not _is_in_place(self):  # moved: free the old matrix
            vars(self).pop(_PACK, None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _PACK}


def pack_linears(model: Any) -> None:
    """Pack the layers that can be packed, and repack those whose weights were moved or replaced."""
    for module in model.modules():
        # This covers layers that `_groups` no longer finds: wrapped, or with a wrapped sibling.
        if _PACK in vars(module) and not _is_in_place(module):
            vars(module).pop(_PACK, None)
    for layers in _groups(model):
        packs = [vars(layer).get(_PACK) for layer in layers]
        if None in packs or len({id(pack[0]) for pack in packs if pack}) > 1:
            _pack(layers)


def _pack(layers: Sequence[Linear]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) enables gradients
        matrix = torch.cat([layer.weight for layer in layers])
        start = 0
        for layer in layers:
            layer.weight.data = matrix[start : start + layer.out_features]
            layer.__class__ = PackedLinear
            vars(layer)[_PACK] = (matrix, start)
            start += layer.out_features


def _is_in_place(layer: Any) -> bool:
    """Whether the layer's weight still lies in its pack's matrix."""
    pack = vars(layer).get(_PACK)
    if pack is None or not isinstance(layer, PackedLinear) or not _owns_weight(layer):
        return False
    matrix, start = pack
    weight = layer.weight
    return (
        _is_ordinary(weight)
        and weight.dtype == matrix.dtype
        and weight.data_ptr() == matrix[start].data_ptr()
    )


def _owns_weight(layer: Linear) -> bool:
    """Whether its weight is a parameter, not computed by a parametrization or by pruning."""
    return "weight" in layer._parameters


def _is_ordinary(weight: Tensor) -> bool:
    """Whether it can become part of a matrix: not quantized, not sharded, not offloaded."""
    return type(weight.data) is Tensor and not weight.is_meta


def unpack_linears(model: Any) -> None:
    """Make packed layers plain Linear again; their weights stay views of the matrix."""
    for module in model.modules():
        vars(module).pop(_PACK, None)
        if type(module) is PackedLinear:
            module.__class__ = Linear  # type: ignore[assignment]
        elif isinstance(module, PackedLinear):
            _unpack_class(type(module))


def _unpack_class(cls: type) -> None:
    """Replace PackedLinear by Linear among the bases of a derived class.

    Parametrizations derive such classes. The class object itself must stay: its author reads its
    bases to undo the change.
    """
    for base in cls.__bases__:
        if base is not PackedLinear and issubclass(base, PackedLinear):
            _unpack_class(base)
    if PackedLinear in cls.__bases__:
        cls.__bases__ = tuple(Linear if base is PackedLinear else base for base in cls.__bases__)


def _groups(model: Any) -> Iterator[list[Linear]]:
    for module in model.modules():
        for names in _SIBLINGS:
            layers = [module._modules.get(name) for name in names]
            plain = [layer for layer in layers if type(layer) in (Linear, PackedLinear)]
            if len(plain) < len(names) or len({_kind(layer) for layer in plain}) > 1:
                continue
            if all(_owns_weight(layer) and _is_ordinary(layer.weight) for layer in plain):
                yield plain


def _kind(layer: Any) -> tuple:
    """Layers of one kind fit into one matrix."""
    weight = layer.weight
    return layer.in_features, weight.dtype, weight.device, type(weight)
