"""Tokens are drawn as torch.multinomial draws them: the same ones, by the same random stream."""

import copy
from collections.abc import Callable

import pytest
import torch
from models import new_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel

import hf_cascade
from hf_cascade.draw import Draw, replacements, select
from hf_cascade.runtime import Call

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="torch finds no CUDA device"
        ),
    ),
]
over_devices = pytest.mark.parametrize("device", DEVICES)


def multinomial(scores: Tensor) -> Tensor:
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def eager(scores: Tensor) -> Tensor:
    return select(scores, torch.empty_like(scores).exponential_())[0]


def drawn(by: Callable[[Tensor], Tensor], scores: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The tokens, and what the generator gives next."""
    torch.manual_seed(seed)
    return by(scores), torch.rand(3, device=scores.device)


@over_devices
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("vocab_size", [1, 2, 61, 509, 32000, 50257])
def test_tokens_and_stream_are_multinomial_s(vocab_size, compiled, device) -> None:
    by = Draw() if compiled else eager
    for batch in (1, 2, 17, 64):
        scores = 4 * torch.randn(batch, vocab_size, device=device)
        scores[:, 1::3] = -torch.inf  # as top-k leaves it
        for seed in range(3):
            tokens, after = drawn(by, scores, seed)
            expected, expected_after = drawn(multinomial, scores, seed)
            assert torch.equal(tokens, expected)
            assert torch.equal(after, expected_after)


@over_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision_are_drawn_from_as_in_float32(dtype, device) -> None:
    scores = (4 * torch.randn(20, 3000, device=device)).to(dtype)
    for seed in range(5):
        found, expected = (drawn(Draw(), x, seed)[0] for x in (scores, scores.float()))
        assert torch.equal(found, expected)
        assert torch.equal(found, drawn(multinomial, scores.float(), seed)[0])


@over_devices
@pytest.mark.parametrize("scale", [1e-30, 1e3, 1e30])
def test_scores_of_any_size(scale, device) -> None:
    scores = scale * torch.randn(20, 300, device=device)
    for seed in range(5):
        found, expected = (drawn(by, scores, seed)[0] for by in (eager, multinomial))
        assert torch.equal(found, expected)


def test_it_draws_by_probability() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.manual_seed(0)
    tokens = eager(probabilities.log().expand(40_000, 4))
    found = tokens.bincount(minlength=4) / len(tokens)
    assert (found - probabilities).abs().max() < 0.01


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_scores_are_an_error(bad) -> None:
    scores = torch.zeros(3, 61)
    scores[1, 17] = bad
    with pytest.raises(RuntimeError):
        multinomial(scores)
    with pytest.raises(RuntimeError, match="scores hold inf or nan"):
        Draw()(scores)


def test_a_row_without_a_token_is_an_error() -> None:
    scores = torch.zeros(3, 61)
    scores[1] = -torch.inf
    with pytest.raises(RuntimeError):
        multinomial(scores)
    with pytest.raises(RuntimeError, match="without a possible token"):
        Draw()(scores)


def test_it_does_not_change_the_scores() -> None:
    scores = torch.randn(4, 61)
    before = scores.clone()
    Draw()(scores)
    assert torch.equal(scores, before)


def test_what_does_not_fit_goes_to_torch() -> None:
    def refuse(scores: Tensor) -> Tensor:
        raise AssertionError("drawn here")

    for by, scores in (
        (None, torch.randn(4, 9)),
        (refuse, torch.randn(9)),
        (refuse, torch.randn(4, 9, dtype=torch.float64)),
        (refuse, torch.randn(0, 9)),
    ):
        names = replacements(lambda by=by: by)
        probabilities = names["nn"].functional.softmax(scores, dim=-1)
        assert torch.equal(probabilities, scores.softmax(-1))
        if scores.numel():
            torch.manual_seed(0)
            found = names["torch"].multinomial(probabilities, num_samples=1)
            torch.manual_seed(0)
            assert torch.equal(found, torch.multinomial(probabilities, num_samples=1))
    assert names["torch"].float32 is torch.float32
    assert names["nn"].Linear is torch.nn.Linear


@pytest.fixture
def stock() -> PreTrainedModel:
    return new_model("llama", eos_token_id=None)


@pytest.fixture
def draws(monkeypatch) -> list[torch.dtype]:
    """Of each draw, in what its scores came."""
    made: list[torch.dtype] = []
    call = Draw.__call__

    def recorded(self, scores):
        made.append(scores.dtype)
        return call(self, scores)

    monkeypatch.setattr(Draw, "__call__", recorded)
    return made


def generate(model: PreTrainedModel, **options) -> Tensor:
    torch.manual_seed(1)
    ids = torch.randint(3, 61, (1, 9))
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 8} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_compiled_calls_draw_here_and_others_do_not(stock, draws) -> None:
    """At first the prompt's tokens are torch's, for it is not known whether anything compiles."""
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    expected = generate(stock)
    for expected_draws in (7, 8):
        draws.clear()
        assert torch.equal(generate(model), expected)
        assert len(draws) == expected_draws
    draws.clear()
    assert torch.equal(generate(model, disable_compile=True), expected)
    assert torch.equal(generate(model, do_sample=False, num_return_sequences=1),
                       generate(stock, do_sample=False, num_return_sequences=1))  # fmt: skip
    assert not draws


def test_logits_that_nobody_else_looks_at_are_not_copied(stock, draws) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock).bfloat16(), strict=True, compile=True)
    returned = {"return_dict_in_generate": True, "output_logits": True}
    generate(model)
    for options, seen in (
        ({"top_k": 0}, torch.bfloat16),
        ({"top_k": 7}, torch.float32),
        ({"top_k": 0, "temperature": 0.5}, torch.float32),
        ({"top_k": 0} | returned, torch.float32),
    ):
        draws.clear()
        out = generate(model, **options)
        assert draws == 8 * [seen]
        if "return_dict_in_generate" in options:
            assert {logits.dtype for logits in out.logits} == {torch.float32}
            out = out.sequences
        draws.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "draw", lambda self: None)
            expected = generate(model, **options)
        assert torch.equal(out, getattr(expected, "sequences", expected))
        assert not draws


def test_draws_that_cannot_be_compiled_are_the_same(monkeypatch, caplog) -> None:
    def fail(*args):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    draw, scores = Draw(), torch.randn(4, 61)
    draw._select = fail
    for seed in range(2):
        assert torch.equal(drawn(draw, scores, seed)[0], drawn(multinomial, scores, seed)[0])
    assert caplog.text.count("drawn without a compiler: no compiler") == 1


def test_a_view_is_compiled_like_any_scores() -> None:
    draw = Draw()
    draw(torch.randn(4, 61))
    counters.clear()
    draw(torch.randn(4, 1, 61)[:, -1])
    draw(torch.randn(9, 2, 61)[:, 1])
    draw(torch.randn(1, 61).expand(5, 61))
    assert not counters["stats"]["unique_graphs"]


class WithConfidence(LlamaForCausalLM):
    """It looks at the logits in a hook between two steps."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        self.confidence = outputs.logits[:, -1].softmax(-1).amax(-1)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)


def test_a_model_s_own_hook_sees_its_logits(stock) -> None:
    model = WithConfidence(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    hf_cascade.patch(model, strict=True, compile=True)
    for _ in range(2):
        assert torch.equal(generate(model, top_k=0), generate(stock, top_k=0))
    assert model.confidence.shape == (4,)


def test_float64_is_drawn_from_as_stock_does(stock, monkeypatch) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock).double(), strict=True, compile=True)
    drawn_from: list[torch.dtype] = []
    call = torch.multinomial

    def recorded(probabilities, **options):
        drawn_from.append(probabilities.dtype)
        return call(probabilities, **options)

    generate(model, top_k=0)
    monkeypatch.setattr(torch, "multinomial", recorded)
    generate(copy.deepcopy(stock).double(), top_k=0)
    assert set(drawn_from) == {torch.float32}
    del drawn_from[:]
    seen: list[torch.dtype] = []
    draw = Draw.__call__
    monkeypatch.setattr(Draw, "__call__", lambda *args: seen.append(args[1].dtype) or draw(*args))
    generate(model, top_k=0)
    assert seen == 8 * [torch.float32]


def test_stock_generate_samples_by_these_names() -> None:
    # As globals of its loop: renamed, they would silently be left alone.
    names = GenerationMixin._sample.__code__.co_names
    assert {"nn", "functional", "softmax", "torch", "multinomial"} <= set(names)
