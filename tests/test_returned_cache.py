"""A returned `past_key_values` is the stock DynamicCache, for as long as anyone holds it.

Padded positions hold what stock computes for padding, which nobody reads: they are not compared.
"""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from models import PROMPT, RAGGED, ROWS, Run, assert_same, batch, new_model, parity, run, tokens
from torch import Tensor
from transformers import DynamicCache

import hf_cascade

CACHED = {"return_dict_in_generate": True}
LENGTH = RAGGED["input_ids"].shape[1]
MODES = {
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "greedy": {},
    "one token": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 1},
    "two tokens": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 2},
    "rows that end": {
        "do_sample": True,
        "num_return_sequences": 3,
        "eos_token_id": list(range(3, 30)),
        "max_new_tokens": 14,
    },
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams that end": {"num_beams": 3, "eos_token_id": list(range(3, 20))},
    "chunks": {"prefill_chunk_size": 3},
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def cache_of(model, **arguments) -> DynamicCache:
    return run(model, **RAGGED | CACHED | arguments).out.past_key_values


def present(num_rows: int, length: int) -> Tensor:
    """[rows, length]: which positions are not padding."""
    prompt = RAGGED["attention_mask"].repeat_interleave(num_rows // len(ROWS), 0).bool()
    return torch.cat([prompt, torch.ones(num_rows, length - LENGTH, dtype=torch.bool)], 1)


def assert_same_cache(stock: DynamicCache, returned: DynamicCache) -> None:
    assert isinstance(returned, DynamicCache)
    assert len(returned) == len(stock)
    assert returned.get_seq_length() == stock.get_seq_length()
    for expected, actual in zip(stock.layers, returned.layers, strict=True):
        for name in ("keys", "values"):
            one, other = getattr(expected, name), getattr(actual, name)
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            kept = present(one.shape[0], one.shape[2])
            one, other = (x.transpose(1, 2)[kept] for x in (one, other))
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def continued(model, first: Run, **arguments) -> Run:
    """Go on from a result that has a cache."""
    sequences, cache = first.sequences, first.out.past_key_values
    mask = present(*sequences.shape).long()
    return run(
        model, seed=1, input_ids=sequences, attention_mask=mask, past_key_values=cache, **arguments
    )


# What it is


@each_mode
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_it_equals_the_stock_cache(mode, page_size):
    stock, patched, _ = parity(new_model(), **RAGGED, **CACHED, **mode, page_size=page_size)
    assert_same_cache(stock.out.past_key_values, patched.out.past_key_values)


@pytest.mark.parametrize("name", ["gemma", "phi3", "mistral", "qwen3_moe"])
def test_other_architectures_return_it_too(name):
    stock, patched, _ = parity(new_model(name), **RAGGED, **CACHED, **MODES["sampling"])
    assert_same_cache(stock.out.past_key_values, patched.out.past_key_values)


def test_prompts_of_embeddings_return_it_too():
    model = new_model()
    arguments = {
        "inputs_embeds": model.get_input_embeddings()(RAGGED["input_ids"]).detach(),
        "attention_mask": RAGGED["attention_mask"],
    }
    stock, patched, _ = parity(model, **arguments, **CACHED, do_sample=True)
    assert_same_cache(stock.out.past_key_values, patched.out.past_key_values)


def test_a_call_that_falls_back_returns_stock_s_own():
    model = hf_cascade.patch(new_model())
    with pytest.warns(hf_cascade.CascadeFallbackWarning):
        returned = cache_of(model, logits_to_keep=0)
    assert type(returned) is DynamicCache
    assert_same_cache(cache_of(new_model()), returned)


def test_a_call_that_leaves_the_cascade_returns_the_cache_that_it_ended_with():
    """Phi-3 drops its cache where its long RoPE begins, and goes on with a new one."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": LENGTH + 3,
    }
    model = new_model("phi3", rope_parameters=rope, original_max_position_embeddings=LENGTH + 3)
    stock, patched, _ = parity(model, **batch(tokens(LENGTH)), **CACHED)
    expected, returned = stock.out.past_key_values, patched.out.past_key_values
    assert returned.get_seq_length() == expected.get_seq_length()
    for one, other in zip(expected.layers, returned.layers, strict=True):
        torch.testing.assert_close(other.keys, one.keys, atol=1e-5, rtol=1e-5)


# What it is good for


@each_mode
def test_stock_continues_from_it(mode):
    if "num_beams" in mode:
        mode = mode | {"num_return_sequences": 3}  # the cache has a row per beam
    stock, model = new_model(), hf_cascade.patch(new_model(), strict=True)
    expected, actual = (run(each, **RAGGED, **CACHED, **mode) for each in (stock, model))
    going_on = {"do_sample": True, "max_new_tokens": 6}
    assert_same(continued(stock, expected, **going_on), continued(new_model(), actual, **going_on))


def test_the_patched_model_continues_from_it_on_stock():
    stock, model = new_model(), hf_cascade.patch(new_model())
    expected, actual = (run(each, **RAGGED, **CACHED) for each in (stock, model))
    with pytest.warns(hf_cascade.CascadeFallbackWarning, match="past_key_values"):
        going_on = continued(model, actual, do_sample=True)
    assert_same(continued(stock, expected, do_sample=True), going_on)


def test_forward_passes_of_the_user_continue_from_it():
    stock, model = new_model(), hf_cascade.patch(new_model(), strict=True)
    expected, actual = (run(each, **RAGGED, **CACHED) for each in (stock, model))
    mask = present(*expected.sequences.shape).long()
    logits = [
        each(
            first.sequences[:, -1:],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=first.out.past_key_values,
        ).logits
        for each, first in ((stock, expected), (model, actual))
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def crop(cache):
    cache.crop(LENGTH - cache.get_seq_length())


def reorder(cache):
    cache.reorder_cache(torch.tensor([4, 1, 1, 0, 2]))


def repeat(cache):
    cache.batch_repeat_interleave(2)


def select(cache):
    cache.batch_select_indices(torch.tensor([3, 1]))


@pytest.mark.parametrize("change", [crop, reorder, repeat, select])
def test_it_can_be_changed_as_a_cache_can(change):
    caches = [cache_of(new_model()), cache_of(hf_cascade.patch(new_model(), strict=True))]
    for cache in caches:
        change(cache)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        kept = one.keys.ne(0)  # padding is not zero in stock's
        assert one.keys.shape == other.keys.shape
        assert ((one.keys - other.keys).abs()[kept & other.keys.ne(0)] < 1e-5).all()
        assert other.keys.ne(0).float().mean() > 0.5


# How long it lives


def test_it_survives_whatever_the_model_does_next():
    model = hf_cascade.patch(new_model(), page_size=2, strict=True)
    expected = cache_of(new_model(), **MODES["sampling"])
    held = [cache_of(model, **MODES["sampling"]) for _ in range(6)]
    assert_same_cache(expected, held[0])
    run(model, **batch(tokens(90)), do_sample=True, num_return_sequences=9)  # the pool grows
    assert_same_cache(expected, held[1])
    model.cascade.release()
    assert_same_cache(expected, held[2])
    run(model, **batch(tokens(90)), do_sample=True, num_return_sequences=9)
    assert_same_cache(expected, held[3])
    hf_cascade.unpatch(model)
    assert_same_cache(expected, held[4])
    del model
    gc.collect()
    assert_same_cache(expected, held[5])
    for cache in held:
        assert_same_cache(expected, cache)  # looking twice is the same


def test_it_survives_a_change_of_dtype():
    model = hf_cascade.patch(new_model(), strict=True)
    held = cache_of(model)
    run(model.to(torch.float64), **RAGGED)
    assert_same_cache(cache_of(new_model()), held)


def test_it_does_not_change_when_pages_are_written_again():
    """What was gathered is a copy: no view of pages that the next call writes."""
    model = hf_cascade.patch(new_model(), page_size=2, strict=True)
    held = cache_of(model)
    before = [layer.keys.clone() for layer in held.layers]
    run(model, **batch(tokens(60)), do_sample=True, num_return_sequences=9)
    for layer, keys in zip(held.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_its_pages_come_back_when_it_is_dropped():
    model = hf_cascade.patch(new_model(), page_size=1, strict=True)
    held = cache_of(model)
    in_use = model.cascade.allocator.pages_in_use
    assert in_use == 23 + 5 * 7  # the trie, and 7 tokens of 5 rows
    second = cache_of(model)
    assert model.cascade.allocator.pages_in_use == 2 * in_use
    del held
    gc.collect()
    run(model, **PROMPT, max_new_tokens=1)
    assert model.cascade.allocator.pages_in_use == in_use
    assert_same_cache(cache_of(new_model()), second)  # and whoever is left is unharmed
    run(model, **PROMPT, max_new_tokens=1)
    assert model.cascade.allocator.pages_in_use == 0, "gathered: the pages are not needed"


def test_a_result_that_nobody_looks_at_costs_pages_only():
    model = hf_cascade.patch(new_model(), page_size=1, strict=True)
    run(model, **RAGGED, **CACHED)
    gc.collect()
    run(model, **PROMPT, max_new_tokens=1)
    assert model.cascade.allocator.pages_in_use == 0


def test_copies_of_it_are_whole_and_apart():
    model = hf_cascade.patch(new_model(), strict=True)
    expected = cache_of(new_model())
    for make in (copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))):
        original = cache_of(model)
        twin = make(original)
        if make is copy.deepcopy:
            original.layers[0].keys.zero_()
        assert_same_cache(expected, twin)
        del original, twin
        gc.collect()
        run(model, **PROMPT, max_new_tokens=1)
        assert model.cascade.allocator.pages_in_use == 0
    assert_same(run(new_model(), **RAGGED), run(model, **RAGGED))


def test_under_autocast_it_is_of_use_too():
    with torch.autocast("cpu", torch.bfloat16):
        first = run(hf_cascade.patch(new_model(), strict=True), **RAGGED, **CACHED)
        more = continued(new_model(), first, do_sample=True)
    assert more.sequences.shape[1] == first.sequences.shape[1] + 8


def test_a_pickle_of_it_has_its_own_rows_and_nothing_else():
    """Never the page pool, which holds what other calls stored."""
    model = hf_cascade.patch(new_model())
    run(model, **batch(*(tokens(300, seed=i) for i in range(4))))
    returned = run(model, **batch(tokens(5)), return_dict_in_generate=True).out
    cache = returned.past_key_values
    pickled = pickle.dumps(cache)
    assert len(pickled) < 20_000
    assert model.cascade.allocator.pages_in_use > 0
    assert pickle.loads(pickled).get_seq_length() == cache.get_seq_length()


def test_shallow_copies_of_it_do_not_grow():
    model = hf_cascade.patch(new_model())
    returned = run(model, **batch(tokens(5)), return_dict_in_generate=True).out
    cache = returned.past_key_values
    length = cache.get_seq_length()
    shallow = copy.copy(cache)
    assert [layer.keys.shape[2] for layer in shallow.layers] == [length] * len(shallow.layers)
    assert [layer.keys.shape[2] for layer in cache.layers] == [length] * len(cache.layers)


def test_what_fails_to_be_gathered_is_still_there(monkeypatch):
    """Out of memory, say: the caller frees some and asks again."""
    arguments = RAGGED | CACHED
    returned = run(hf_cascade.patch(new_model()), **arguments).out.past_key_values
    update, calls = DynamicCache.update, []

    def fail_in_the_second_layer(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return update(self, *args, **kwargs)

    with monkeypatch.context() as patching:
        patching.setattr(DynamicCache, "update", fail_in_the_second_layer)
        with pytest.raises(torch.OutOfMemoryError):
            returned.get_seq_length()
    assert_same_cache(run(new_model(), **arguments).out.past_key_values, returned)
