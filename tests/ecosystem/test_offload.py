"""accelerate's `device_map`: layers that lie on disk between their uses, as `from_pretrained` does.

Weights kept in CPU memory, and hooks set before and after `patch`: tests/test_fallback.py.
"""

from __future__ import annotations

import warnings

import pytest
from models import RAGGED, assert_same, new_model, run
from transformers import AutoModelForCausalLM

import hf_cascade

CALLS = {
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"do_sample": True, "prefill_chunk_size": 4},
}
DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_model_split_between_memory_and_disk(call, tmp_path):
    whole = new_model(num_hidden_layers=4)
    whole.save_pretrained(tmp_path / "model")
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=DEVICE_MAP, offload_folder=tmp_path / "offload"
    )
    assert {parameter.device.type for parameter in split.parameters()} == {"cpu", "meta"}
    expected = run(whole, **RAGGED, **call)
    hf_cascade.patch(split, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also of a device that the inputs should be on
        assert_same(expected, run(split, **RAGGED, **call))
    assert split.cascade.stats.prefill_tokens < split.cascade.stats.prompt_tokens
    assert {k_pool.device.type for k_pool, _ in split.cascade.pool.layers()} == {"cpu"}
