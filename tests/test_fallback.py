"""What can't be shared runs on stock transformers: the same result, one warning, never silence.

Each case states a reason. The last test compares them with the reasons that gates.py can give, so
a new reason without a case here fails.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from models import (
    DOCUMENT,
    PROMPT,
    RAGGED,
    assert_same,
    batch,
    forwarded_tokens,
    new_model,
    parity,
    run,
    tokens,
)
from peft import (
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import DynamicCache

import hf_cascade
from hf_cascade import CascadeFallbackWarning, UnsupportedCallError, gates

LENGTH = RAGGED["input_ids"].shape[1]
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
SAMPLED = RAGGED | {"do_sample": True}


@dataclass(frozen=True)
class Case:
    """A call that falls back; arguments are made anew for each model that runs it."""

    reason: str
    arguments: Callable[[Any], dict] = field(default=lambda model: {})
    model: Callable[[], Any] = new_model
    inputs: dict = field(default_factory=lambda: SAMPLED)


def given(**arguments) -> Callable[[Any], dict]:
    return lambda model: copy.deepcopy(arguments)


def mask(*rows: str) -> dict:
    """Two rows of 8 random tokens under a mask."""
    ids = torch.tensor([tokens(len(rows[0]), seed=i) for i in range(len(rows))])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[int(x) for x in row] for row in rows]),
    }


def prefilled(model) -> dict:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT["input_ids"][:, :-3], past_key_values=cache)
    return {"past_key_values": cache}


def changed(change: Callable[[Any], Any], name: str = "llama", **config) -> Callable[[], Any]:
    def make():
        model = new_model(name, **config)
        change(model)
        return model

    return make


def prepare_inputs_on_the_instance(model):
    original = type(model).prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: original(model, *args, **kwargs)


def prepare_inputs_in_a_subclass(model):
    """As models beside transformers did it for years: it hands on what it knows."""

    def prepare(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length():
            input_ids = input_ids[:, -1:]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
        }

    own = {"prepare_inputs_for_generation": prepare}
    model.__class__ = type("OwnLlama", (type(model),), own)


def shift_positions_in_a_subclass(model):
    stock = type(model).prepare_inputs_for_generation

    def prepare(self, input_ids, attention_mask=None, **kwargs):
        inputs = stock(self, input_ids, attention_mask=attention_mask, **kwargs)
        return inputs | {"position_ids": 2 * inputs["position_ids"]}

    own = {"prepare_inputs_for_generation": prepare}
    model.__class__ = type("OwnLlama", (type(model),), own)


def wrap_forward(model):
    """Without functools.wraps: generate sees no position_ids among its parameters."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def compile_a_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def train_a_part_with_checkpointing(model):
    model.gradient_checkpointing_enable()
    model.model.train()


def train_with_checkpointing(model):
    model.train()
    model.gradient_checkpointing_enable()


def train_with_channel_dropout(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout1d(0.2))
    model.train()


def train_with_dropout(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.2))
    model.train()


CASES = {
    "prompt lookup": Case(
        "generation mode assisted_generation", given(prompt_lookup_num_tokens=2), inputs=PROMPT
    ),
    "an assistant": Case(
        "generation mode assisted_generation",
        lambda model: {"assistant_model": new_model(seed=1)},
        inputs=PROMPT,
    ),
    "no cache": Case("use_cache=False", given(use_cache=False)),
    "no answer about the cache": Case("use_cache=None", given(use_cache=None)),
    "a static cache": Case("cache_implementation='static'", given(cache_implementation="static")),
    "attentions": Case(
        "output_attentions=True",
        given(output_attentions=True, return_dict_in_generate=True),
        changed(lambda model: model.set_attn_implementation("eager")),
    ),
    "hidden states": Case(
        "output_hidden_states=True",
        given(output_hidden_states=True, return_dict_in_generate=True),
    ),
    "a cache of the user": Case("past_key_values were passed in", prefilled, inputs=PROMPT),
    "an argument of the model": Case(
        "the argument labels", given(labels=PROMPT["input_ids"]), inputs=PROMPT
    ),
    "more logits": Case("logits_to_keep=0", given(logits_to_keep=0)),
    "chosen logits": Case(
        "logits_to_keep=tensor([ 0, -1])", given(logits_to_keep=torch.tensor([0, -1])),
        inputs=PROMPT,
    ),
    "a narrow window": Case(
        f"a sliding window of {LENGTH + 7} tokens, shorter than max_length={LENGTH + 8}",
        model=changed(lambda model: None, "mistral", sliding_window=LENGTH + 7),
    ),
    "a narrow window, of embeddings": Case(
        "a sliding window of 18 tokens, shorter than max_length=19",
        lambda model: {
            "inputs_embeds": model.get_input_embeddings()(PROMPT["input_ids"]).detach()
        },
        changed(lambda model: None, "mistral", sliding_window=18),
        inputs={"do_sample": True},
    ),
    "chunks and dynamic frequencies": Case(
        "prefill_chunk_size with RoPE frequencies that depend on the length",
        given(prefill_chunk_size=4),
        changed(lambda model: None, rope_parameters=DYNAMIC_ROPE),
    ),
    "an instance that prepares inputs": Case(
        "prepare_inputs_for_generation is overridden on the instance (prompt learning?)",
        model=changed(prepare_inputs_on_the_instance),
    ),
    "a subclass that prepares inputs": Case(
        "prepare_inputs_for_generation is overridden outside of transformers",
        model=changed(prepare_inputs_in_a_subclass),
    ),
    "a subclass that shifts positions": Case(
        "prepare_inputs_for_generation is overridden outside of transformers",
        model=changed(shift_positions_in_a_subclass),
    ),
    "a forward that hides its parameters": Case(
        "padded prompts without position_ids", model=changed(wrap_forward)
    ),
    "a compiled model": Case(
        "the model or a part of it was compiled",
        model=changed(lambda model: model.compile(disable=True)),
    ),
    "a compiled layer": Case(
        "the model or a part of it was compiled",
        model=changed(lambda model: model.model.layers[1].compile(disable=True)),
    ),
    "a compiled module in a layer's place": Case(
        "the model or a part of it was compiled", model=changed(compile_a_layer)
    ),
    "a compiled forward": Case(
        "the model or a part of it was compiled", given(max_new_tokens=2),
        changed(compile_forward), inputs=PROMPT,
    ),
    "gradient checkpointing": Case(
        "gradient checkpointing in training mode, which drops the cache",
        model=changed(train_with_checkpointing),
    ),
    "gradient checkpointing in a part": Case(
        "gradient checkpointing in training mode, which drops the cache",
        model=changed(train_a_part_with_checkpointing),
    ),
    "dropout": Case(
        "dropout in training mode; call model.eval()", model=changed(train_with_dropout)
    ),
    "dropout in attention": Case(
        "dropout in training mode; call model.eval()",
        model=changed(lambda model: model.train(), attention_dropout=0.2),
    ),
    "dropout in attention of a part": Case(
        "dropout in training mode; call model.eval()",
        model=changed(lambda model: model.model.train(), attention_dropout=0.2),
    ),
    "dropout that is no module": Case(
        "dropout in training mode; call model.eval()",
        model=changed(lambda model: model.train(), "starcoder2", residual_dropout=0.2),
    ),
    "dropout of channels": Case(
        "dropout in training mode; call model.eval()", model=changed(train_with_channel_dropout)
    ),
    "noise in front of the router": Case(
        "noise in the router in training mode; call model.eval()",
        model=changed(
            lambda model: model.train(), "phimoe", num_local_experts=4, num_experts_per_tok=2,
            router_jitter_noise=0.0, input_jitter_noise=0.3,
        ),
    ),
    "a router that draws experts": Case(
        "noise in the router in training mode; call model.eval()",
        model=changed(
            lambda model: model.train(), "phimoe", num_local_experts=4, num_experts_per_tok=2,
            router_jitter_noise=0.0, input_jitter_noise=0.0,
        ),
    ),
    "noise in the router": Case(
        "noise in the router in training mode; call model.eval()",
        model=changed(lambda model: model.train(), "mixtral", router_jitter_noise=0.4),
    ),
    "right padding": Case(
        "an attention_mask that hides the last token of a row (right padding?)",
        inputs=mask("11111111", "11111100"),
    ),
    "holes": Case("an attention_mask with holes", inputs=mask("11111111", "11100111")),
    "a mask that is too long": Case(
        "an attention_mask of shape (2, 10) for prompts of (2, 8)",
        inputs=mask("11111111", "11111111")
        | {"attention_mask": mask("0111111111", "1111111111")["attention_mask"]},
    ),
    "a mask of other numbers": Case(
        "an attention_mask with values other than 0 and 1",
        inputs=mask("11111111", "22222222"),
    ),
    "a hole after padding": Case("an attention_mask with holes", inputs=mask("00110111")),
    "positions": Case(
        "custom position_ids", given(position_ids=torch.arange(len(DOCUMENT))[None] * 2),
        inputs=PROMPT,
    ),
    "positions that are too long": Case(
        "position_ids of shape (2, 10) for prompts of (2, 8)",
        given(position_ids=torch.arange(10).expand(2, 10)),
        inputs=mask("11111111", "11111111"),
    ),
    "positions that count padding": Case(
        "custom position_ids", given(position_ids=torch.arange(LENGTH).repeat(5, 1))
    ),
    "a decoding loop of the user": Case(
        "custom_generate", lambda model: {"custom_generate": greedy_loop}, inputs=RAGGED
    ),
}  # fmt: skip


def greedy_loop(model, input_ids, **kwargs):
    """A decoding loop as the documentation of custom_generate shows it."""
    for key in ("generation_config", "logits_processor", "stopping_criteria", "synced_gpus"):
        kwargs.pop(key, None)
    for step in range(4):
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if step else None, **kwargs
        )
        outputs = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        next_tokens = outputs.logits[:, -1].argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, next_tokens], 1)
    return input_ids


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_a_call_that_can_t_be_shared_gives_stock_s_result_and_says_why(case):
    stock, model = case.model(), hf_cascade.patch(case.model())
    expected = run(stock, **case.inputs, **case.arguments(stock))
    with pytest.warns(CascadeFallbackWarning, match=re.escape(case.reason)):
        actual = run(model, **case.inputs, **case.arguments(model))
    assert_same(expected, actual)
    stats = model.cascade.stats
    assert (stats.path, stats.kv_bytes, stats.kv_bytes_unshared) == ("stock", 0, 0)
    assert case.reason in stats.reason


@each_case
def test_strict_refuses_it_before_anything_is_computed(case):
    model = hf_cascade.patch(case.model(), strict=True)
    arguments = case.arguments(model)
    counts = forwarded_tokens(model)
    with pytest.raises(UnsupportedCallError, match=re.escape(case.reason)):
        run(model, **case.inputs, **arguments)
    assert counts == []
    assert model.cascade.allocator.pages_in_use == 0
    assert model.config._attn_implementation == case.model().config._attn_implementation


OF_THE_CALL = {name: case for name, case in CASES.items() if case.model is new_model}


@pytest.mark.parametrize("case", OF_THE_CALL.values(), ids=OF_THE_CALL)
def test_the_next_call_shares_again(case):
    model = hf_cascade.patch(new_model(), strict=True)
    with pytest.raises(UnsupportedCallError):
        run(model, **case.inputs, **case.arguments(model))
    assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))
    assert model.cascade.stats.path == "cascade"


def test_shapes_that_the_model_itself_fails_on_are_refused_first():
    """Models that take such masks or positions make them in hooks of their own."""
    model = hf_cascade.patch(new_model(), strict=True)
    length = len(DOCUMENT)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    embeddings = model.get_input_embeddings()(PROMPT["input_ids"]).detach()
    with pytest.raises(UnsupportedCallError, match="an attention_mask of 4 dimensions"):
        run(model, inputs_embeds=embeddings, attention_mask=causal)
    with pytest.raises(UnsupportedCallError, match="position_ids of 3 dimensions"):
        run(model, **PROMPT, position_ids=torch.arange(length).repeat(3, 1, 1))


# Warned once


def fallback_warnings(model, **arguments) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, **PROMPT, **arguments)
    return [str(w.message) for w in caught if w.category is CascadeFallbackWarning]


def test_a_reason_is_warned_of_once_a_model():
    first, second = hf_cascade.patch(new_model()), hf_cascade.patch(new_model())
    [message] = fallback_warnings(first, use_cache=False)
    assert message == "LlamaForCausalLM.generate runs without shared prefixes: use_cache=False"
    assert fallback_warnings(first, use_cache=False) == []
    assert first.cascade.stats.reason == "use_cache=False"  # still no secret
    assert len(fallback_warnings(first, logits_to_keep=0)) == 1
    assert len(fallback_warnings(second, use_cache=False)) == 1
    assert fallback_warnings(first) == []


def test_a_call_that_is_served_warns_of_nothing():
    model = hf_cascade.patch(new_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, **SAMPLED, num_return_sequences=2)
    assert (model.cascade.stats.path, model.cascade.stats.reason) == ("cascade", None)


def test_what_happened_is_logged_and_nothing_is_printed(capsys, caplog):
    model = hf_cascade.patch(new_model())
    with caplog.at_level("DEBUG", logger="hf_cascade"):
        run(model, **SAMPLED)
    assert str(model.cascade.stats) in caplog.text
    assert capsys.readouterr() == ("", "")


def test_strict_for_a_few_calls():
    model = hf_cascade.patch(new_model())
    with model.cascade.strict():
        with pytest.raises(UnsupportedCallError):
            run(model, **PROMPT, use_cache=False)
        with model.cascade.strict(), pytest.raises(UnsupportedCallError):
            run(model, **PROMPT, use_cache=False)
        with pytest.raises(UnsupportedCallError):
            run(model, **PROMPT, use_cache=False)
    assert len(fallback_warnings(model, use_cache=False)) == 1
    with pytest.raises(KeyError), model.cascade.strict():
        raise KeyError
    assert fallback_warnings(model, use_cache=False) == []


# The stock path counts too


def test_stats_of_a_stock_call():
    model = hf_cascade.patch(new_model())
    with pytest.warns(CascadeFallbackWarning):
        run(model, **SAMPLED, num_return_sequences=2, logits_to_keep=0)
    stats = model.cascade.stats
    prompt_tokens = 2 * int(RAGGED["attention_mask"].sum())
    assert (stats.prompt_tokens, stats.prefill_tokens) == (prompt_tokens, prompt_tokens)
    assert (stats.decode_steps, stats.backend) == (7, "stock")


def test_stock_prefill_in_chunks_is_no_decoding():
    model = hf_cascade.patch(new_model())
    with pytest.warns(CascadeFallbackWarning):
        run(model, **PROMPT, cache_implementation="static", prefill_chunk_size=3)
    assert model.cascade.stats.decode_steps == 7


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": new_model(seed=1)},
        {"custom_generate": greedy_loop},
        {"num_beams": 2, "use_cache": False},
        {"max_new_tokens": 1, "use_cache": False},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_whatever_loop_runs_its_prompt_and_its_steps_are_counted(arguments):
    model = hf_cascade.patch(new_model())
    counts = forwarded_tokens(model)
    with pytest.warns(CascadeFallbackWarning):
        run(model, **PROMPT, **arguments)
    stats, rows = model.cascade.stats, arguments.get("num_beams", 1)
    assert stats.prompt_tokens == stats.prefill_tokens == rows * len(DOCUMENT)
    assert stats.decode_steps == len(counts) - 1


def test_of_a_prompt_with_a_cache_what_is_new_counts():
    model = hf_cascade.patch(new_model())
    arguments = prefilled(model)  # all but three tokens
    counts = forwarded_tokens(model)
    with pytest.warns(CascadeFallbackWarning):
        run(model, **PROMPT, **arguments)
    assert model.cascade.stats.prompt_tokens == counts[0] == 3


@pytest.mark.parametrize("strict", [False, True])
def test_continuous_batching_is_not_silent(strict, monkeypatch):
    """generate hands cache_implementation="paged" to generate_batch before any hook runs."""
    answer = SimpleNamespace(prompt_ids=DOCUMENT, generated_tokens=[5, 6])
    model = new_model()
    monkeypatch.setattr(type(model), "generate_batch", lambda *args, **kwargs: {"req_0": answer})
    hf_cascade.patch(model, strict=strict)
    if strict:
        with pytest.raises(UnsupportedCallError, match="paged"):
            model.generate(PROMPT["input_ids"], cache_implementation="paged")
        return
    with pytest.warns(CascadeFallbackWarning, match="paged"):
        model.generate(PROMPT["input_ids"], cache_implementation="paged")
    assert "paged" in model.cascade.stats.reason


def test_a_decoding_loop_in_its_place_among_positional_arguments():
    arguments = (RAGGED["input_ids"], *[None] * 9, greedy_loop)
    named = {"attention_mask": RAGGED["attention_mask"], "max_new_tokens": 4}
    expected = new_model().generate(*arguments, **named)
    model = hf_cascade.patch(new_model())
    with pytest.warns(CascadeFallbackWarning, match="the argument custom_generate"):
        actual = model.generate(*arguments, **named)
    assert torch.equal(expected, actual)


def test_a_patched_assistant_falls_back_too():
    target, assistant = new_model(), new_model(seed=1)
    expected = run(target, **PROMPT, assistant_model=assistant)
    hf_cascade.patch(target)
    hf_cascade.patch(assistant)
    with pytest.warns(CascadeFallbackWarning) as caught:
        actual = run(target, **PROMPT, assistant_model=assistant)
    assert_same(expected, actual)
    reasons = {str(w.message).split(": ")[1] for w in caught}
    assert {"the model assists another one", "generation mode assisted_generation"} <= reasons
    assert assistant.cascade.stats.path == target.cascade.stats.path == "stock"


def test_errors_of_stock_are_the_same_errors():
    for arguments in ({"max_new_tokens": 0}, {"no_such_argument": 1}, {"num_return_sequences": 2}):
        messages = []
        for model in (new_model(), hf_cascade.patch(new_model(), strict=True)):
            with pytest.raises(ValueError, match=r".") as caught:
                run(model, **PROMPT, **arguments)
            messages.append((caught.type, str(caught.value)))
        assert messages[0] == messages[1]


# Adapters


OWN_ADAPTERS = "PEFT adapters that differ between rows or tokens"


def lora(**options) -> LoraConfig:
    return LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip


def twins(config, **more_adapters) -> tuple[Any, Any]:
    """A stock PEFT model and a patched copy."""
    torch.manual_seed(0)
    stock = get_peft_model(new_model(), config).eval()
    for name, adapter in more_adapters.items():
        stock.add_adapter(name, adapter)
    return stock, hf_cascade.patch(copy.deepcopy(stock))


@pytest.mark.parametrize(
    "config",
    [PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
     PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")],
    ids=["prefix tuning", "prompt tuning"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_learning_falls_back(config):
    stock, model = twins(config)
    expected = run(stock, **RAGGED, do_sample=True)
    with pytest.warns(CascadeFallbackWarning, match="prompt learning"):
        assert_same(expected, run(model, **RAGGED, do_sample=True))
    plain = run(new_model(), **RAGGED, do_sample=True)
    assert not torch.equal(expected.sequences, plain.sequences), "the adapter does nothing"
    with model.cascade.strict(), pytest.raises(UnsupportedCallError):
        run(model, **RAGGED)


@pytest.mark.parametrize("names", [["default", "other"], ["other", "other"]], ids=str)
def test_an_adapter_of_its_own_for_each_row_falls_back(names):
    """PEFT keeps adapter_names to itself: rows that look alike are computed differently."""
    stock, model = twins(lora(), other=lora())
    rows = batch(DOCUMENT, DOCUMENT)
    expected = run(stock, **rows, adapter_names=names)
    with pytest.warns(CascadeFallbackWarning, match=OWN_ADAPTERS):
        assert_same(expected, run(model, **rows, adapter_names=names))
    with model.cascade.strict(), pytest.raises(UnsupportedCallError):
        run(model, **rows, adapter_names=names)


def test_an_adapter_activated_by_tokens_falls_back():
    """Activated LoRA computes, for each row, where in the batch its weights begin to count."""
    stock, model = twins(lora(alora_invocation_tokens=DOCUMENT[3:5]))
    rows = batch(DOCUMENT, DOCUMENT, [*DOCUMENT, 9])
    expected = run(stock, **rows)
    with pytest.warns(CascadeFallbackWarning, match=OWN_ADAPTERS):
        assert_same(expected, run(model, **rows))


@pytest.mark.filterwarnings("ignore::hf_cascade.CascadeFallbackWarning")
def test_a_task_of_its_own_for_each_row_falls_back():
    config = PolyConfig(
        r=4, n_tasks=2, n_skills=2, target_modules=["q_proj"], init_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    stock, model = twins(config)
    rows = batch(DOCUMENT, DOCUMENT)
    for task_ids in (torch.tensor([0, 1]), torch.tensor([1, 1])):
        expected = run(stock, **rows, task_ids=task_ids)
        assert_same(expected, run(model, **rows, task_ids=task_ids))
        assert model.get_base_model().cascade.stats.reason == OWN_ADAPTERS


# Models spread by accelerate


def test_offloaded_weights_are_served():
    model = accelerate.cpu_offload(new_model(), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*different than your model's device.*")
        expected = run(new_model(), **SAMPLED, num_return_sequences=2)
        hf_cascade.patch(model, strict=True)
        assert_same(expected, run(model, **SAMPLED, num_return_sequences=2))


def test_hooks_of_accelerate_before_and_after_patching():
    for first in (True, False):
        model = new_model()
        expected = run(model, **SAMPLED)
        if not first:
            hf_cascade.patch(model, strict=True)
        accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
        hf_cascade.patch(model, strict=True)
        assert_same(expected, run(model, **SAMPLED))
        assert model.cascade.stats.path == "cascade"


def test_lora_is_served():
    torch.manual_seed(0)
    parity(get_peft_model(new_model(), lora()).eval(), **SAMPLED, num_return_sequences=2)


# Completeness


def reasons_in(module) -> list[str]:
    """Every text that a `*_obstacle` function of the module may return, as a pattern."""
    functions = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_obstacle")
    ]
    returned = [
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    texts = []
    for value in returned:
        for node in ast.walk(value):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*"
                        for part in node.values
                    )
                )
                break
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.escape(node.value))
                break
    return texts


@pytest.mark.parametrize(
    "unfit",
    [
        {"attention_mask": torch.ones(2, 6).long()},
        {"inputs_embeds": torch.randn(2, 11, 32)},
    ],
    ids=list,
)
def test_what_stock_refuses_is_refused(unfit):
    inputs = mask("11111111", "11111111") | unfit
    for model in (new_model(), hf_cascade.patch(new_model())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CascadeFallbackWarning)
            with pytest.raises(RuntimeError):
                model.generate(**inputs, max_new_tokens=3)


@pytest.mark.parametrize(
    ("unfit", "reason"),
    [
        ({"input_ids": torch.ones(0, 4).long()}, "a batch without rows"),
        (
            batch(DOCUMENT, DOCUMENT)
            | {"position_ids": torch.arange(11)[None], "num_return_sequences": 2},
            "position_ids of shape (2, 11) for prompts of (4, 11)",
        ),
    ],
    ids=["no rows", "positions of other rows"],
)
def test_what_stock_fails_on_fails_as_in_stock(unfit, reason):
    messages = []
    for model in (new_model(), hf_cascade.patch(new_model())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CascadeFallbackWarning)
            with pytest.raises(Exception, match=r".") as error:
                run(model, **unfit, do_sample=True)
        messages.append((type(error.value), str(error.value)))
    assert messages[0] == messages[1]
    [warning] = [w for w in caught if w.category is CascadeFallbackWarning]
    assert reason in str(warning.message)


@pytest.mark.parametrize("again", ["another model", "patched anew"])
def test_each_patched_model_warns_with_python_s_usual_filter(again):
    """That shows a text once for each line of code that warns."""
    model = hf_cascade.patch(new_model("mistral", sliding_window=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            run(model, **batch(tokens(10)))
            run(model, **batch(tokens(10)))
            if again == "another model":
                model = hf_cascade.patch(new_model("mistral", sliding_window=8))
            else:
                hf_cascade.patch(hf_cascade.unpatch(model))
    found = [warning for warning in caught if warning.category is CascadeFallbackWarning]
    assert len(found) == 2
    assert all(Path(warning.filename).name == "models.py" for warning in found), "the caller's line"


def test_a_length_in_the_reason_does_not_warn_again():
    model = hf_cascade.patch(new_model("mistral", sliding_window=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(10, 14):
            run(model, **batch(tokens(length)))
    assert sum(warning.category is CascadeFallbackWarning for warning in caught) == 1


@pytest.mark.filterwarnings("ignore::hf_cascade.CascadeFallbackWarning")
def test_strict_contexts_may_overlap_and_end_at_their_thread():
    cascade = hf_cascade.patch(new_model()).cascade
    first, second = cascade.strict(), cascade.strict()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)

    def falls_back(call) -> bool:
        try:
            cascade.fall_back(call, "a reason", "Model")
        except UnsupportedCallError:
            return False
        return True

    assert not falls_back(SimpleNamespace())
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(falls_back(SimpleNamespace())))
    thread.start()
    thread.join()
    assert seen == [True]
    second.__exit__(None, None, None)
    assert falls_back(SimpleNamespace())


def test_every_reason_has_a_case():
    reasons = reasons_in(gates)
    assert len(reasons) > 12
    known = [case.reason for case in CASES.values()]
    known += ["the model assists another one", OWN_ADAPTERS]
    known += ["input_ids and inputs_embeds of different lengths"]
    known += ["a batch without rows"]
    known += ["position_ids of 3 dimensions", "an attention_mask of 4 dimensions"]
    missing = [
        reason for reason in reasons if not any(re.fullmatch(reason, case) for case in known)
    ]
    assert not missing
