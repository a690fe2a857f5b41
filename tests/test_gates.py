"""What a refusal of `patch` must name. (test_supported_models.py asks dozens of architectures.)"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import RAGGED, new_model, parity, randomize, run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

import hf_cascade
from docs.tiny_configs import tiny_config
from hf_cascade import CascadeError, CascadeFallbackWarning, UnsupportedModelError, compat


def test_a_vision_language_model_shares_text_and_leaves_pictures_to_stock():
    """Its vision tower is not causal, which is nothing to the decoder."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8}
    config = LlavaConfig(
        text_config=LlamaConfig(**text, num_attention_heads=4, initializer_range=0.4),
        vision_config=CLIPVisionConfig(**vision, num_attention_heads=2, patch_size=4),
        image_token_index=63,
    )
    model = randomize(LlavaForConditionalGeneration(config).eval())
    parity(model, **RAGGED, do_sample=True, num_return_sequences=2)
    patched = hf_cascade.patch(model)
    pixels = torch.zeros(1, 3, 8, 8)
    rows = {"input_ids": torch.tensor([[5, 63, 63, 63, 63, 7]]), "pixel_values": pixels}
    with pytest.warns(CascadeFallbackWarning, match=r"pixel_values|mm_encoder_outputs"):
        run(patched, **rows)


# name: (changes of the config, what the refusal says)
REFUSED = {
    "t5": ({}, "encoder-decoder"),
    "bart": ({}, "encoder-decoder"),
    "mamba": ({}, "recurrent state"),
    "rwkv": ({}, "recurrent state"),
    "gpt_oss": ({}, "attention sinks"),
    "gemma2": ({}, "caps attention logits"),
    "vaultgemma": ({}, "caps attention logits"),
    "deepseek_v3": ({}, "latent attention"),
    "bloom": ({}, "AttentionInterface"),
    "mpt": ({}, "AttentionInterface"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "llama4_text": ({}, "chunked_attention"),
    "gemma3n_text": ({}, "share KV"),
    "lfm2": ({}, "layers of type conv"),
    "qwen3_next": ({}, "linear_attention"),
    "minimax": ({}, "linear_attention"),
    "bert": ({"is_decoder": False}, "causal"),
    "roberta": ({"is_decoder": False}, "causal"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_in_the_way(name):
    changes, reason = REFUSED[name]
    factory = AutoModelForSeq2SeqLM if name in ("t5", "bart") else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(tiny_config(name, **changes))
    original = type(model)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        hf_cascade.patch(model)
    assert original.__name__ in str(caught.value)
    assert type(model) is original
    assert not hasattr(model, "cascade")
    assert isinstance(caught.value, CascadeError)


def test_several_obstacles_are_all_named():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("mamba"))
    with pytest.raises(UnsupportedModelError, match=r"position_ids.*past_key_values.*recurrent"):
        hf_cascade.patch(model)


@pytest.mark.parametrize(
    "hook",
    ["_expand_inputs_for_generation", "create_masks_for_generate", "_sample", "_beam_search",
     "_prepare_cache_for_generation", "_prepare_position_ids_for_generation", "_prefill"],
)  # fmt: skip
def test_a_model_with_a_generation_hook_of_its_own_is_refused(hook):
    model = new_model()
    own = {hook: lambda self, *args, **kwargs: None}
    model.__class__ = type("OwnLlama", (type(model),), own)
    with pytest.raises(UnsupportedModelError, match=f"OwnLlama can't.*overrides {hook}"):
        hf_cascade.patch(model)


def test_attention_that_is_not_causal_is_refused_wherever_it_is_declared():
    for declare in (
        lambda model: setattr(model.config, "is_causal", False),
        lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
    ):
        model = new_model()
        declare(model)
        with pytest.raises(UnsupportedModelError, match="causal"):
            hf_cascade.patch(model)


def test_a_stage_of_a_pipeline_is_refused():
    """transformers replaces the layers of other processes by these."""
    model = new_model()
    model.model.layers[1] = PipelineIdentityLayer()
    with pytest.raises(UnsupportedModelError, match="pipeline parallelism"):
        hf_cascade.patch(model)


@pytest.mark.parametrize(
    ("wrap", "advice"),
    [
        (torch.compile, "OptimizedModule: patch the model that was compiled, with compile=True"),
        (lambda model: SimpleNamespace(model=model), r"SimpleNamespace: patch its `\.model`"),
    ],
)
def test_what_holds_a_model_is_told_which_one_to_patch(wrap, advice):
    with pytest.raises(UnsupportedModelError, match=advice):
        hf_cascade.patch(wrap(new_model()))


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), None, "gpt2", object()], ids=repr)
@pytest.mark.parametrize("function", [hf_cascade.patch, hf_cascade.unpatch])
def test_what_is_no_model_is_refused(what, function):
    with pytest.raises(UnsupportedModelError, match=f"needed, got {type(what).__name__}"):
        function(what)


def test_a_model_without_generate_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaModel"):
        hf_cascade.patch(LlamaModel(new_model().config))


def test_a_model_that_has_a_cascade_of_its_own_is_refused():
    model = new_model()
    model.cascade = "mine"
    with pytest.raises(UnsupportedModelError, match="attribute `cascade`"):
        hf_cascade.patch(model)
    assert model.cascade == "mine"


def test_decoders_that_look_like_encoders_are_served():
    config = tiny_config("bert", is_decoder=True)
    parity(randomize(AutoModelForCausalLM.from_config(config)), **RAGGED, do_sample=True)


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "5.24.0.dev0", "5.24.0", "6.0.0"])
def test_an_untested_version_of_transformers_is_a_clear_message(version, monkeypatch):
    monkeypatch.setattr(compat.transformers, "__version__", version)
    with pytest.raises(UnsupportedModelError, match=rf"tested with .* {version} is installed"):
        hf_cascade.patch(new_model())


# Attention of a kind that slips past the gates is refused where it happens


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sliding_window", 5), ("softcap", 30.0), ("s_aux", torch.zeros(4)),
     ("position_bias", torch.zeros(1))],
)  # fmt: skip
def test_what_the_attention_function_can_t_do_is_an_error(argument, value, monkeypatch):
    model = hf_cascade.patch(new_model())
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **kw: forward(self, *a, **kw | {argument: value})
    )
    for max_new_tokens in (1, 12):
        with pytest.raises(CascadeError, match=argument):
            run(model, **RAGGED, max_new_tokens=max_new_tokens)
        assert model.cascade.allocator.pages_in_use == 0


def test_a_window_that_is_outgrown_in_decoding_is_an_error(monkeypatch):
    model = hf_cascade.patch(new_model(), compile=True)
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward
    window = len(RAGGED["input_ids"][0]) + 3
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **kw: forward(self, *a, **kw, sliding_window=window)
    )
    run(model, **RAGGED, max_new_tokens=4)
    with pytest.raises(CascadeError, match=f"sliding_window={window} over {window + 1} tokens"):
        run(model, **RAGGED, max_new_tokens=5)
    assert model.cascade.allocator.pages_in_use == 0


def test_a_layer_that_bypasses_the_attention_function_is_an_error():
    model = hf_cascade.patch(new_model())
    # A config that the switch can't reach.
    model.model.layers[1].self_attn.config = SimpleNamespace(_attn_implementation="sdpa")
    with pytest.raises(UnsupportedModelError, match=r"layers \[1\]"):
        run(model, **RAGGED)
    assert model.config._attn_implementation == "sdpa"
