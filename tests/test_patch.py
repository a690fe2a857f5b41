"""Outside `generate` a patched model is the stock model, and unpatched it is that one again."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref

import pytest
import torch
from models import (
    PROMPT,
    RAGGED,
    assert_same,
    new_model,
    run,
)
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LogitsProcessorList

import hf_cascade
from hf_cascade import UnsupportedModelError, cache, ops

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 2}


def surface(model) -> dict:
    """Everything about a model that `unpatch` has to restore, by value."""
    return {
        "class": type(model),
        "attributes": sorted(vars(model)),
        "config": model.config.to_dict(),
        "private config": {key: str(value) for key, value in sorted(vars(model.config).items())},
        "generation_config": model.generation_config.to_dict(),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "state": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "training": model.training,
        "repr": repr(model),
    }


# patch, unpatch


def test_patch_returns_the_model_itself():
    model = new_model()
    assert hf_cascade.patch(model) is model
    assert hf_cascade.unpatch(model) is model


def test_unpatch_restores_everything():
    model = new_model()
    before, stock = surface(model), run(model, **SAMPLED)
    hf_cascade.patch(model, strict=True)
    run(model, **SAMPLED)
    with pytest.raises(hf_cascade.UnsupportedCallError):
        run(model, **SAMPLED, use_cache=False)
    run(model, **SAMPLED, return_dict_in_generate=True)
    hf_cascade.unpatch(model)
    assert surface(model) == before
    assert not hasattr(model, "cascade")
    assert_same(stock, run(model, **SAMPLED))


def test_patching_changes_nothing_that_is_seen_from_outside():
    stock, model = new_model(), hf_cascade.patch(new_model())
    run(model, **SAMPLED)
    patched = surface(model)
    assert patched.pop("class") is not (original := surface(stock)).pop("class")
    patched["attributes"].remove("cascade")
    assert patched == original
    assert isinstance(model, LlamaForCausalLM)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(type(stock), name)
    assert model.generate.__doc__ == stock.generate.__doc__


def test_patching_twice_is_harmless():
    model = hf_cascade.patch(new_model(), strict=True)
    cascade, patched_class = model.cascade, type(model)
    assert hf_cascade.patch(model, strict=True).cascade is cascade
    assert type(model) is patched_class
    hf_cascade.unpatch(model)
    assert type(model) is LlamaForCausalLM
    assert hf_cascade.unpatch(model) is model  # as is unpatching twice
    assert type(model) is LlamaForCausalLM


def test_patching_again_with_other_options_starts_anew():
    model = hf_cascade.patch(new_model())
    run(model, **SAMPLED)
    hf_cascade.patch(model, page_size=2, max_pages=1000, strict=True)
    assert model.cascade.stats is None
    options = model.cascade.options
    assert (options.page_size, options.max_pages, options.strict) == (2, 1000, True)
    assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))
    assert model.cascade.pool.layers()[0][0].shape[2] == 2
    hf_cascade.unpatch(model)
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariance_reaches_the_work_lists(batch_invariant, monkeypatch):
    made = []

    def work_list(*index, batch_invariant, **sizes):
        made.append(batch_invariant)
        return ops.work_list(*index, batch_invariant=batch_invariant, **sizes)

    monkeypatch.setattr(ops.kernels, "serve", lambda pool: True)
    monkeypatch.setattr(cache, "work_list", work_list)
    model = hf_cascade.patch(new_model(), strict=True, batch_invariant=batch_invariant)
    assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))
    assert made
    assert set(made) == {batch_invariant}
    assert (
        model.cascade.fusion(None).batch_invariant is batch_invariant
    )  # compiled steps: test_fuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 3}, "page_size must be one of .*, got 3"),
        ({"page_size": 0}, "page_size must be one of .*, got 0"),
        ({"page_size": 256}, "page_size must be one of .*, got 256"),
        ({"page_size": 16.0}, "page_size must be one of .*, got 16.0"),
        ({"page_size": True}, "page_size must be one of .*, got True"),
        ({"max_pages": 0}, "max_pages must be a whole number, at least 1, or None, got 0"),
        ({"max_pages": 2.5}, "max_pages must be a whole number, at least 1, or None, got 2.5"),
        ({"max_pages": True}, "max_pages must be a whole number, at least 1, or None, got True"),
        ({"compile": 1}, 'compile must be True, False or "auto", got 1'),
        ({"batch_invariant": "False"}, "batch_invariant must be True or False, got 'False'"),
        ({"pack_linears": None}, "pack_linears must be True or False, got None"),
        ({"strict": 1}, "strict must be True or False, got 1"),
    ],
)
def test_an_option_out_of_range_is_named_and_changes_nothing(options, message):
    model = new_model()
    with pytest.raises(ValueError, match=message):
        hf_cascade.patch(model, **options)
    assert type(model) is LlamaForCausalLM
    hf_cascade.patch(model)
    cascade = model.cascade
    with pytest.raises(ValueError, match=message):
        hf_cascade.patch(model, **options)
    assert model.cascade is cascade


def test_models_of_one_class_are_patched_one_by_one():
    first, second = hf_cascade.patch(new_model()), new_model()
    assert type(second) is LlamaForCausalLM
    hf_cascade.patch(second)
    assert type(first) is type(second)
    assert first.cascade is not second.cascade
    run(first, **SAMPLED)
    assert second.cascade.stats is None


def test_unpatch_keeps_what_was_mixed_in_since():
    """As torch's fully_shard does it: a subclass of the model's class, made on the spot."""

    class Sharded:
        answer = 42

    model = hf_cascade.patch(new_model(), strict=True)
    expected = run(model, **SAMPLED)
    model.__class__ = type("ShardedLlama", (Sharded, type(model)), {"own": True})
    assert_same(expected, run(model, **SAMPLED))
    hf_cascade.unpatch(model)
    assert type(model).__name__ == "ShardedLlama"
    assert type(model).__bases__ == (Sharded, LlamaForCausalLM)
    assert (model.answer, model.own, hasattr(model, "cascade")) == (42, True, False)
    assert_same(expected, run(model, **SAMPLED))


def test_a_patched_model_can_be_collected():
    model = hf_cascade.patch(new_model())
    run(model, **SAMPLED, return_dict_in_generate=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# Copies and files


def by_deepcopy(model):
    return copy.deepcopy(model)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [by_deepcopy, by_pickle, by_torch_save])
def test_copies_are_patched_and_have_pages_of_their_own(make):
    model = hf_cascade.patch(new_model(), page_size=8, strict=True)
    expected = run(model, **SAMPLED)
    twin = make(model)
    assert type(twin) is type(model)
    assert twin.cascade is not model.cascade
    assert twin.cascade.options == model.cascade.options
    assert twin.cascade.pool.layers() == []
    assert twin.cascade.stats is None
    assert_same(expected, run(twin, **SAMPLED))
    twin.lm_head.weight.data.mul_(-1.0)
    assert_same(expected, run(model, **SAMPLED))
    hf_cascade.unpatch(twin)
    assert type(twin) is LlamaForCausalLM
    assert model.cascade.stats.path == "cascade"


def test_a_copy_made_while_generating_is_whole():
    """Also the copy of a model whose attention is switched at that moment."""
    model, copies = hf_cascade.patch(new_model(), strict=True), []

    def copying(ids, scores):
        copies.append(by_pickle(model))
        copies.append(copy.deepcopy(model))
        return scores

    expected = run(model, **SAMPLED)
    run(model, **SAMPLED, max_new_tokens=1, logits_processor=LogitsProcessorList([copying]))
    for each in copies:
        assert each.config._attn_implementation == "sdpa"
        assert_same(expected, run(each, **SAMPLED))
        assert torch.equal(each(PROMPT["input_ids"]).logits, model(PROMPT["input_ids"]).logits)


@pytest.mark.parametrize("when", ["after generate", "inside generate"])
def test_saved_and_loaded_it_is_the_stock_model(when, tmp_path):
    model = hf_cascade.patch(new_model(), strict=True)

    def saving(ids, scores):
        model.save_pretrained(tmp_path)
        return scores

    if when == "inside generate":
        run(model, **PROMPT, logits_processor=LogitsProcessorList([saving]), max_new_tokens=1)
    else:
        run(model, **SAMPLED)
        model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["architectures"] == ["LlamaForCausalLM"]
    assert "cascade" not in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert_same(run(loaded, **SAMPLED), run(model, **SAMPLED))


def test_a_model_may_be_cast_and_moved_between_calls():
    model, stock = hf_cascade.patch(new_model(), strict=True), new_model()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        stock.to(dtype)
        out = run(model, **SAMPLED)
        assert model.cascade.pool.layers()[0][0].dtype == dtype
        if dtype != torch.bfloat16:
            assert_same(run(stock, **SAMPLED), out)
    assert model.to("cpu") is model


# PEFT

LORA = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
)


@pytest.mark.parametrize("patched_first", [True, False])
def test_a_peft_model_is_unwrapped(patched_first):
    torch.manual_seed(0)
    stock = get_peft_model(new_model(), LORA).eval()
    if patched_first:
        model = get_peft_model(hf_cascade.patch(new_model(), strict=True), LORA).eval()
        model.load_state_dict(stock.state_dict())
    else:
        model = copy.deepcopy(stock)
        assert hf_cascade.patch(model, strict=True) is model
    assert isinstance(model, PeftModel)
    assert_same(run(stock, **SAMPLED), run(model, **SAMPLED))
    assert model.cascade.stats.path == "cascade"  # through the wrapper
    with model.disable_adapter():
        assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))
    merged, stock_merged = model.merge_and_unload(), stock.merge_and_unload()
    assert_same(run(stock_merged, **SAMPLED), run(merged, **SAMPLED))
    assert merged.cascade.stats.path == "cascade"
    hf_cascade.unpatch(merged)
    assert type(merged) is LlamaForCausalLM


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("kind", ["lora", "prefix tuning"])
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.filterwarnings("ignore::hf_cascade.CascadeFallbackWarning")
def test_unpatching_a_peft_model_gives_the_stock_one(patched_first, kind):
    config = LORA if kind == "lora" else PrefixTuningConfig(
        num_virtual_tokens=3, task_type="CAUSAL_LM"
    )  # fmt: skip
    stock = get_peft_model(new_model(), config).eval()
    model = hf_cascade.patch(new_model()) if patched_first else new_model()
    model = get_peft_model(model, config).eval()
    model.load_state_dict(stock.state_dict())
    hf_cascade.patch(model)
    expected = run(stock, **SAMPLED)
    assert_same(expected, run(model, **SAMPLED))
    hf_cascade.unpatch(model)
    assert type(model.get_base_model()) is LlamaForCausalLM
    assert_same(expected, run(model, **SAMPLED))


def test_a_peft_model_of_what_can_t_be_served_is_refused():
    model = new_model()
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        hf_cascade.patch(get_peft_model(model, LORA))


# Training


def step(model, **arguments) -> list[torch.Tensor]:
    """Loss, logits and all gradients of one forward and backward pass."""
    torch.manual_seed(0)
    model.zero_grad()
    out = model(**RAGGED, labels=RAGGED["input_ids"], **arguments)
    out.loss.backward()
    return [out.loss, out.logits, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("generate_first", [False, True])
def test_training_is_unchanged_to_the_bit(implementation, checkpointing, generate_first):
    stock = new_model(attention_dropout=0.1)
    stock.set_attn_implementation(implementation)
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True)
    if generate_first:
        run(model, **SAMPLED)
    for each in (stock, model):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
    for one, other in zip(step(stock), step(model), strict=True):
        assert torch.equal(one, other)


def test_generate_train_generate():
    model, stock = hf_cascade.patch(new_model(), strict=True), new_model()
    for _ in range(3):
        for each in (stock, model):
            each.eval()
        assert_same(run(stock, **SAMPLED), run(model, **SAMPLED))
        for each in (stock, model):
            each.train()
            step(each)
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad


def test_forward_passes_outside_generate_are_unchanged_to_the_bit():
    stock, model = new_model(), hf_cascade.patch(new_model())
    run(model, **SAMPLED)
    for arguments in ({}, {"output_hidden_states": True}, {"use_cache": False}):
        for one, other in zip(
            stock(**RAGGED, **arguments).to_tuple(),
            model(**RAGGED, **arguments).to_tuple(),
            strict=True,
        ):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)


def test_kv_that_changes_within_a_call_is_an_error():
    """What the prompt stored is of no use to it; a new pool would hold garbage in its place."""
    model = hf_cascade.patch(new_model())
    attention = model.model.layers[1].self_attn

    def round_in_steps(module, args, output):
        return output.bfloat16() if output.shape[1] == 1 else output

    hooks = [getattr(attention, f"{x}_proj").register_forward_hook(round_in_steps) for x in "qkv"]
    hooks.append(attention.o_proj.register_forward_pre_hook(lambda module, args: args[0].float()))
    changed = r"layer 1 changed within a generate call: .*float32 on cpu.*bfloat16 on cpu"
    with pytest.raises(UnsupportedModelError, match=changed):
        run(model, **PROMPT)
    for hook in hooks:
        hook.remove()
    assert_same(run(new_model(), **PROMPT), run(model, **PROMPT))


def test_a_model_may_change_its_dtype_between_calls():
    model, stock = hf_cascade.patch(new_model(), strict=True), new_model()
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert_same(run(stock.to(dtype), **PROMPT), run(model.to(dtype), **PROMPT))
