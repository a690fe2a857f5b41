"""Every page comes back, storage is what the stats say, and decoding never expands the prefix."""

from __future__ import annotations

import gc

import pytest
import torch
from models import (
    DOCUMENT,
    PROMPT,
    RAGGED,
    ROWS,
    assert_same,
    batch,
    new_model,
    run,
    tokens,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList

import hf_cascade
from hf_cascade import CascadeError, OutOfPagesError

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 3}
CALLS = {
    "sampling": SAMPLED,
    "greedy": RAGGED,
    "beams": RAGGED | {"num_beams": 4},
    "beam sampling": RAGGED | {"num_beams": 4, "do_sample": True, "num_return_sequences": 2},
    "one token": SAMPLED | {"max_new_tokens": 1},
    "rows that end": SAMPLED | {"eos_token_id": list(range(3, 35)), "max_new_tokens": 12},
    "all rows end at once": SAMPLED | {"eos_token_id": list(range(64))},
    "beams that end": RAGGED | {"num_beams": 4, "eos_token_id": list(range(3, 20))},
    "chunks": SAMPLED | {"prefill_chunk_size": 3},
    "scores": SAMPLED | {"return_dict_in_generate": True, "output_scores": True},
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def storages(model) -> list[StorageWeakRef]:
    return [
        StorageWeakRef(pool.untyped_storage())
        for pools in model.cascade.pool.layers()
        for pool in pools
    ]


def storage_bytes(model) -> int:
    pools = [pool for pools in model.cascade.pool.layers() for pool in pools]
    return sum(pool.untyped_storage().nbytes() for pool in pools)


# Pages come back


@each_call
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_all_pages_are_returned_after_each_call(call, page_size):
    model = hf_cascade.patch(new_model(), page_size=page_size, strict=True)
    sizes = set()
    for seed in range(3):
        run(model, seed=seed, **call)
        run(model, seed=seed, **PROMPT, max_new_tokens=1)  # collects what a result still held
        assert model.cascade.allocator.pages_in_use == 0
        sizes.add(storage_bytes(model))
    if "eos_token_id" not in call:  # always the same number of tokens
        assert len(sizes) == 1, "the pool grows from call to call"


def test_pages_come_back_when_a_call_falls_back_or_fails():
    model = hf_cascade.patch(new_model())
    with pytest.warns(hf_cascade.CascadeFallbackWarning):
        run(model, **SAMPLED, use_cache=False)
    with pytest.raises(ValueError, match="not used by the model"):
        run(model, **SAMPLED, no_such_argument=1)
    assert model.cascade.allocator.num_pages == 0
    assert model.cascade.pool.layers() == []


def test_a_call_sees_nothing_of_the_pages_that_it_inherits():
    """Whatever earlier calls left in the pool, NaN for instance, stays unseen."""
    model = hf_cascade.patch(new_model(), page_size=4, strict=True)
    for call in (SAMPLED, RAGGED | {"num_beams": 4}):
        for _ in range(2):
            assert_same(run(new_model(), **call), run(model, **call))
            for pools in model.cascade.pool.layers():
                for pool in pools:
                    pool.fill_(torch.nan)


def test_a_call_sees_nothing_of_fresh_pages_either(monkeypatch):
    """In deterministic mode torch fills what it does not initialize with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for call in (SAMPLED, RAGGED | {"num_beams": 4}):
            for page_size in (1, 16):
                model = hf_cascade.patch(new_model(), page_size=page_size, strict=True)
                assert_same(run(new_model(), **call), run(model, **call))
    finally:
        torch.use_deterministic_algorithms(False)


# release


def test_release_frees_storage_and_the_next_call_allocates_anew():
    model = hf_cascade.patch(new_model(), strict=True)
    expected = run(model, **SAMPLED)
    held = storages(model)
    assert len(held) == 4
    assert storage_bytes(model) > 0
    model.cascade.release()
    gc.collect()
    assert all(storage.expired() for storage in held)
    assert model.cascade.pool.layers() == []
    model.cascade.release()  # harmless to repeat
    assert_same(expected, run(model, **SAMPLED))


def test_unpatch_frees_storage():
    model = hf_cascade.patch(new_model())
    run(model, **SAMPLED)
    held = storages(model)
    hf_cascade.unpatch(model)
    gc.collect()
    assert all(storage.expired() for storage in held)


def test_release_inside_generate_is_refused():
    model = hf_cascade.patch(new_model(), strict=True)

    def releasing(ids, scores):
        model.cascade.release()
        return scores

    with pytest.raises(RuntimeError, match="during generate"):
        run(model, **SAMPLED, logits_processor=LogitsProcessorList([releasing]))
    assert model.cascade.allocator.pages_in_use == 0
    model.cascade.release()


# max_pages


def pages_needed(page_size: int, **arguments) -> int:
    model = hf_cascade.patch(new_model(), page_size=page_size, strict=True)
    run(model, **arguments)
    return model.cascade.allocator.peak_pages_in_use


@each_call
@pytest.mark.parametrize("page_size", [1, 4])
def test_max_pages_is_exactly_what_a_call_needs(call, page_size):
    needed = pages_needed(page_size, **call)
    model = hf_cascade.patch(new_model(), page_size=page_size, max_pages=needed, strict=True)
    assert_same(run(new_model(), **call), run(model, **call))
    hf_cascade.patch(model, page_size=page_size, max_pages=needed - 1, strict=True)
    with pytest.raises(OutOfPagesError) as caught:
        run(model, **call)
    error = caught.value
    assert error.needed > error.available >= 0
    assert error.max_pages == needed - 1
    assert model.cascade.allocator.pages_in_use == 0
    assert_same(run(new_model(), **batch([5])), run(model, **batch([5])))  # still of use


def test_a_prompt_that_does_not_fit_is_refused_before_a_page_is_written():
    model = hf_cascade.patch(new_model(), page_size=4, max_pages=6, strict=True)
    with pytest.raises(OutOfPagesError, match="7 pages are needed, 6 of max_pages=6") as caught:
        run(model, **SAMPLED)  # 11, 3, 5 and 4 tokens of the tree's nodes: 3 + 1 + 2 + 1 pages
    assert isinstance(caught.value, CascadeError)
    assert model.cascade.pool.layers() == []
    assert model.cascade.allocator.pages_in_use == 0


def test_a_step_that_does_not_fit_is_refused_with_its_numbers():
    """11 tokens are 3 pages; then each of 8 rows takes a page at steps 1, 5, 9, .."""
    model = hf_cascade.patch(new_model(), page_size=4, max_pages=21, strict=True)
    arguments = PROMPT | {"do_sample": True, "num_return_sequences": 8, "max_new_tokens": 20}
    with pytest.raises(
        OutOfPagesError,
        match="8 pages are needed, 2 of max_pages=21 are available; raise max_pages",
    ):
        run(model, **arguments)
    assert model.cascade.allocator.pages_in_use == 0
    run(model, **arguments | {"max_new_tokens": 9})
    assert model.cascade.allocator.peak_pages_in_use == 3 + 8 * 2
    with pytest.raises(OutOfPagesError):
        run(model, **arguments | {"max_new_tokens": 10})


def test_pages_held_by_a_returned_cache_are_not_available_until_it_is_dropped():
    model = hf_cascade.patch(new_model(), page_size=1, max_pages=25, strict=True)
    held = run(model, **PROMPT, return_dict_in_generate=True)  # 11 + 7 tokens
    with pytest.raises(OutOfPagesError, match="11 pages are needed, 7 of max_pages=25"):
        run(model, **PROMPT)
    del held
    gc.collect()
    assert_same(run(new_model(), **PROMPT), run(model, **PROMPT))


# Temporaries


def peak_decode_temporaries(model, **arguments) -> int:
    """Most bytes allocated at once during decode steps, beyond what was there before them."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    first, last = 3, 6
    steps = iter(range(100))

    def watch(ids, scores):
        step = next(steps)
        if step == first:
            profiler.start()
        elif step == last:
            profiler.stop()
        return scores

    run(model, **arguments, logits_processor=LogitsProcessorList([watch]))
    live = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


# Heads so wide that a token's KV, 4 KB, outweighs what generate itself keeps for each row.
WIDE = {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_decoding_never_expands_the_prefix(name):
    """64 samples of a prompt need less than its KV beside it; stock needs many times that."""
    arguments = batch(tokens(600)) | {"do_sample": True, "num_return_sequences": 64}
    model = hf_cascade.patch(new_model(name, **WIDE), strict=True)
    run(model, **arguments)  # the pool has its size now
    kv_bytes = model.cascade.stats.kv_bytes
    assert peak_decode_temporaries(model, **arguments) < kv_bytes
    hf_cascade.unpatch(model)
    assert peak_decode_temporaries(model, **arguments) > 8 * kv_bytes


def test_decoding_a_deep_tree_never_expands_it_either():
    sections = [tokens(300) + tokens(100, seed=s) for s in range(4)]
    rows = [section + tokens(4, seed=s) for s, section in enumerate(sections * 4)]
    arguments = batch(*rows) | {"do_sample": True, "num_return_sequences": 4}
    model = hf_cascade.patch(new_model(**WIDE), strict=True)
    run(model, **arguments)
    assert peak_decode_temporaries(model, **arguments) < model.cascade.stats.kv_bytes


def test_the_pool_never_exceeds_twice_what_was_in_use():
    model = hf_cascade.patch(new_model(), page_size=1, strict=True)
    for prompt, n in ((DOCUMENT, 1), (tokens(100), 3), (ROWS[1], 9), (tokens(33), 20)):
        run(model, **batch(prompt), do_sample=True, num_return_sequences=n)
        assert storage_bytes(model) <= 2 * model.cascade.allocator.num_pages * (
            model.cascade.pool.page_bytes()
        )


def test_max_pages_bounds_storage_too():
    needed = pages_needed(4, **SAMPLED)
    model = hf_cascade.patch(new_model(), page_size=4, max_pages=needed, strict=True)
    run(model, **SAMPLED)
    assert storage_bytes(model) <= needed * model.cascade.pool.page_bytes()
