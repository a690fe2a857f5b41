"""`patch(compile=True)`: decode steps are one graph, in which every cascade is fused."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import ClassVar
from uuid import UUID, uuid4

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from models import new_model
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CompileConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import hf_cascade
from hf_cascade import cache, loops, step_plan
from hf_cascade import capture as capturing
from hf_cascade.plan import build_layout
from hf_cascade.runtime import Cascade
from hf_cascade.step import CompiledForward
from hf_cascade.stopping import LateStopCheck

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
def patched(stock: PreTrainedModel) -> PreTrainedModel:
    torch._dynamo.reset()
    return hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)


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


def test_a_window_is_no_reason_to_compile_again() -> None:
    """Paths grow, and whether the window covers them is asked of each step, on the host."""
    model = hf_cascade.patch(new_model("mistral"), strict=True, compile=True)
    assert model.config.sliding_window
    counters.clear()
    for length in (9, 20):
        generate(model, length, rows=3, do_sample=False, num_return_sequences=1)
    assert counters["stats"]["unique_graphs"] == 1


def test_every_layer_is_fused(patched: PreTrainedModel) -> None:
    generate(patched, 9)
    assert patched.cascade.stats.fused_layers == NUM_LAYERS
    unfused = (
        {"disable_compile": True},
        {"max_new_tokens": 1},  # of prefill: no step runs
        {"compile_config": CompileConfig(backend="eager", mode=None)},
    )
    for options in unfused:
        generate(patched, 9, **options)
        assert patched.cascade.stats.fused_layers == 0
        generate(patched, 9)
        assert patched.cascade.stats.fused_layers == NUM_LAYERS


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
    assert model.cascade.stats.fused_layers == NUM_LAYERS
    assert torch.equal(tokens, generate(stock, 9, max_new_tokens=4))


class Counting(CustomGraphPass):
    """A pass of the user's; transformers copies it in every call."""

    seen: ClassVar[list[str]] = []
    run: ClassVar[UUID] = uuid4()  # or what it compiled in another one would come from the disk

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(self.name)

    def uuid(self) -> str:
        return f"{self.name} {self.run}"


def test_each_pass_of_the_users_has_its_own_compiled_steps(stock: PreTrainedModel) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    Counting.seen.clear()
    for name in ("first", "second", "first", "second"):
        config = CompileConfig(mode=None, options={"post_grad_custom_pre_pass": Counting(name)})
        generate(model, 9, compile_config=config, max_new_tokens=3)
        assert model.cascade.stats.fused_layers == NUM_LAYERS
    generate(model, 9, max_new_tokens=3)
    assert Counting.seen == ["first", "second"]


def test_copies_compile_anew(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    generate(patched, 9)
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert copied.cascade.options.compile
        assert copied.cascade.compiler is not patched.cascade.compiler
        assert torch.equal(
            generate(copied, 9, max_new_tokens=3), generate(stock, 9, max_new_tokens=3)
        )
        assert copied.cascade.stats.fused_layers == NUM_LAYERS


def test_unpatch_leaves_no_compiled_call(stock: PreTrainedModel) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    before = set(vars(stock))
    generate(model, 9, max_new_tokens=2)
    assert model.cascade.stats.fused_layers == NUM_LAYERS
    hf_cascade.unpatch(model)
    assert set(vars(model)) == before
    assert torch.equal(generate(model, 9), generate(stock, 9))


def test_one_graph_serves_all_batches(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    generate(patched, 9)
    counters.clear()
    for rows, samples in ((1, 7), (3, 1), (2, 2), (5, 3), (1, 2)):
        options = {"rows": rows, "num_return_sequences": samples}
        assert torch.equal(generate(patched, 20, **options), generate(stock, 20, **options))
    assert not counters["stats"]["unique_graphs"]


def test_steps_allocate_pages_and_nothing_else_on_the_host(patched: PreTrainedModel) -> None:
    """Between changes of the tree's shape its layout is not built again."""
    with pytest.MonkeyPatch.context() as patch:
        built: list[int] = []

        def counted(*args, **kwargs):
            built.append(1)
            return build_layout(*args, **kwargs)

        patch.setattr(step_plan, "build_layout", counted)
        patch.setattr(cache, "build_layout", counted)
        generate(patched, 9, max_new_tokens=40, min_new_tokens=40)
    assert len(built) == 2  # the prompt's and the first step's


def test_the_stop_check_is_where_it_is_replaced() -> None:
    # By its name among the globals of transformers' loop: renamed, ours would silently be left out.
    assert "DeferredStopCheck" in GenerationMixin._sample.__code__.co_names


def test_it_says_that_it_compiles(stock: PreTrainedModel, caplog) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    with caplog.at_level(logging.INFO, logger="hf_cascade"):
        generate(model, 9, max_new_tokens=3)
        generate(model, 9, max_new_tokens=3)
    said = [(r.levelname, r.getMessage().split()[0]) for r in caplog.records]
    assert said == [("WARNING", "compiling"), ("INFO", "compiled")]  # warnings are never silent


@pytest.mark.parametrize("name", ["auto", "never", 1.5, None])
def test_what_compile_can_be(stock: PreTrainedModel, name: object) -> None:
    model = copy.deepcopy(stock)
    if name == "auto":
        hf_cascade.patch(model, compile=name)
        generate(model, 9, max_new_tokens=2)
        assert model.cascade.stats.fused_layers == 0  # there is no GPU in it
    else:
        with pytest.raises(ValueError, match="compile must be"):
            hf_cascade.patch(model, compile=name)


@pytest.mark.parametrize("options", [{"num_beams": 3, "do_sample": False}, {"num_beams": 4}, {}])
def test_every_step_is_a_compiled_one(
    stock: PreTrainedModel, patched: PreTrainedModel, monkeypatch, options: dict
) -> None:
    steps: list[int] = []
    run = CompiledForward.__call__

    def counted(self, inputs):
        steps.append(1)
        return run(self, inputs)

    monkeypatch.setattr(CompiledForward, "__call__", counted)
    options = {"rows": 2, "num_return_sequences": 2} | options
    for length in (11, 30):
        steps.clear()
        assert torch.equal(generate(patched, length, **options), generate(stock, length, **options))
        assert len(steps) == patched.cascade.stats.decode_steps > 0


def test_hooks_of_accelerate_break_the_graph_and_nothing_else(stock: PreTrainedModel) -> None:
    hooked = copy.deepcopy(stock)
    for module in (*hooked.model.layers, hooked):
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    hf_cascade.patch(hooked, strict=True, compile=True)
    for length in (9, 30):
        assert torch.equal(
            generate(hooked, length, max_new_tokens=6), generate(stock, length, max_new_tokens=6)
        )
    assert hooked.cascade.stats.fused_layers == NUM_LAYERS


# Where compiling fails


@pytest.fixture
def nothing_compiled() -> None:
    """What other tests compiled counts against Dynamo's limit of recompilations."""
    torch._dynamo.reset()


def broken_compiler(graph, inputs, **options):
    raise RuntimeError("no compiler")


@pytest.mark.usefixtures("nothing_compiled")
def test_auto_goes_on_without_a_compiler(stock: PreTrainedModel, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Cascade, "compiles_on", lambda self, device: True)
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True)
    config = CompileConfig(backend=broken_compiler)
    for _ in range(2):
        assert torch.equal(generate(model, 9, compile_config=config), generate(stock, 9))
    assert model.cascade.stats.fused_layers == 0
    beginning, failure = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert beginning.startswith("compiling")
    assert "no compiler" in failure


@pytest.mark.usefixtures("nothing_compiled")
def test_asked_for_it_is_an_error(stock: PreTrainedModel) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no compiler"):
        generate(model, 9, compile_config=CompileConfig(backend=broken_compiler))


# Traced and not generated code for: what Dynamo decides, in little time.
TRACED = {"compile_config": CompileConfig(backend="eager", fullgraph=True, mode=None)}


@pytest.fixture
def two_recompilations(nothing_compiled: None) -> Iterator[None]:
    """Dynamo's limit for a function, 8 as a rule."""
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("two_recompilations")
def test_any_number_of_models_compile_in_a_process(stock: PreTrainedModel) -> None:
    expected = generate(stock, 9, max_new_tokens=4)
    model = copy.deepcopy(stock)
    for _ in range(3):  # each time it is patched it is compiled anew
        hf_cascade.patch(model, strict=True, compile=True)
        assert torch.equal(generate(model, 9, max_new_tokens=4, **TRACED), expected)
        hf_cascade.unpatch(model)


def change_of_dtype(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    for dtype in (torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float32):
        yield model.to(dtype)


@pytest.mark.usefixtures("two_recompilations")
def test_auto_goes_on_where_known_shapes_need_one_compilation_too_many(
    stock: PreTrainedModel, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(Cascade, "compiles_on", lambda self, device: True)
    stock, model = (copy.deepcopy(stock) for _ in range(2))
    hf_cascade.patch(model, strict=True)
    for expected, found in zip(change_of_dtype(stock), change_of_dtype(model), strict=True):
        tokens = generate(found, 9, max_new_tokens=4, **TRACED)
        if expected.dtype != torch.bfloat16:  # which has ties
            assert torch.equal(tokens, generate(expected, 9, max_new_tokens=4))
    beginning, failure = (r.getMessage() for r in caplog.records if r.name == "hf_cascade")
    assert beginning.startswith("compiling")
    assert "recompile limit exceeded" in failure


@pytest.mark.usefixtures("two_recompilations")
def test_one_compilation_too_many_says_what_it_was(stock: PreTrainedModel) -> None:
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True, compile=True)
    for dtype in (torch.float32, torch.float64):
        generate(model.to(dtype), 9, max_new_tokens=4, **TRACED)
    model.to(torch.bfloat16)
    with pytest.raises(Exception, match=r"step of .*Llama.* could not .*recompile limit exceeded"):
        generate(model, 9, max_new_tokens=4, **TRACED)


class Watching(TorchDispatchMode):
    """Dynamo compiles nothing under a mode of the user's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("nothing_compiled")
def test_auto_goes_on_where_the_compiler_passes_over_the_step(
    stock: PreTrainedModel, monkeypatch
) -> None:
    monkeypatch.setattr(Cascade, "compiles_on", lambda self, device: True)
    model = hf_cascade.patch(copy.deepcopy(stock), strict=True)
    with Watching():
        tokens = generate(model, 9, max_new_tokens=4)
    assert torch.equal(tokens, generate(stock, 9, max_new_tokens=4))
    assert model.cascade.stats.fused_layers == 0


# The late stop check, which is a GPU's


@pytest.fixture
def late(monkeypatch) -> None:
    monkeypatch.setattr(
        LateStopCheck,
        "is_supported",
        staticmethod(lambda device, cache, is_returned, **_: cache.may_step_too_far),
    )


EARLY_ENDS = {"eos_token_id": list(range(2, 40)), "num_return_sequences": 2}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("options", [{}, EARLY_ENDS, EARLY_ENDS | {"num_return_sequences": 1}])
def test_a_late_stop_changes_nothing(
    stock: PreTrainedModel, patched: PreTrainedModel, late: None, compiled: bool, options: dict
) -> None:
    for length in range(5, 15):
        expected, state = generate(stock, length, **options), torch.get_rng_state()
        found = generate(patched, length, disable_compile=not compiled, **options)
        assert torch.equal(found, expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert patched.cascade.stats.decode_steps == found.shape[1] - length - 1


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.is_ended
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.is_ended = True


@pytest.mark.parametrize("options", [{}, {"eos_token_id": list(range(2, 40))}])
def test_a_late_stop_streams_the_same_tokens(
    stock: PreTrainedModel, patched: PreTrainedModel, late: None, options: dict
) -> None:
    for length in (5, 6, 7):
        streamers = Recorder(), Recorder()
        for model, streamer in zip((stock, patched), streamers, strict=True):
            generate(model, length, streamer=streamer, num_return_sequences=1, **options)
        assert streamers[0].tokens == streamers[1].tokens
        assert streamers[1].is_ended


def test_what_watches_the_steps_sees_stock_s(
    stock: PreTrainedModel, patched: PreTrainedModel, late: None
) -> None:
    def lengths_seen(model: PreTrainedModel) -> list[int]:
        seen: list[int] = []

        def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(ids.shape[1])
            return scores

        generate(model, 9, logits_processor=LogitsProcessorList([watch]), **EARLY_ENDS)
        return seen

    assert lengths_seen(patched) == lengths_seen(stock)


def test_criteria_say_what_stock_s_say() -> None:
    """Those of length are not asked before they have something to say, or to warn of."""

    class AfterSeven(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] == 7) & (input_ids.shape[1] > 6)

    for criteria in (
        [],
        [MaxLengthCriteria(9)],
        [MaxLengthCriteria(9, max_position_embeddings=6), EosTokenCriteria(2)],
        [EosTokenCriteria(2), AfterSeven(), MaxLengthCriteria(9)],
    ):
        stock = StoppingCriteriaList(criteria)
        ours = loops.Criteria(stock)
        assert ours.max_length == stock.max_length
        for batch in (3, 1, 3):
            for length in range(5, 11):
                ids = torch.randint(2, 9, (batch, length))
                assert torch.equal(ours(ids, None), stock(ids, None))


def test_a_capture_in_another_thread_does_not_keep_a_step_from_compiling():
    """Captures forbid to recompile, and torch knows one such stance for all threads."""
    is_captured, has_compiled = threading.Event(), threading.Event()
    compiled = torch.compile(lambda x: x + 1, backend="eager")

    def capture() -> None:
        is_captured.set()
        has_compiled.wait(timeout=1)  # it can't: it waits for this to end

    def hold_the_stance() -> None:
        with capturing._lock:  # as Capturer.capture does
            capturing.without_recompiling(capture)

    thread = threading.Thread(target=hold_the_stance)
    thread.start()
    assert is_captured.wait(timeout=60)
    with pytest.raises(RuntimeError, match="recompile"):
        compiled(torch.zeros(2))
    assert torch.equal(capturing.beside_captures(lambda: compiled(torch.zeros(2))), torch.ones(2))
    has_compiled.set()
    thread.join()


def test_a_stance_of_the_user_s_own_is_heeded():
    compiled = torch.compile(lambda x: x + 2, backend="eager")
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompile"),
    ):
        capturing.beside_captures(lambda: compiled(torch.zeros(2)))
