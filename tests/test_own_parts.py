"""Whatever users put in place of transformers' parts, or around `generate`, is heeded.

Either the patched model gives what the stock one gives, or the call falls back and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import PROMPT, RAGGED, Run, assert_same, new_model, run
from transformers import AttentionInterface, AttentionMaskInterface, MaxLengthCriteria
from transformers.generation import StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import hf_cascade
from hf_cascade import CascadeFallbackWarning, UnsupportedModelError, cache, columns
from hf_cascade.tree import KVTree

GREEDY = PROMPT | {"do_sample": False}

# ------------------------------------------------------------------ attention


def softer(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of the user's own."""
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=0.5 * scaling, **kwargs
    )


@pytest.fixture
def registered() -> Iterator[Callable[[type, str, Any], None]]:
    """Registers functions by name, for this test."""
    before: list[tuple[type, str, Any]] = []

    def register(interface: type, name: str, function: Any) -> None:
        before.append((interface, name, interface._global_mapping.get(name)))
        interface.register(name, function)

    yield register
    for interface, name, function in reversed(before):
        if function is None:
            del interface._global_mapping[name]
        else:
            interface.register(name, function)


@pytest.mark.parametrize("name", ["softer", "sdpa"])
def test_an_attention_function_of_the_user_s_own_is_called(name, registered):
    expected = run(new_model(), **GREEDY)
    registered(AttentionInterface, name, softer)
    registered(AttentionMaskInterface, name, sdpa_mask)
    assert_falls_back_to_the_same(name, expected)


def test_an_eager_attention_of_the_user_s_own_is_called(monkeypatch):
    expected = run(new_model(), **GREEDY)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", softer)
    assert_falls_back_to_the_same("eager", expected)


def test_a_mask_function_of_the_user_s_own_is_called(registered):
    def forget(*args, **kwargs):
        mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
        mask[..., 1] = False  # the second token
        return mask

    expected = run(new_model(), **GREEDY)
    registered(AttentionMaskInterface, "sdpa", forget)
    assert_falls_back_to_the_same("sdpa", expected)


def assert_falls_back_to_the_same(implementation: str, unlike: Run) -> None:
    stock, patched = new_model(), hf_cascade.patch(new_model())
    for model in (stock, patched):
        model.set_attn_implementation(implementation)
    own = run(stock, **GREEDY)
    assert not torch.equal(own.sequences, unlike.sequences)
    with pytest.warns(CascadeFallbackWarning, match=f"attention function '{implementation}'"):
        assert_same(own, run(patched, **GREEDY))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_own_attention_is_served(implementation):
    stock, patched = new_model(), hf_cascade.patch(new_model(), strict=True)
    for model in (stock, patched):
        model.set_attn_implementation(implementation)
    assert_same(run(stock, **GREEDY), run(patched, **GREEDY))


# ------------------------------------------------------------------ hooks


def louder(module, args, output):
    return output * 1.5


@pytest.mark.parametrize("place", ["a layer", "all modules"])
def test_hooks_that_come_after_compiling_are_called(place):
    stock, patched = new_model(), hf_cascade.patch(new_model(), compile=True, strict=True)
    assert_same(run(stock, **GREEDY), run(patched, **GREEDY))
    if place == "a layer":
        handles = [m.model.layers[0].register_forward_hook(louder) for m in (stock, patched)]
    else:
        handles = [torch.nn.modules.module.register_module_forward_hook(only_norms)]
    try:
        changed = run(stock, **GREEDY)
        assert_same(changed, run(patched, **GREEDY))
    finally:
        for handle in handles:
            handle.remove()
    assert_same(run(stock, **GREEDY), run(patched, **GREEDY))


def only_norms(module, args, output):
    return output * 1.5 if type(module).__name__ == "LlamaRMSNorm" else output


def test_steps_that_hooks_watch_are_not_compiled_unasked(caplog, monkeypatch):
    """A hook is called once a step; of a captured step it would be called once."""
    monkeypatch.setattr(hf_cascade.runtime.Cascade, "compiles_on", lambda self, device: True)
    model, seen = hf_cascade.patch(new_model(), strict=True), []
    handle = model.model.layers[1].register_forward_hook(lambda *args: seen.append(1))
    for _ in range(2):
        run(model, **GREEDY)
    assert len(seen) == 16
    assert model.cascade.stats.fused_layers == 0
    assert [r.message for r in caplog.records if "forward hooks" in r.message] == [
        "decode steps are not compiled: forward hooks are registered, which compiled code would "
        "not call in every step"
    ]
    handle.remove()


# ------------------------------------------------------------------ when to stop


class AnyLarge(StoppingCriteriaList):
    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) | (input_ids[:, -1] > 40)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}])
def test_a_list_of_criteria_with_a_call_of_its_own_is_asked(arguments):
    class Own(modeling_llama.LlamaForCausalLM):
        def _get_stopping_criteria(self, *args, **kwargs):
            return AnyLarge(super()._get_stopping_criteria(*args, **kwargs))

    def own():
        model = new_model()
        model.__class__ = Own
        return model

    stock = run(own(), **GREEDY, **arguments, max_new_tokens=30)
    assert stock.sequences.shape[1] < 41
    patched = hf_cascade.patch(own(), strict=True)
    assert_same(stock, run(patched, **GREEDY, **arguments, max_new_tokens=30))


def test_a_longer_limit_among_the_criteria_falls_back():
    longer = StoppingCriteriaList([MaxLengthCriteria(max_length=25)])
    stock = run(new_model(), **GREEDY, stopping_criteria=longer)
    assert stock.sequences.shape[1] == 25
    with pytest.warns(CascadeFallbackWarning, match="MaxLengthCriteria of 25 tokens.*=19"):
        assert_same(stock, run(hf_cascade.patch(new_model()), **GREEDY, stopping_criteria=longer))
    shorter = StoppingCriteriaList([MaxLengthCriteria(max_length=14)])
    stock = run(new_model(), **GREEDY, stopping_criteria=shorter)
    patched = hf_cascade.patch(new_model(), strict=True)
    assert_same(stock, run(patched, **GREEDY, stopping_criteria=shorter))


@pytest.mark.parametrize("compile", [False, True])
def test_steps_beyond_max_length_are_an_error(compile):
    class GoesOn(modeling_llama.LlamaForCausalLM):
        checks = 0

        def _has_unfinished_sequences(self, *args, **kwargs):
            self.checks += 1
            return self.checks < 10

    model = new_model()
    model.__class__ = GoesOn
    model = hf_cascade.patch(model, compile=compile)
    with pytest.raises(UnsupportedModelError, match="beyond the 3 new tokens that max_length"):
        run(model, **GREEDY, max_new_tokens=3)


@pytest.mark.parametrize("limit", [10**10, int(1e30)])
def test_no_limit_is_a_limit_like_any_other(limit):
    """`max_length=tokenizer.model_max_length`, which is 1e30 for many."""
    arguments = GREEDY | {"max_new_tokens": None, "max_length": limit}
    arguments["eos_token_id"] = list(range(3, 30))
    stock = run(new_model(), **arguments)
    for compile in (False, True):
        patched = hf_cascade.patch(new_model(), strict=True, compile=compile)
        assert_same(stock, run(patched, **arguments))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("arguments", [{"do_sample": True}, {"num_beams": 3}])
def test_texts_may_be_longer_than_what_is_made_ahead(compile, arguments, monkeypatch):
    monkeypatch.setattr(cache, "_STEPS_AHEAD", 5)
    monkeypatch.setattr(columns, "_MOST_AHEAD", 3)
    arguments = RAGGED | arguments | {"max_new_tokens": 23}
    patched = hf_cascade.patch(new_model(), strict=True, compile=compile, page_size=2)
    for end in (None, [7, 8, 9]):
        stock = run(new_model(), **arguments, eos_token_id=end)
        assert_same(stock, run(patched, **arguments, eos_token_id=end))


# ------------------------------------------------------------------ around generate


def test_generate_may_be_called_in_compiled_code():
    model = hf_cascade.patch(new_model(), strict=True)
    compiled = torch.compile(lambda ids: model.generate(ids, **arguments), backend="eager")
    arguments = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(compiled(PROMPT["input_ids"]), run(new_model(), **GREEDY).sequences)


@pytest.mark.parametrize("at", [2, 8])
def test_a_call_within_a_call_may_be_of_another_dtype(at):
    def last_step(model):
        steps = []

        def process(ids, scores):
            steps.append(1)
            if len(steps) == at:
                with torch.autocast("cpu", torch.bfloat16):
                    model.generate(ids[:, -3:], max_new_tokens=2, do_sample=False, pad_token_id=0)
            return scores

        return [process]

    outs = []
    for model in (new_model(), hf_cascade.patch(new_model(), strict=True)):
        arguments = {"logits_processor": last_step(model), "return_dict_in_generate": True}
        outs.append(run(model, **GREEDY, **arguments))
    assert_same(*outs)
    for one, other in zip(*(o.out.past_key_values.layers for o in outs), strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-5)


def test_a_patched_model_s_class_makes_models_that_are_not_patched(tmp_path):
    model = hf_cascade.patch(new_model())
    kind = type(model)
    model.save_pretrained(tmp_path)
    expected = run(new_model(), **GREEDY)
    for made in (kind(model.config), kind.from_pretrained(tmp_path)):
        assert type(made) is modeling_llama.LlamaForCausalLM
        made.load_state_dict(model.state_dict())
        assert_same(expected, run(made.eval(), **GREEDY))
        assert_same(expected, run(hf_cascade.patch(made, strict=True), **GREEDY))
        hf_cascade.unpatch(made)


def test_a_class_that_can_t_be_set_leaves_no_trace():
    class Fixed(modeling_llama.LlamaForCausalLM):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("fixed")
            super().__setattr__(name, value)

    model = new_model()
    model.__class__ = Fixed
    with pytest.raises(TypeError, match="fixed"):
        hf_cascade.patch(model)
    assert not hasattr(model, "cascade")
    run(model, **GREEDY)


@pytest.mark.filterwarnings("ignore::hf_cascade.CascadeFallbackWarning")
def test_what_is_only_counted_does_not_fail_a_call():
    model = hf_cascade.patch(new_model())
    with pytest.raises(ValueError, match=r"past_key_values"):
        run(model, **GREEDY, past_key_values=((1, 2),))


def test_an_interruption_between_any_two_lines_gives_the_pages_back(monkeypatch):
    model, match, calls = hf_cascade.patch(new_model()), KVTree.match, []

    def interrupted(self, tokens):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return match(self, tokens)

    expected = run(new_model(), **RAGGED)
    with monkeypatch.context() as patching:
        patching.setattr(KVTree, "match", interrupted)
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                run(model, **RAGGED)
    assert model.cascade.allocator.pages_in_use == 0
    assert_same(expected, run(model, **RAGGED))
    assert model.cascade.allocator.pages_in_use == 0
