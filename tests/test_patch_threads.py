"""While a patched model generates: calls take turns, whatever else uses the model gets stock
attention, and an interruption leaves no trace.
"""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from models import (
    PROMPT,
    RAGGED,
    assert_same,
    batch,
    new_model,
    run,
    tokens,
)
from transformers import LlamaForCausalLM, LogitsProcessorList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_cascade

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 2}


# Threads


def in_threads(*functions) -> None:
    """Run the functions at once; raises what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def guarded(function):
        try:
            start.wait()
            function()
        except BaseException as error:  # whatever it is, it belongs to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def greedily(model, prompt: dict):
    """A function that generates greedily (random numbers are common to all threads) and checks."""
    expected = new_model().generate(**prompt, max_new_tokens=12, do_sample=False, num_beams=1)

    def check():
        for _ in range(4):
            out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
            assert torch.equal(out, expected)

    return check


def test_threads_on_one_model_take_turns():
    model = hf_cascade.patch(new_model(), page_size=2, strict=True)
    running, most = [0], [0]
    call = model.cascade.call

    def counted():
        context = call()

        class Counted:
            def __enter__(self):
                entered = context.__enter__()
                running[0] += 1
                most[0] = max(most[0], running[0])
                return entered

            def __exit__(self, *error):
                running[0] -= 1
                return context.__exit__(*error)

        return Counted()

    model.cascade.call = counted
    in_threads(*(greedily(model, batch(tokens(9, seed=s), tokens(5, seed=s))) for s in range(4)))
    assert most == [1]
    assert model.cascade.allocator.pages_in_use == 0


@pytest.mark.parametrize("then", ["unpatched", "patched anew"])
def test_a_call_that_waited_runs_on_the_model_as_it_then_is(then):
    model = hf_cascade.patch(new_model())
    expected = new_model().generate(**RAGGED, max_new_tokens=4, do_sample=False)
    old, waits = model.cascade, threading.Event()
    lock, found = old.lock, []

    class Noted:
        """The lock, which tells when someone comes to it."""

        def __enter__(self):
            waits.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(model.generate(**RAGGED, max_new_tokens=4, do_sample=False))

    with lock:
        old.lock = Noted()
        thread = threading.Thread(target=call)
        thread.start()
        assert waits.wait(timeout=60)
        hf_cascade.unpatch(model)
        if then == "patched anew":
            hf_cascade.patch(model)
    thread.join()
    assert torch.equal(found[0], expected)
    if then == "patched anew":
        assert model.cascade is not old
        assert model.cascade.stats.path == "cascade"


def test_models_made_from_one_config_generate_in_threads():
    first = hf_cascade.patch(new_model(), strict=True)
    second = LlamaForCausalLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    hf_cascade.patch(second, strict=True)
    in_threads(greedily(first, RAGGED), greedily(second, PROMPT), greedily(second, RAGGED))
    assert first.config._attn_implementation == "sdpa"
    assert "cascade" not in str(vars(first.config))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_forward_passes_in_other_threads_are_stock(implementation):
    model = new_model()
    model.set_attn_implementation(implementation)
    expected = model(**RAGGED).logits
    hf_cascade.patch(model, strict=True)

    def forward():
        for _ in range(60):
            assert torch.equal(model(**RAGGED).logits, expected)

    in_threads(greedily(model, RAGGED), forward, forward)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_straggler_gets_the_model_s_own_attention(implementation):
    """A forward pass may look the function up while generate runs, and call it thereafter."""
    model = new_model()
    model.set_attn_implementation(implementation)
    attention = model.model.layers[0].self_attn
    q, k, v = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    hf_cascade.patch(model)
    straggler = ALL_ATTENTION_FUNCTIONS["hf_cascade"]
    own = ALL_ATTENTION_FUNCTIONS.get_interface(
        implementation, __import__(type(model).__module__, fromlist="x").eager_attention_forward
    )
    mask = None if implementation == "sdpa" else torch.full((6, 6), -1e9).triu(1)[None, None]
    arguments = (attention, q, k[:, :2], v[:, :2], mask)
    expected = own(*arguments, scaling=0.3, dropout=0.0)[0]
    assert torch.equal(straggler(*arguments, scaling=0.3, dropout=0.0)[0], expected)


# An interrupted call


class Interruption(BaseException):
    """Neither an Exception nor expected by anyone, like KeyboardInterrupt."""


def interrupting(error: type[BaseException], at: int) -> LogitsProcessorList:
    steps = iter(range(100))

    def interrupt(ids, scores):
        if next(steps) == at:
            raise error("enough")
        return scores

    return LogitsProcessorList([interrupt])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Interruption])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_interruption_leaves_no_trace(error, at, beams):
    model = hf_cascade.patch(new_model(), page_size=2, strict=True)
    run(model, **SAMPLED)
    stats = model.cascade.stats
    with pytest.raises(error, match="enough"):
        run(model, **RAGGED, num_beams=beams, logits_processor=interrupting(error, at))
    assert model.cascade.allocator.pages_in_use == 0
    assert model.cascade.stats is stats
    assert model.config._attn_implementation == "sdpa"
    assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))
    assert model.cascade.current is None


def test_an_interruption_within_the_forward_pass_leaves_no_trace():
    for at in range(1, 6):
        model = hf_cascade.patch(new_model(), strict=True)
        calls = iter(range(100))

        def interrupt(module, args, at=at, calls=calls):
            if next(calls) == at:
                raise KeyboardInterrupt

        hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, **SAMPLED)
        hook.remove()
        assert model.cascade.allocator.pages_in_use == 0
        assert_same(run(new_model(), **SAMPLED), run(model, **SAMPLED))


def test_the_lock_is_free_after_an_interruption():
    model = hf_cascade.patch(new_model(), strict=True)
    with pytest.raises(KeyboardInterrupt):
        run(model, **SAMPLED, logits_processor=interrupting(KeyboardInterrupt, 2))
    in_threads(greedily(model, PROMPT))
