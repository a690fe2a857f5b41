"""Quantized weights, from `from_pretrained(quantization_config=...)`: the tokens of stock on them.

`make test` runs bitsandbytes with everything else and torchao apart (see the Makefile). Where
activations are rounded too, as in LLM.int8, a difference in the last bit of one may become a step,
and tokens need not be the same; logits are as exact as stock's.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models import RAGGED, assert_same, new_model, run
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    TorchAoConfig,
)

import hf_cascade

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 3}
BEAMS = RAGGED | {"num_beams": 3, "num_return_sequences": 2}


def needs(library: str, name: str):
    reason = f"{library} is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(find_spec(library) is None, reason=reason))


def quantization_config(name: str):
    if name == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if name == "bitsandbytes int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


@pytest.fixture(
    params=[
        needs("torchao", "torchao int8"),
        needs("bitsandbytes", "bitsandbytes nf4"),
    ]
)
def quantized(request, tmp_path) -> PreTrainedModel:
    """Weights are quantized, activations aren't."""
    return load_quantized(request.param, tmp_path)


def whole() -> PreTrainedModel:
    return new_model(hidden_size=64, intermediate_size=64)


def load_quantized(name: str, folder: Path) -> PreTrainedModel:
    whole().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=quantization_config(name),
        dtype=torch.float32,
        device_map="cpu",
    ).eval()


@pytest.mark.parametrize("call", [SAMPLED, BEAMS], ids=["samples", "beams"])
def test_quantized_weights(quantized, call):
    plain = run(whole(), **call)
    expected = run(quantized, **call)
    assert not torch.equal(plain.sequences, expected.sequences), "nothing is quantized"
    hf_cascade.patch(quantized, strict=True)
    assert_same(expected, run(quantized, **call))
    assert quantized.cascade.stats.prefill_tokens < quantized.cascade.stats.prompt_tokens
    k_pool, v_pool = quantized.cascade.pool.layers()[0]
    assert k_pool.dtype == v_pool.dtype == torch.float32
    assert_same(expected, run(copy.deepcopy(quantized), **call))


def test_lora_on_quantized_weights(quantized):
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    base = run(quantized, **SAMPLED)
    torch.manual_seed(0)
    model = get_peft_model(quantized, config).eval()
    expected = run(model, **SAMPLED)
    assert not torch.equal(base.sequences, expected.sequences), "the adapter does nothing"
    hf_cascade.patch(model, strict=True)
    assert_same(expected, run(model, **SAMPLED))
    with model.disable_adapter():
        assert_same(base, run(model, **SAMPLED))


@pytest.mark.parametrize("name", [needs("bitsandbytes", "bitsandbytes int8")])
def test_activations_that_are_rounded(name, tmp_path):
    quantized = load_quantized(name, tmp_path)
    truth, stock = logits(whole()), logits(quantized)
    hf_cascade.patch(quantized, strict=True)
    patched = logits(quantized)
    assert quantized.cascade.stats.path == "cascade"
    assert 0 < (patched - truth).abs().max() <= 2 * (stock - truth).abs().max()


def logits(model: PreTrainedModel) -> Tensor:
    """[steps, rows, vocab_size] of a greedy call that may say one thing only."""
    out = run(
        model, **RAGGED, do_sample=False, max_new_tokens=3, return_dict_in_generate=True,
        output_logits=True, prefix_allowed_tokens_fn=lambda row, ids: [7],
    ).out  # fmt: skip
    return torch.stack(out.logits)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_quantizes_a_patched_model_in_place():
    """Also one whose layers lie in larger matrices."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    stock, patched = whole(), whole()
    hf_cascade.patch(patched, strict=True, compile=True, pack_linears=True)
    run(patched, **SAMPLED)
    for model in (stock, patched):
        quantize_(model, Int8WeightOnlyConfig())
    torch._dynamo.reset()
    assert_same(run(stock, **SAMPLED), run(patched, **SAMPLED))
