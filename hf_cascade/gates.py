"""What can't be served: models that `patch` refuses, calls that fall back to stock `generate`.

Both answer with reasons a user can act on. Packed prefill runs the tokens of all nodes as one row
with explicit positions and no mask, so whatever makes a token's hidden state depend on more than
its own path (or on its place in the batch) is an obstacle.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

# Overriding one of these means that inputs, masks or positions are made in a way of the model's
# own, which a packed row doesn't have.
_HOOKS_OF_ITS_OWN = (
    "_expand_inputs_for_generation",
    "create_masks_for_generate",
    "_prepare_cache_for_generation",
    "_prepare_position_ids_for_generation",
    "_prefill",
    "_sample",
    "_beam_search",
)
_LAYER_TYPES = {"full_attention", "attention", "sliding_attention"}
_GENERATION_MODES = {"greedy_search", "sample", "beam_search", "beam_sample"}
_CALL_KWARGS = {
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
}
# What no attribute tells, by model_type.
_KNOWN_OBSTACLES = {
    "diffllama": "its attention is a difference of two",
    "jetmoe": "it repeats KV heads before attention",
    "moshi": "its layers pass no **kwargs on to attention",
    "nemotron": "its layers pass no **kwargs on to attention",
}
# Experts are drawn at random in training mode, whatever the config says.
_NOISY_ROUTERS = {"phimoe"}
# RoPE frequencies that depend on the longest position of a forward pass.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def model_obstacles(model: Any, stock_generate: type) -> list[str]:
    """Why `patch` must refuse this model; empty if it need not.

    Args:
        model: a transformers model.
        stock_generate: transformers' GenerationMixin, to tell overridden hooks.
    """
    config = model.config.get_text_config(decoder=True)
    architecture = type(model)
    obstacles = [
        f"it overrides {hook}"
        for hook in _HOOKS_OF_ITS_OWN
        if getattr(architecture, hook, None) is not getattr(stock_generate, hook, None)
    ]
    if not (architecture._supports_attention_backend and model._can_set_attn_implementation()):
        obstacles.append("its attention does not go through transformers' AttentionInterface")
    parameters = inspect.signature(architecture.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        obstacles.append("its forward takes no **kwargs to reach the attention layers by")
    for name in ("position_ids", "past_key_values"):
        if name not in parameters:
            obstacles.append(f"its forward takes no {name}")
    if getattr(architecture, "_is_stateful", False):
        obstacles.append("it keeps a recurrent state")
    return obstacles + _config_obstacles(config) + _module_obstacles(model.get_decoder())


def _module_obstacles(model: torch.nn.Module) -> list[str]:
    modules = list(model.modules())
    found = {
        "its attention is not causal": any(getattr(m, "is_causal", True) is False for m in modules),
        "it has attention sinks": any(getattr(m, "sinks", None) is not None for m in modules),
        "its attention makes masks of its own": any(
            hasattr(m, "prepare_dynamic_mask") for m in modules
        ),
        "its layers are spread over processes (pipeline parallelism)": any(
            type(m).__name__ == "PipelineIdentityLayer" for m in modules
        ),
    }
    return [reason for reason, is_so in found.items() if is_so]


def _config_obstacles(config: Any) -> list[str]:
    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    other_layers = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    found = {
        "it is an encoder-decoder": has("is_encoder_decoder"),
        f"it has layers of type {', '.join(sorted(other_layers))}": bool(other_layers),
        "its layers share KV": has("num_kv_shared_layers"),
        "it has multi-head latent attention": has("kv_lora_rank"),
        "it has ALiBi positions": has("alibi"),
        "its config says that attention is not causal": getattr(config, "is_causal", True) is False
        or has("use_bidirectional_attention"),
        "it makes positions inside attention": has("no_rope_layers")
        and has("attn_temperature_tuning"),
        "it caps attention logits": has("attn_logit_softcapping"),
    }
    known = _KNOWN_OBSTACLES.get(getattr(config, "model_type", ""))
    return [reason for reason, is_so in found.items() if is_so] + ([known] if known else [])


def call_obstacle(
    model: Any,
    architecture: type,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: str,
    prompt_shape: tuple[int, int] | None,
) -> str | None:
    """Why one `generate` call must fall back to stock; None if it need not.

    Args:
        model: the patched model.
        architecture: its class without the patch.
        generation_config: the call's, with max_length set.
        model_kwargs: the model's inputs, expanded to rows, before a cache is prepared.
        generation_mode: the value of transformers' GenerationMode.
        prompt_shape: rows and columns of the prompt batch; None where ids and embeddings differ.
    """
    return (
        _mode_obstacle(generation_config, generation_mode)
        or _kwargs_obstacle(model_kwargs)
        or _config_call_obstacle(model, generation_config, model_kwargs)
        or _inputs_hook_obstacle(model, architecture)
        or _model_state_obstacle(model)
        or _mask_obstacle(model_kwargs, prompt_shape)
    )


def _mode_obstacle(generation_config: Any, generation_mode: str) -> str | None:
    if generation_mode not in _GENERATION_MODES:
        return f"generation mode {generation_mode}"
    if not generation_config.use_cache:
        return f"use_cache={generation_config.use_cache}"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={generation_config.cache_implementation!r}"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name):
            return f"{name}=True"
    if generation_config.is_assistant:
        return "the model assists another one"
    return None


def _kwargs_obstacle(model_kwargs: dict[str, Any]) -> str | None:
    if model_kwargs.get("past_key_values") is not None:
        return "past_key_values were passed in"
    for key, value in model_kwargs.items():
        # A vision-language model without a picture has an empty dict of encoder outputs.
        is_absent = value is None or (isinstance(value, dict) and not value)
        if key not in _CALL_KWARGS and not is_absent:
            return f"the argument {key}"
    logits_to_keep = model_kwargs.get("logits_to_keep", 1)
    if isinstance(logits_to_keep, Tensor) or logits_to_keep != 1:
        return f"logits_to_keep={logits_to_keep!r}"
    return None


def _config_call_obstacle(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any]
) -> str | None:
    config = model.config.get_text_config(decoder=True)
    embeds = model_kwargs.get("inputs_embeds")
    final_length = generation_config.max_length + (0 if embeds is None else embeds.shape[1])
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if window is not None and slides and window < final_length:
        return f"a sliding window of {window} tokens, shorter than max_length={final_length}"
    if generation_config.prefill_chunk_size is not None and _rope_types(config) & (
        _LENGTH_DEPENDENT_ROPE
    ):
        return "prefill_chunk_size with RoPE frequencies that depend on the length"
    return None


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}


def _inputs_hook_obstacle(model: Any, architecture: type) -> str | None:
    """A packed prefill makes its inputs without this hook, whose others' versions may change them.

    Those of transformers are known: they add arguments for pictures, or for other caches.
    """
    hook = "prepare_inputs_for_generation"
    if hook in vars(model):
        return f"{hook} is overridden on the instance (prompt learning?)"
    if not getattr(architecture, hook).__module__.startswith("transformers."):
        return f"{hook} is overridden outside of transformers"
    return None


def _model_state_obstacle(model: Any) -> str | None:
    if any(map(_is_compiled, model.modules())):
        return "the model or a part of it was compiled"
    in_training = [module for module in model.modules() if module.training]
    if in_training:
        config = model.config.get_text_config(decoder=True)
        if (reason := _training_obstacle(config, in_training)) is not None:
            return reason
    if _has_row_adapters(model):
        return "PEFT adapters that differ between rows or tokens"
    return None


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether it was compiled by itself, or its forward was."""
    forward = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _training_obstacle(config: Any, in_training: Sequence[torch.nn.Module]) -> str | None:
    """What is different in training mode, of which these modules are."""
    if any(getattr(module, "gradient_checkpointing", False) for module in in_training):
        return "gradient checkpointing in training mode, which drops the cache"
    if (
        getattr(config, "attention_dropout", 0.0)
        or any(isinstance(module, _DropoutNd) and module.p for module in in_training)
        or _has_rate(in_training, "drop")  # of functional dropout, or of dropped layers
    ):
        return "dropout in training mode; call model.eval()"
    if (
        getattr(config, "router_jitter_noise", 0.0)
        or _has_rate(in_training, "jitter")
        or getattr(config, "model_type", "") in _NOISY_ROUTERS
    ):
        return "noise in the router in training mode; call model.eval()"
    return None


def _has_rate(modules: Sequence[torch.nn.Module], word: str) -> bool:
    """Whether one of these modules has a number above 0 by a name with this word in it."""
    return any(
        word in name and type(value) in (float, int) and value > 0
        for module in modules
        for name, value in vars(module).items()
    )


def _has_row_adapters(model: torch.nn.Module) -> bool:
    """Whether PEFT has put hooks on layers that expect the rows of the batch as they were.

    It tells layers by them which adapter or which task a row has, or where in it one begins.
    """
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    modules = {getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks}
    return any(module.startswith("peft.") for module in modules)


def _mask_obstacle(
    model_kwargs: dict[str, Any], prompt_shape: tuple[int, int] | None
) -> str | None:
    if prompt_shape is None:
        return "input_ids and inputs_embeds of different lengths"
    if not prompt_shape[0]:
        return "a batch without rows"
    mask = model_kwargs.get("attention_mask")
    position_ids = model_kwargs.get("position_ids")
    if mask is None:
        return _position_obstacle(position_ids, None, prompt_shape)
    if mask.ndim != 2:
        return f"an attention_mask of {mask.ndim} dimensions"
    if tuple(mask.shape) != prompt_shape:
        return f"an attention_mask of shape {tuple(mask.shape)} for prompts of {prompt_shape}"
    present = mask != 0
    if bool((present & (mask != 1)).any()):
        return "an attention_mask with values other than 0 and 1"
    if not bool(present[:, -1].all()):
        return "an attention_mask that hides the last token of a row (right padding?)"
    if bool((present[:, 1:] < present[:, :-1]).any()):
        return "an attention_mask with holes"
    return _position_obstacle(position_ids, present, prompt_shape)


def _position_obstacle(
    position_ids: Tensor | None, present: Tensor | None, prompt_shape: tuple[int, int]
) -> str | None:
    if position_ids is None:  # as where something that hides its parameters wraps model.forward
        is_padded = present is not None and not bool(present.all())
        return "padded prompts without position_ids" if is_padded else None
    if position_ids.ndim != 2:
        return f"position_ids of {position_ids.ndim} dimensions"
    if position_ids.shape[1] != prompt_shape[1] or position_ids.shape[0] not in (
        1,
        prompt_shape[0],
    ):  # made of a mask of ones that did not fit
        return f"position_ids of shape {tuple(position_ids.shape)} for prompts of {prompt_shape}"
    expected = torch.arange(position_ids.shape[1], device=position_ids.device)
    if present is None:
        differs = position_ids != expected
    else:
        padding = (~present).sum(1, keepdim=True).to(position_ids.device)
        differs = (position_ids != expected - padding) & (expected >= padding)
    return "custom position_ids" if bool(differs.any()) else None
