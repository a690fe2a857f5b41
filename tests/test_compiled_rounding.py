"""In half precision a compiled step on the CPU rounds where the model's own code does."""

from __future__ import annotations

import copy

import pytest
import torch
from models import new_model
from packaging.version import Version
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

import hf_cascade

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 13),
    reason="before torch 2.13 Inductor's code for the CPU leaves these roundings out",
)

NEW_TOKENS = 12


def logits(model: PreTrainedModel, **options) -> Tensor:
    torch.manual_seed(0)
    input_ids = torch.randint(3, 61, (1, 20))
    out = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, top_k=0,
        num_return_sequences=4, max_new_tokens=NEW_TOKENS, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    assert len(out.logits) == NEW_TOKENS
    return torch.stack(out.logits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float16), ("qwen3", torch.bfloat16)],
    ids=str,
)
def test_logits_have_the_bits_of_steps_that_are_not_compiled(name, dtype):
    eager, compiled = (
        hf_cascade.patch(new_model(name).to(dtype), strict=True, compile=compile)
        for compile in (False, True)
    )
    expected, found = logits(eager), logits(compiled)
    assert compiled.cascade.stats.fused_layers == len(compiled.model.layers)
    assert torch.equal(found, expected)


def test_who_asks_for_unrounded_intermediate_values_gets_them():
    stock = new_model("llama").to(torch.bfloat16)
    models = [hf_cascade.patch(copy.deepcopy(stock), compile=compile) for compile in (False, True)]
    config = CompileConfig(mode=None, options={"emulate_precision_casts": False})
    expected, found = logits(models[0]), logits(models[1], compile_config=config)
    assert not torch.equal(found[1], expected[1])  # the first is of prefill
