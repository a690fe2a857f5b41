"""Decode steps on a GPU: compiled, captured once a call, replayed without a sync."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from hf_cascade.ops import kernels
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_cascade
from hf_cascade.capture import Capturer, Graph
from hf_cascade.products import by_faster_library
from hf_cascade.step import CompiledForward, DecodeStep
from hf_cascade.stopping import LateStopCheck

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and kernels.load().library is None,
        reason="no CUDA kernels to capture",
    ),
]
NUM_LAYERS = 3
VOCAB_SIZE = 509


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def patched(stock: PreTrainedModel) -> Iterator[PreTrainedModel]:
    torch._dynamo.reset()
    yield hf_cascade.patch(copy.deepcopy(stock), strict=True)
    torch.cuda.synchronize()


@pytest.fixture
def captures(monkeypatch) -> list[Graph | None]:
    """The graphs captured during the test; None for those that failed."""
    made: list[Graph | None] = []
    capture = Capturer.capture

    def recorded(self, *args):
        made.append(None)
        made[-1] = capture(self, *args)
        return made[-1]

    monkeypatch.setattr(Capturer, "capture", recorded)
    return made


def generate(model: PreTrainedModel, length: int, rows: int = 1, **options) -> torch.Tensor:
    torch.manual_seed(length)
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), device="cuda")
    ids[1:, : length // 2] = ids[0, : length // 2]
    options = {
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": 6,
        "max_new_tokens": 40,
        "eos_token_id": None,
    } | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def uncaptured(model: PreTrainedModel, length: int, **options) -> torch.Tensor:
    """The same compiled steps, launched one kernel at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledForward, "captured", lambda self, cache, inputs: None)
        return generate(model, length, **options)


def test_one_graph_serves_all_lengths_and_steps(patched, captures) -> None:
    generate(patched, 9)
    captures.clear()
    counters.clear()
    for length in (5, 16, 17, 130, 700):
        found = generate(patched, length, max_new_tokens=200)
        assert torch.equal(found, uncaptured(patched, length, max_new_tokens=200))
    # The pool grows once or twice in such a call, and what wrote to the old one is captured anew.
    assert len(captures) >= 5
    assert None not in captures
    assert not counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    assert patched.cascade.stats.fused_layers == NUM_LAYERS


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 3},
        {"num_return_sequences": 1},
        {"rows": 2, "num_return_sequences": 1},
        {"num_return_sequences": 150},
        {"rows": 2, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": False, "num_return_sequences": 1},
        {"eos_token_id": list(range(2, 40))},
        {"eos_token_id": list(range(2, 300)), "num_return_sequences": 2},
    ],
    ids=lambda options: "+".join(options),
)
def test_tokens_are_those_of_uncaptured_steps(patched, captures, options) -> None:
    for length in (20, 33):
        generate(patched, length, **options)
        captures.clear()
        found, state = generate(patched, length, **options), torch.cuda.get_rng_state()
        assert None not in captures
        assert torch.equal(found, uncaptured(patched, length, **options))
        assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("samples", [33, 64])
def test_captured_products_are_by_the_faster_library(
    patched, captures, monkeypatch, samples
) -> None:
    """All others, those of the prompt among them, are by what was set before."""
    before = torch.backends.cuda.preferred_blas_library()
    options = {"num_return_sequences": samples}
    generate(patched, 20, **options)  # compiles, or runs this shape's first step uncaptured
    found = generate(patched, 20, **options)
    assert len(captures) >= 2
    assert None not in captures
    assert torch.backends.cuda.preferred_blas_library() == before
    run = CompiledForward._run

    def run_by_faster_library(self, inputs):
        with by_faster_library(samples):
            return run(self, inputs)

    monkeypatch.setattr(CompiledForward, "_run", run_by_faster_library)
    assert torch.equal(found, uncaptured(patched, 20, **options))
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("samples", [1, 6])
def test_logits_are_as_exact_as_stock_s(stock, patched, samples) -> None:
    """Of forced tokens, against float32; stock errs by its own rounding."""
    script = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0))
    length = 50
    options = {
        "prefix_allowed_tokens_fn": lambda row, ids: [int(script[len(ids) - length])],
        "return_dict_in_generate": True,
        "output_logits": True,
        "max_new_tokens": len(script),
        "num_return_sequences": samples,
    }
    truth, theirs, ours = (
        torch.stack(generate(model, length, **options).logits).log_softmax(-1)
        for model in (copy.deepcopy(stock).float(), stock, patched)
    )
    assert (ours - truth).abs().max() <= 1.5 * (theirs - truth).abs().max()


def test_a_step_never_waits_for_the_gpu(patched, monkeypatch) -> None:
    """From the first step of a call to the end of its loop."""
    options = {"eos_token_id": list(range(2, 12)), "max_new_tokens": 60}
    for _ in range(2):
        generate(patched, 40, **options)
    steps: list[int] = []
    run, finish = DecodeStep.__call__, LateStopCheck.finish

    def strict(self, **inputs):
        torch.cuda.set_sync_debug_mode("error")
        steps.append(1)
        return run(self, **inputs)

    def relaxed(self):
        torch.cuda.set_sync_debug_mode("default")
        return finish(self)

    monkeypatch.setattr(DecodeStep, "__call__", strict)
    monkeypatch.setattr(LateStopCheck, "finish", relaxed)
    try:
        generate(patched, 40, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) > 20


def test_late_stops_change_neither_tokens_nor_the_random_state(stock, patched) -> None:
    """A greedy, then a sampled call: the state that the first leaves behind shows in the second."""
    for length in range(10, 20):
        options = {"eos_token_id": list(range(2, 200)), "num_return_sequences": 2}
        found = generate(patched, length, **options)
        state = torch.cuda.get_rng_state()
        steps = patched.cascade.stats.decode_steps
        assert steps == found.shape[1] - length - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateStopCheck, "is_supported", staticmethod(lambda *args, **_: False))
            assert torch.equal(generate(patched, length, **options), found)
        assert torch.equal(torch.cuda.get_rng_state(), state)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_a_worker_thread_streams(patched, captures) -> None:
    options = {"num_return_sequences": 1, "max_new_tokens": 30}
    expected = generate(patched, 21, **options)
    captures.clear()
    streamer = Recorder()
    thread = threading.Thread(
        target=lambda: generate(patched, 21, streamer=streamer, **options), name="worker"
    )
    thread.start()
    thread.join()
    assert streamer.tokens == expected[0].tolist()
    assert len(captures) == 1


def test_interrupted_calls_leave_nothing(patched) -> None:
    def interrupt(ids, scores):
        if ids.shape[1] > 50:
            raise KeyboardInterrupt
        return scores

    expected = generate(patched, 40)
    with pytest.raises(KeyboardInterrupt):
        generate(patched, 40, logits_processor=LogitsProcessorList([interrupt]))
    assert torch.equal(generate(patched, 40), expected)


def test_memory_comes_back(patched) -> None:
    for _ in range(2):
        generate(patched, 40)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        generate(patched, 40)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_step_that_cannot_be_captured_still_runs(stock, captures, caplog) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        print_sum(out := forward(x))
        return out

    mlp.forward = watched
    for length in (12, 13, 14):
        assert torch.equal(
            generate(model, length, do_sample=False, num_return_sequences=1, max_new_tokens=9),
            uncaptured(model, length, do_sample=False, num_return_sequences=1, max_new_tokens=9),
        )
    assert captures == [None]
    assert "without a CUDA graph" in caplog.text


@torch.compiler.disable
def print_sum(out: torch.Tensor) -> None:
    assert out.sum().item() == out.sum().item()


def test_work_lists_are_as_large_as_their_fake_says() -> None:
    """The compiler asserts it."""
    for num_seqs, num_pages in ((1, 2), (6, 40), (300, 9000)):
        index = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        zeros = torch.zeros(num_seqs, dtype=torch.int32, device="cuda")
        arguments = (index, index * 0, torch.zeros(num_pages, dtype=torch.int32, device="cuda"),
                     zeros, zeros, zeros, index * 0, zeros, 16, 8, 2, 64)  # fmt: skip
        op = torch.ops.hf_cascade.work_list.default
        with torch._subclasses.FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                        for x in arguments))  # fmt: skip
        assert op(*arguments).shape == fake.shape
