"""What rows have in common is computed once and stored once, however they come to share it.

The truth about a batch is its trie: the number of distinct beginnings of its rows. Tokens are
counted where they enter the first layer, pages where they are stored.
"""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    DOCUMENT,
    PAD,
    PROMPT,
    RAGGED,
    ROWS,
    assert_same,
    batch,
    forwarded_tokens,
    new_model,
    randomize,
    run,
    tokens,
    trie_size,
)
from peft import LoraConfig, get_peft_model

import hf_cascade

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 8
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V in float32


def patched(name: str = "llama", *, page_size: int = 4, **config):
    return hf_cascade.patch(new_model(name, **config), page_size=page_size, strict=True)


# Computed once


@pytest.mark.parametrize("n", [1, 2, 16])
@pytest.mark.parametrize("how", ["num_return_sequences", "num_beams", "identical rows"])
def test_a_prompt_is_forwarded_once_and_not_once_per_sample(how, n):
    model = patched()
    counts = forwarded_tokens(model)
    if how == "identical rows":
        run(model, **batch(*[DOCUMENT] * n), do_sample=True)
    else:
        run(model, **PROMPT, do_sample=how == "num_return_sequences", **{how: n})
    assert counts == [len(DOCUMENT)] + [n] * 7
    stats = model.cascade.stats
    assert stats.prompt_tokens == n * len(DOCUMENT)
    assert stats.prefill_tokens == len(DOCUMENT)
    assert stats.decode_steps == 7


def test_stock_forwards_it_once_per_sample():
    model = new_model()
    counts = forwarded_tokens(model)
    run(model, **PROMPT, do_sample=True, num_return_sequences=16)
    assert counts[0] == 16 * len(DOCUMENT)


def test_identical_rows_are_one_node():
    model = patched()
    run(model, **batch(*[DOCUMENT] * 6), do_sample=True)
    assert model.cascade.describe() == (
        "KV tree: 7 nodes, 53 tokens, 6 sequences, 15 pages in use\n"
        "└─ level 0: 11 tokens, 6 sequences, 3 pages\n"
        "   └─ level 1: 7 tokens, 1 sequence, 2 pages  x 6"
    )


def test_a_document_its_sections_and_their_questions_are_a_tree_of_three_levels():
    sections = [DOCUMENT + tokens(7, seed=10 + i) for i in range(3)]
    rows = [section + tokens(2 + i, seed=20 + i) for i, section in enumerate(sections * 2)]
    rows += [rows[0], sections[0], DOCUMENT]
    model = patched()
    counts = forwarded_tokens(model)
    run(model, **batch(*rows), num_return_sequences=2, do_sample=True)
    assert counts[0] == trie_size(rows) == 11 + 3 * 7 + sum(range(2, 8))
    stats = model.cascade.stats
    assert (stats.prefill_tokens, stats.prompt_tokens) == (counts[0], 2 * sum(map(len, rows)))
    levels = {line.split("level ")[1][0] for line in model.cascade.describe().splitlines()[1:]}
    assert levels == set("0123")  # a question asked twice has two leaves below it


def test_a_loner_does_not_turn_sharing_off_for_two_groups():
    other, loner = tokens(9, seed=5), tokens(6, seed=6)
    rows = [[*DOCUMENT, 7, 8], [*other, 9], loner, [*DOCUMENT, 8], [*other, 10, 11, 12]]
    model = patched()
    counts = forwarded_tokens(model)
    run(model, **batch(*rows), do_sample=True)
    stats = model.cascade.stats
    assert counts[0] == stats.prefill_tokens == (11 + 2 + 1) + (9 + 1 + 3) + 6
    roots = [line for line in model.cascade.describe().splitlines() if "level 0" in line]
    assert sorted(line.split(":")[1].split(", ")[:2] for line in roots) == [
        [" 11 tokens", "2 sequences"],
        [" 13 tokens", "1 sequence"],  # 6 of the prompt, 7 of its own
        [" 9 tokens", "2 sequences"],
    ]


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=6))
def test_any_batch_is_computed_once_per_token_of_its_trie(rows):
    model = patched()
    counts = forwarded_tokens(model)
    run(model, **batch(*rows), max_new_tokens=1)
    assert sum(counts) == model.cascade.stats.prefill_tokens == trie_size(rows)


def test_embeddings_are_shared_where_they_are_equal_to_the_bit():
    model = patched()
    counts = forwarded_tokens(model)
    embeddings = model.get_input_embeddings()(PROMPT["input_ids"]).detach().repeat(3, 1, 1)
    embeddings[1, 6] += 1e-6
    run(model, inputs_embeds=embeddings, do_sample=True)
    assert counts[0] == len(DOCUMENT) + len(DOCUMENT) - 6
    assert model.cascade.stats.prompt_tokens == 3 * len(DOCUMENT)


# Stored once


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_kv_bytes_are_the_shared_once_plus_the_suffixes(page_size, n):
    model = patched(page_size=page_size)
    prompt, new_tokens = tokens(37), 10
    run(model, **batch(prompt), do_sample=True, num_return_sequences=n, max_new_tokens=new_tokens)
    stored = new_tokens - 1  # the last token is sampled and not fed back

    def pages(length: int) -> int:
        return -(-length // page_size)

    num_pages = pages(37 + stored) if n == 1 else pages(37) + n * pages(stored)
    stats = model.cascade.stats
    assert stats.kv_bytes == num_pages * page_size * TOKEN_BYTES
    assert stats.kv_bytes_unshared == n * (37 + stored) * TOKEN_BYTES
    assert stats.kv_bytes <= storage_bytes(model) <= 2 * stats.kv_bytes


def storage_bytes(model) -> int:
    pools = [pool for pools in model.cascade.pool.layers() for pool in pools]
    return sum({pool.data_ptr(): pool.untyped_storage().nbytes() for pool in pools}.values())


def test_beams_share_the_prompt_in_storage_too():
    model = patched()
    run(model, **batch(tokens(40)), num_beams=8)
    stats = model.cascade.stats
    assert stats.kv_bytes <= (40 + 8 * 12) * TOKEN_BYTES
    assert stats.kv_bytes_unshared == 8 * 47 * TOKEN_BYTES


def test_rows_that_are_over_give_their_pages_back():
    ends = list(range(3, 40))
    arguments = PROMPT | {"do_sample": True, "num_return_sequences": 12, "max_new_tokens": 24}
    endless, ending = patched(page_size=1), patched(page_size=1)
    run(endless, **arguments)
    sequences = run(ending, **arguments, eos_token_id=ends).sequences
    new = sequences[:, len(DOCUMENT) :]
    lengths = 1 + torch.isin(new, torch.tensor(ends)).int().argmax(1)
    steps = ending.cascade.stats.decode_steps
    assert steps == int(lengths.max()) - 1 > lengths.min() - 1 == 0
    # A row is fed its tokens but the one that ends it; at each step only live rows grow.
    peak = max(
        len(DOCUMENT) + sum(step for length in lengths.tolist() if length > step)
        for step in range(steps + 1)
    )
    assert ending.cascade.stats.kv_bytes == peak * TOKEN_BYTES < endless.cascade.stats.kv_bytes
    fed = len(DOCUMENT) * 12 + int((lengths - 1).sum())
    assert ending.cascade.stats.kv_bytes_unshared == fed * TOKEN_BYTES


# Shared and yet apart


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("t", [0, 1, 5, 9, 10])
def test_changing_a_token_changes_nothing_before_it(t, chunk):
    """An attention function without a mask function would make the prefill bidirectional."""
    model = patched(page_size=2)
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda module, args, out: hidden.append(out[0]))

    def prefilled(prompt: list[int]) -> torch.Tensor:
        hidden.clear()
        run(model, **batch(prompt), num_return_sequences=2, do_sample=True, max_new_tokens=1,
            prefill_chunk_size=chunk)  # fmt: skip
        return torch.cat(hidden)

    before = prefilled(DOCUMENT)
    after = prefilled([*DOCUMENT[:t], DOCUMENT[t] ^ 1, *DOCUMENT[t + 1 :]])
    assert before.shape == (len(DOCUMENT), 32)
    assert torch.equal(before[:t], after[:t])
    assert (before[t:] != after[t:]).any(1).all()


def test_rows_do_not_see_each_other():
    """Changing one row's own tokens changes no bit of any other row's logits."""
    model = patched()
    arguments = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 1}
    rows = [[*DOCUMENT, 9, 12], [*DOCUMENT, 20, 21], [*DOCUMENT, 30], tokens(6, seed=6)]
    before = run(model, **batch(*rows), **arguments).out.logits[0]
    rows[1][-2:] = [22, 23]
    after = run(model, **batch(*rows), **arguments).out.logits[0]
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3_moe"])
def test_a_padded_ragged_batch_is_its_prompts_run_alone(name):
    model, stock = patched(name), new_model(name)
    together = run(model, **RAGGED, do_sample=False).sequences[:, RAGGED["input_ids"].shape[1] :]
    for row, continued in zip(ROWS, together, strict=True):
        for each in (model, stock):
            alone = run(each, **batch(row), do_sample=False).sequences[0, len(row) :]
            assert torch.equal(continued, alone)


# Nothing is stale


def change_by_a_training_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = PROMPT["input_ids"]
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def change_by_loading(model):
    model.load_state_dict(new_model(seed=1).state_dict())


def change_in_place(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(-1.0)


def change_dtype(model):
    model.to(torch.float64)


def change_vocabulary(model):
    model.resize_token_embeddings(80)
    randomize(model, seed=2)


@pytest.mark.parametrize(
    "change",
    [change_by_a_training_step, change_by_loading, change_in_place, change_dtype,
     change_vocabulary],
)  # fmt: skip
def test_a_changed_model_gives_fresh_results(change):
    model, stock = patched(), new_model()
    sampled = RAGGED | {"do_sample": True, "num_return_sequences": 2}
    first = run(model, **sampled)
    for each in (model, stock):
        change(each)
    second = run(model, **sampled)
    assert_same(run(stock, **sampled), second)
    assert not torch.equal(first.sequences, second.sequences) or change is change_dtype
    assert model.cascade.stats.prefill_tokens == trie_size(ROWS), "nothing stale is reused"


def test_adapters_that_are_switched_or_merged_give_fresh_results():
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    stock = get_peft_model(new_model(), lora)
    stock.add_adapter("other", lora)
    model = copy.deepcopy(stock)
    hf_cascade.patch(model, strict=True)
    seen = []
    for change in (
        lambda peft: peft.eval(),
        lambda peft: peft.set_adapter("other"),
        lambda peft: peft.base_model.disable_adapter_layers(),
        lambda peft: peft.base_model.enable_adapter_layers(),
        lambda peft: peft.merge_adapter(["default"]),
        lambda peft: peft.unmerge_adapter(),
    ):
        for each in (stock, model):
            change(each)
        arguments = RAGGED | {"do_sample": False}
        seen.append(run(model, **arguments))
        assert_same(run(stock, **arguments), seen[-1])
    default, other, without, _, merged, _ = (each.sequences.tolist() for each in seen)
    assert default == merged
    assert default != other != without != default


# Stats are a value


def test_torch_s_default_device_does_not_matter():
    model, stock = patched(), run(new_model(), **RAGGED, do_sample=False)
    with torch.device("meta"):  # the caller's, and not the model's
        out = model.generate(**RAGGED, max_new_tokens=8, pad_token_id=PAD, do_sample=False)
    assert torch.equal(out, stock.sequences)


def test_stats_are_frozen_and_describe_the_last_call_only():
    model = patched()
    assert model.cascade.stats is None
    run(model, **PROMPT, do_sample=True, num_return_sequences=4)
    first = model.cascade.stats
    with pytest.raises(FrozenInstanceError):
        first.prefill_tokens = 0
    run(model, **RAGGED)
    assert first.prefill_tokens == 11
    assert model.cascade.stats.prefill_tokens == trie_size(ROWS)
    assert (first.path, first.reason) == ("cascade", None)
    assert first.backend.startswith("torch/cpu")


def test_the_tree_as_text_after_sampling():
    model = patched()
    assert "no generate call" in model.cascade.describe()
    run(model, **RAGGED, do_sample=True, num_return_sequences=2, max_new_tokens=4)
    assert model.cascade.describe().splitlines() == [
        "KV tree: 14 nodes, 53 tokens, 10 sequences, 17 pages in use",
        "├─ level 0: 11 tokens, 8 sequences, 3 pages",
        "│  ├─ level 1: 3 tokens, 4 sequences, 1 page",
        "│  │  └─ level 2: 3 tokens, 1 sequence, 1 page  x 4",
        "│  ├─ level 1: 5 tokens, 2 sequences, 2 pages",
        "│  │  └─ level 2: 3 tokens, 1 sequence, 1 page  x 2",
        "│  └─ level 1: 3 tokens, 1 sequence, 1 page  x 2",
        "└─ level 0: 4 tokens, 2 sequences, 1 page",
        "   └─ level 1: 3 tokens, 1 sequence, 1 page  x 2",
    ]


def test_the_tree_as_text_shows_the_rows_that_ended_last():
    model = patched()
    ends = list(range(3, 40))
    run(model, **PROMPT, do_sample=True, num_return_sequences=12, eos_token_id=ends,
        max_new_tokens=60)  # fmt: skip
    stats = model.cascade.stats
    assert 2 < stats.decode_steps < 59  # all rows ended, at different steps
    length = len(DOCUMENT) + stats.decode_steps
    assert f"{length} tokens, 1 sequence," in model.cascade.describe().splitlines()[0]
