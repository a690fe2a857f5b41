"""The attention function that transformers calls in every layer, and its mask function.

Both are registered once, under the name `ATTENTION_NAME`, and serve only what belongs to a
cascade call: the attention function a K that the call's own cache has just recorded, the mask
function mask sizes that only such a cache gives. Everything else that reaches them (another model
with the same config, a forward pass of user code inside `generate`) goes to the attention
implementation that the model had before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import CASCADE_KV_OFFSET, CascadeCache
from .errors import UnsupportedModelError

# transformers looks for "flash", "sdpa" and "flex" inside the name.
ATTENTION_NAME = "hf_cascade"


def cascade_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    hf_cascade: CascadeCache | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, in the form in which transformers asks for it.

    Args:
        module: the attention module.
        query: [batch, num_q_heads, q_len, head_dim], after RoPE.
        key, value: [batch, num_kv_heads, q_len, head_dim], what the cache's `update` returned.
        attention_mask: None in a cascade call.
        scaling: factor on q k^T; None is 1 / sqrt(head_dim).
        hf_cascade: the cache of the call, which `generate` passes along with the model's inputs.
    Returns:
        (out, None): [batch, q_len, num_q_heads, head_dim].
    """
    if hf_cascade is None or not hf_cascade.has_recorded(key, value):
        return _delegate(module)(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    _refuse_variants(hf_cascade, attention_mask, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return hf_cascade.attend(query, scaling), None


def cascade_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *args,
    config=None,
    **kwargs,
) -> Tensor | None:
    """No mask where a cascade cache gave the sizes; elsewhere the mask of the delegate."""
    if kv_offset == CASCADE_KV_OFFSET:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[_implementation_before(config)](
        batch_size, q_length, kv_length, q_offset, kv_offset, *args, config=config, **kwargs
    )


@dataclass
class _Switch:
    """A config whose attention is switched now, and what it goes back to."""

    config: PreTrainedConfig  # kept alive: its id is the key
    before: str | None
    users: int = 0


# By id of the config. A name that knew what it stands for would do without the table, but the
# compiler traces plain strings only.
_switches: dict[int, _Switch] = {}
_switch_lock = threading.Lock()


@contextmanager
def attention_switched(model: Any) -> Iterator[None]:
    """Within this context the model's attention goes through hf_cascade.

    Configs may be shared by several models, and generate may run inside generate: each config
    goes back to its own implementation when its last user leaves.
    """
    configs, switched = _configs(model), []
    try:
        with _switch_lock:
            for config in configs:
                before = _Switch(config, config._attn_implementation)
                switch = _switches.setdefault(id(config), before)
                switched.append(config)
                switch.users += 1
                config._attn_implementation_internal = ATTENTION_NAME
        yield
    finally:
        with _switch_lock:
            for config in switched:
                switch = _switches[id(config)]
                switch.users -= 1
                if not switch.users:
                    del _switches[id(config)]
                    config._attn_implementation_internal = switch.before


def foreign_attention(model: Any) -> str | None:
    """The model's attention or mask function that is not of transformers, by name; None if all are.

    What someone else's function computes is not known, so ours can't take its place.
    """
    names = {_implementation_before(config) for config in _configs(model)}
    for name in sorted(names):
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            if name in functions and not _is_of(functions[name], "transformers"):
                return name
    if "eager" in names:
        for modeling_file in {type(module).__module__ for module in model.modules()}:
            eager = getattr(sys.modules.get(modeling_file), "eager_attention_forward", None)
            if eager is not None and not _is_of(eager, "transformers", modeling_file):
                return "eager"
    return None


def _is_of(function: Any, *packages: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    module = f"{getattr(function, '__module__', '')}."
    return any(module.startswith(f"{package}.") for package in packages)


def switched_configs(model: Any) -> list[tuple[PreTrainedConfig, str | None]]:
    """The model's configs that are switched now, with what each goes back to.

    A copy of the model is not generating: `switch_back` sets its configs right.
    """
    with _switch_lock:
        switches = [_switches.get(id(config)) for config in _configs(model)]
    return [(switch.config, switch.before) for switch in switches if switch is not None]


def switch_back(configs: Iterable[tuple[PreTrainedConfig, str | None]]) -> None:
    """Undo the switch in copies of what `switched_configs` returned."""
    for config, before in configs:
        config._attn_implementation_internal = before


def _configs(model: Any) -> list[PreTrainedConfig]:
    found = (vars(module).get("config") for module in model.modules())
    return list(
        {id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values()
    )


def _implementation_before(config: Any) -> str:
    implementation = getattr(config, "_attn_implementation", None)
    if implementation == ATTENTION_NAME:
        # Without an entry it is the copy of a config, made while its model was generating.
        switch = _switches.get(id(config))
        implementation = "sdpa" if switch is None else switch.before
    return implementation or "eager"


def _delegate(module: torch.nn.Module):
    name = _implementation_before(getattr(module, "config", None))
    # Each modeling file defines its own eager attention.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager or ALL_ATTENTION_FUNCTIONS["sdpa"])


def _refuse_variants(
    cache: CascadeCache,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_,
) -> None:
    """The last line of defence: what the gates should have kept away is never silently wrong."""
    # Prefill, which nothing compiles, asks of every layer. Compiled steps would guard on a length.
    if sliding_window is not None and not torch.compiler.is_compiling():
        cache.limit_paths(sliding_window)
    variants = {
        "a mask of its own": attention_mask,
        "softcap": softcap,
        "s_aux": s_aux,
        "position_bias": position_bias,
    }
    for name, value in variants.items():
        if value is not None:
            raise UnsupportedModelError(f"attention with {name} is not served yet")


AttentionInterface.register(ATTENTION_NAME, cascade_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, cascade_mask)
