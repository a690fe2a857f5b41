"""`patch(compile=True)`: decode steps are one graph, in which every cascade is fused."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_cascade

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def patched(stock: PreTrainedModel) -> Iterator[PreTrainedModel]:
    torch._dynamo.reset()
    # A cached graph would have been fused in another process, unseen.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)


def generate(model: PreTrainedModel, length: int, rows: int = 1, **options) -> torch.Tensor:
    torch.manual_seed(length)
    input_ids = torch.randint(3, 61, (rows, length))
    input_ids[1:, : length // 2] = input_ids[0, : length // 2]
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 30} | options
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)


def test_one_graph_serves_all_lengths(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    generate(patched, 9)
    counters.clear()
    for length in (5, 16, 17, 40, 70):
        assert torch.equal(generate(patched, length), generate(stock, length))
    assert not counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]


def test_every_layer_is_fused(patched: PreTrainedModel) -> None:
    generate(patched, 9)
    assert patched.cascade.fusion.num_fused > 0
    assert patched.cascade.fusion.num_fused % NUM_LAYERS == 0


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"eos_token_id": list(range(2, 12))},
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": False, "num_return_sequences": 1},
        {"disable_compile": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_tokens_are_those_of_stock(
    stock: PreTrainedModel, patched: PreTrainedModel, options: dict
) -> None:
    ours, theirs = (generate(model, 12, **options) for model in (patched, stock))
    if options.get("return_dict_in_generate"):
        ours, theirs = ours.sequences, theirs.sequences
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("disable_compile", [False, True])
def test_steps_that_only_keep_other_processes_company_take_no_pages(
    stock: PreTrainedModel, patched: PreTrainedModel, disable_compile: bool, monkeypatch
) -> None:
    """With synced_gpus every process runs the model until the last one is done."""
    expected = generate(stock, 12, max_new_tokens=5)
    generate(patched, 12, max_new_tokens=5, disable_compile=disable_compile)
    pages = patched.cascade.allocator.peak_pages_in_use
    rounds = iter(range(70))

    def all_reduce(unfinished: torch.Tensor, op: object) -> None:
        unfinished += next(rounds, None) is not None  # a peer that goes on for 70 steps

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    options = {"max_new_tokens": 5, "synced_gpus": True, "disable_compile": disable_compile}
    assert torch.equal(generate(patched, 12, **options), expected)
    assert patched.cascade.stats.decode_steps == 69
    assert patched.cascade.allocator.peak_pages_in_use == pages


def test_it_works_in_another_thread(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    results: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: results.append(
            generate(patched, 21, do_sample=False, num_return_sequences=1)
        )
    )
    thread.start()
    thread.join()
    assert torch.equal(results[0], generate(stock, 21, do_sample=False, num_return_sequences=1))


def test_the_users_own_options_are_kept(stock: PreTrainedModel) -> None:
    seen: list[int] = []
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    config = CompileConfig(
        mode=None,
        options={"post_grad_custom_pre_pass": lambda graph: seen.append(len(graph.nodes))},
    )
    tokens = generate(model, 9, compile_config=config, max_new_tokens=4)
    assert seen
    assert model.cascade.fusion.num_fused == NUM_LAYERS
    assert torch.equal(tokens, generate(stock, 9, max_new_tokens=4))


def test_copies_compile_anew(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    generate(patched, 9)
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert "_compiled_call" not in vars(copied)
        assert "_last_compile_config" not in vars(copied)
        assert copied.cascade.options.compile


def test_unpatch_leaves_no_compiled_call(stock: PreTrainedModel) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    before = set(vars(stock))
    generate(model, 9, max_new_tokens=2)
    assert "_compiled_call" in vars(model)
    hf_cascade.unpatch(model)
    assert set(vars(model)) == before
    assert torch.equal(generate(model, 9), generate(stock, 9))
