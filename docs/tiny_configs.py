"""A tiny configuration of any architecture: every kind of layer it has by default, in little."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB_SIZE = 64
PAD, BOS = 0, 1

# A config, and each config nested in it, takes those that it knows.
SMALL: dict[str, Any] = {
    "is_decoder": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCAB_SIZE),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 256),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim"], 32),
    "hidden_size_global": 32,
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_hidden_size"], 48),
    **dict.fromkeys(["ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"], 48),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_head", "n_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "kv_n_heads"], 2),
    **dict.fromkeys(["head_dim", "kv_channels", "d_kv", "dim_head", "rotary_dim"], 8),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(["moe_intermediate_size", "shared_intermediate_size"], 16),
    **dict.fromkeys(["shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16),
    "hidden_size_per_layer_input": 8,
    # Latent attention
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim"], 8),
    "qk_rope_head_dim": 8,
    # Recurrent and linear attention; chunks
    **dict.fromkeys(["ssm_state_size", "mamba_d_state", "state_size"], 8),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size", "attention_chunk_size"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_heads"], 4),
    "linear_num_key_heads": 2,
}
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers",
              "decoder_layers", "encoder_layers")  # fmt: skip
DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12)
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
WINDOWS = ("sliding_window", "keep_window_size", "local_attention", "window_size")

_TINY_GEMMA4 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
}
# What the above can't know, by model_type.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma4_assistant": {"text_config": _TINY_GEMMA4},
    "gemma4_unified_assistant": {"text_config": _TINY_GEMMA4},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xlstm": {"hidden_size": 128},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str, *, window: int | None = None, **changes: Any) -> PreTrainedConfig:
    """The config of an architecture, shrunk.

    Args:
        name: a model_type of transformers.
        window: a width for the sliding windows that the architecture can have; None leaves them
            as they are by default, where they are wider than the texts of a test.
        changes: values in place of those chosen here.
    """
    return _shrunk(CONFIG_MAPPING[name], window, changes)


def _shrunk(
    cls: type[PreTrainedConfig], window: int | None, changes: dict[str, Any]
) -> PreTrainedConfig:
    chosen = SPECIAL.get(cls.model_type, {}) | changes
    # What is nested may have to be given for the config to be made at all.
    default = cls(**{key: value for key, value in chosen.items() if isinstance(value, dict)})
    known = default.to_dict()
    values = {key: value for key, value in SMALL.items() if key in known}
    if "kv_lora_rank" in known:  # latent attention has as many heads of K as of q
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    if window is not None:
        values |= {key: window for key in WINDOWS if key in known}
        values |= {"use_sliding_window": True} if "use_sliding_window" in known else {}
    for key in cls.sub_configs:
        nested = getattr(default, key, None)
        if isinstance(nested, PreTrainedConfig):
            values[key] = _shrunk(type(nested), window, {})
    values |= chosen
    if "layer_types" in chosen:
        values["num_hidden_layers"] = len(chosen["layer_types"])
    depth_keys = [key for key in DEPTH_KEYS if key in known and key not in values]
    for depth in DEPTHS if depth_keys else (0,):
        config = cls(**values | dict.fromkeys(depth_keys, depth))
        if _kinds_of_layers(config) >= _kinds_of_layers(default):
            break
    return config


def _kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    return {kind for key in KINDS_OF_LAYERS for kind in getattr(config, key, None) or ()}
