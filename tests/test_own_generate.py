"""Classes with a `generate`, processors or criteria of their own, and `generate` by other ways."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from models import PROMPT, RAGGED, assert_same, new_model, parity, run
from transformers import LlamaForCausalLM, LogitsProcessorList

import hf_cascade

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 2}


class Twice(LlamaForCausalLM):
    """It generates twice: the second time from other random numbers."""

    def generate(self, *args, **kwargs):
        super().generate(*args, **kwargs)
        return super().generate(*args, **kwargs)


class Continuing(LlamaForCausalLM):
    """It goes on from the cache that it got, first with a forward pass, then with generate."""

    def generate(self, input_ids, attention_mask, **kwargs):
        first = super().generate(
            input_ids, attention_mask=attention_mask, return_dict_in_generate=True, **kwargs
        )
        ids, cache = first.sequences, first.past_key_values
        mask = attention_mask.repeat_interleave(len(ids) // len(input_ids), 0)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        said = self(
            ids[:, -1:],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
        )
        ids = torch.cat([ids, said.logits[:, -1:].argmax(-1)], 1)
        return super().generate(
            ids,
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            past_key_values=cache,
            **kwargs | {"num_return_sequences": 1},
        )


class StockFirst(LlamaForCausalLM):
    """Its first run is one for stock, its second one is not."""

    def generate(self, *args, **kwargs):
        super().generate(*args, **kwargs, use_cache=False)
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize(
    ("model_class", "paths"),
    [
        (Twice, ("cascade", None)),
        (Continuing, ("stock", "past_key_values were passed in")),
        (StockFirst, ("cascade", None)),
    ],
)
@pytest.mark.parametrize("ends", [None, list(range(3, 30))], ids=["no end", "ends"])
@pytest.mark.filterwarnings("ignore::hf_cascade.CascadeFallbackWarning")
def test_a_generate_that_runs_stock_s_several_times(model_class, paths, ends):
    stock = new_model()
    stock.__class__ = model_class
    model = hf_cascade.patch(copy.deepcopy(stock), page_size=2)
    arguments = SAMPLED | {"eos_token_id": ends}
    for _ in range(2):
        assert_same(run(stock, **arguments), run(model, **arguments))
        assert (model.cascade.stats.path, model.cascade.stats.reason) == paths
        assert model.cascade.stats.prompt_tokens > 0
        gc.collect()
        model.cascade._drain()
        assert model.cascade.allocator.pages_in_use == 0
    assert model.config._attn_implementation == "sdpa"


class MixingRows(LlamaForCausalLM):
    """Its own processor sees all rows, those that are over too."""

    def _get_logits_processor(self, *args, **kwargs):
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(lambda ids, scores: scores + 0.5 * scores.roll(1, 0))
        return processors


class StoppingItself(LlamaForCausalLM):
    """It ends rows in a way of its own."""

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        criteria.append(lambda ids, scores, **_: ids[:, -1] < 20)
        return criteria


@pytest.mark.parametrize("model_class", [MixingRows, StoppingItself])
def test_a_class_with_processors_or_criteria_of_its_own(model_class):
    model = new_model()
    model.__class__ = model_class
    stock, _, _ = parity(model, **SAMPLED, eos_token_id=list(range(20, 30)), max_new_tokens=14)
    assert not torch.equal(
        stock.sequences,
        run(new_model(), **SAMPLED, eos_token_id=list(range(20, 30)), max_new_tokens=14).sequences,
    )


def test_a_run_inside_of_a_run_that_comes_past_the_patch_is_stock_s():
    def generating(model):
        def add_what_it_says(ids, scores):
            with torch.random.fork_rng():
                more = LlamaForCausalLM.generate(
                    model, **PROMPT, max_new_tokens=3, pad_token_id=0, eos_token_id=list(range(40))
                )
            return scores + 0.1 * more.sum() * scores.roll(1, 1)

        return {"logits_processor": LogitsProcessorList([add_what_it_says])}

    for mode in ({"do_sample": True}, {"num_beams": 3}):
        _, _, model = parity(new_model(), **RAGGED, **mode, with_model=generating)
        assert model.cascade.stats.decode_steps == 7
        assert model.cascade.stats.prompt_tokens > 5 * PROMPT["input_ids"].shape[1]
        assert model.cascade.allocator.pages_in_use == 0


def test_generate_without_its_no_grad_has_gradients_as_in_stock():
    model = hf_cascade.patch(new_model())
    arguments = SAMPLED | {"return_dict_in_generate": True, "output_scores": True}
    for each in (new_model(), model):
        out = each.generate.__wrapped__(each, **arguments, max_new_tokens=2, pad_token_id=0)
        assert out.scores[-1].requires_grad
    assert model.generate.__wrapped__ is new_model().generate.__wrapped__


def test_a_bound_generate_outlives_the_patch():
    model = hf_cascade.patch(new_model(), strict=True)
    bound = model.generate
    expected = bound(**PROMPT, max_new_tokens=4, do_sample=False)
    model.generate = lambda **kwargs: bound(**kwargs, top_k=5)
    hf_cascade.patch(model, strict=True, page_size=2)
    assert torch.equal(bound(**PROMPT, max_new_tokens=4, do_sample=False), expected)
    assert model.cascade.stats.path == "cascade"
    hf_cascade.unpatch(model)
    assert torch.equal(bound(**PROMPT, max_new_tokens=4, do_sample=False), expected)
