"""`pipeline("text-generation")` and chat templates: the same text as without patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import assert_same, run, trie_size
from sums import CHAT_TEMPLATE, CHATS, CHECKPOINT, PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, Pipeline, pipeline, set_seed

import hf_cascade

LOADED = {"model": str(CHECKPOINT), "dtype": torch.float32}


@pytest.fixture(scope="module")
def stock() -> Pipeline:
    return with_chat_template(pipeline("text-generation", **LOADED))


@pytest.fixture(scope="module", params=["the pipeline's model", "a model before the pipeline"])
def patched(request) -> Pipeline:
    if request.param == "the pipeline's model":
        patched = pipeline("text-generation", **LOADED)
        hf_cascade.patch(patched.model, strict=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        hf_cascade.patch(model, strict=True)
        patched = pipeline("text-generation", model=model, tokenizer=tokenizer)
    return with_chat_template(patched)


def with_chat_template(made: Pipeline) -> Pipeline:
    made.tokenizer.chat_template = CHAT_TEMPLATE
    return made


def say(made: Pipeline, inputs: Any, **options) -> Any:
    set_seed(0)
    return made(inputs, **{"max_new_tokens": 16} | options)


def test_samples_of_a_prompt_share_it(stock, patched):
    options = {"num_return_sequences": 8, "temperature": 0.8}
    samples = say(patched, PROMPTS[0], **options)
    assert samples == say(stock, PROMPTS[0], **options)
    assert len({sample["generated_text"] for sample in samples}) > 1
    stats = patched.model.cascade.stats
    assert stats.prompt_tokens == 8 * stats.prefill_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 4, "batch_size": 2, "return_full_text": False},
        {"batch_size": 3, "do_sample": False},
        {"batch_size": 3, "num_beams": 3, "num_return_sequences": 2},
        {"stop_sequence": "\n", "num_return_sequences": 3, "max_new_tokens": 60},
    ],
    ids=["samples", "greedy", "beams", "until a line ends"],
)
def test_a_list_of_prompts_in_batches(stock, patched, options):
    assert say(patched, PROMPTS, **options) == say(stock, PROMPTS, **options)
    assert patched.model.cascade.stats.path == "cascade"


def test_chats(stock, patched):
    options = {"num_return_sequences": 3, "batch_size": 3, "max_new_tokens": 40}
    answers = say(patched, CHATS, **options)
    assert answers == say(stock, CHATS, **options)
    for chat, samples in zip(CHATS, answers, strict=True):
        for sample in samples:
            *history, last = sample["generated_text"]
            assert history == chat
            assert last["role"] == "assistant"
            assert "Total=" in last["content"]


def test_a_batch_of_chats_shares_their_history(stock, patched):
    inputs = patched.tokenizer.apply_chat_template(
        CHATS, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    options = dict(inputs) | {"do_sample": True, "num_return_sequences": 4}
    assert_same(run(stock.model, **options), run(patched.model, **options))
    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)
    ]
    assert [patched.tokenizer.decode(row) for row in rows] == PROMPTS
    stats = patched.model.cascade.stats
    assert stats.prefill_tokens == trie_size(rows) < sum(map(len, rows))
    assert stats.prompt_tokens == 4 * sum(map(len, rows))
