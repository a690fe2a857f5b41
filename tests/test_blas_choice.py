"""Captured steps multiply by the library that is faster; a process notices nothing of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import new_model
from peft import LoraConfig, get_peft_model
from torch.nn import Linear

import hf_cascade
from hf_cascade import blas_choice
from hf_cascade.blas_choice import BlasChoice, Times, measured, products_of, saving
from hf_cascade.packing import operands, pack_linears

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Switch:
    """Torch's, as it is on a GPU: it warns whoever asks for what is not the default."""

    def __init__(self) -> None:
        self.now = "Cublas"
        self.history: list[str] = []

    def __call__(self, library: Any = None) -> Any:
        if library is not None:
            self.now = "Cublaslt" if library == "cublaslt" else library.name
            self.history.append(self.now)
            if self.now != "Cublas":
                warnings.warn(
                    "torch.backends.cuda.preferred_blas_library is an experimental feature. "
                    "If you see any error",
                    stacklevel=2,
                )
        return getattr(torch._C._BlasBackend, self.now)


@pytest.fixture
def switch(monkeypatch) -> Switch:
    switch = Switch()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", switch)
    return switch


@pytest.fixture
def timed(monkeypatch) -> Callable[..., list[int]]:
    """Says what products take; returns the numbers of rows that are then asked for."""

    def say(cublas_us: float, cublaslt_us: float) -> list[int]:
        rows_asked: list[int] = []

        def measured(products: Any, rows: int, capturer: Any) -> Times:
            rows_asked.append(rows)
            return [(1, cublas_us, cublaslt_us)]

        products = {("shape",): [(None, None)]}
        monkeypatch.setattr(blas_choice, "products_of", lambda model, device: products)
        monkeypatch.setattr(blas_choice, "measured", measured)
        return rows_asked

    return say


class Uncaptured:
    """A capturer whose graphs say under which preference they were made."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def capture(self, function: Callable[[], None], inputs: dict[str, Any]) -> Any:
        return SimpleNamespace(library=self.switch.now, inputs=inputs)


def library_of(choice: BlasChoice, switch: Switch, rows: int = 64, device=GPU) -> str:
    with choice.preferred(None, device, rows):
        return switch.now


def half_model(**options):
    return new_model(**options).to(torch.bfloat16)


def counts(model, device=CPU) -> dict[tuple[int, ...], int]:
    return {tuple(kind[0]): len(each) for kind, each in products_of(model, device).items()}


def test_what_counts_is_all_products_together() -> None:
    once, often, oftener = (1, 300.0, 200.0), (32, 10.0, 11.0), (320, 10.0, 11.0)
    assert saving([once]) == pytest.approx(1 / 3)
    assert saving([often]) == pytest.approx(-0.1)
    assert saving([once, often]) == pytest.approx(68 / 620)
    assert saving([once, oftener]) < 0


@pytest.mark.parametrize(
    ("cublaslt_us", "library"),
    [
        (50.0, "Cublaslt"),
        (97.9, "Cublaslt"),
        (98.1, "Cublas"),
        (100.0, "Cublas"),
        (105.0, "Cublas"),
    ],
)
def test_another_library_has_to_win_clearly(switch, timed, cublaslt_us, library) -> None:
    timed(100.0, cublaslt_us)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library_of(BlasChoice(None), switch) == library
    assert switch.now == "Cublas"
    assert switch.history == ([] if library == "Cublas" else ["Cublaslt", "Cublas"])


def test_each_number_of_rows_is_measured_once(switch, timed, caplog) -> None:
    rows_asked, choice = timed(100.0, 90.0), BlasChoice(None)
    with caplog.at_level(logging.INFO, "hf_cascade"):
        for rows in (64, 64, 256, 64, 256):
            assert library_of(choice, switch, rows) == "Cublaslt"
    assert rows_asked == [64, 256]
    assert [record.getMessage()[:37] for record in caplog.records] == [
        "steps of 64 rows multiply by cuBLASLt",
        "steps of 256 rows multiply by cuBLASL",
    ]


def test_a_capture_that_fails_leaves_the_preference(switch, timed) -> None:
    timed(100.0, 90.0)
    choice = BlasChoice(None)

    def capture() -> None:
        with choice.preferred(None, GPU, 64):
            assert switch.now == "Cublaslt"
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            capture()
        assert switch.now == "Cublas"


def test_a_measurement_that_fails_is_not_repeated(switch, timed, monkeypatch, caplog) -> None:
    timed(100.0, 90.0)
    asked: list[int] = []

    def fail(products: Any, rows: int, capturer: Any) -> Times:
        asked.append(rows)
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(blas_choice, "measured", fail)
    choice = BlasChoice(None)
    with caplog.at_level(logging.INFO, "hf_cascade"):
        assert [library_of(choice, switch) for _ in range(2)] == ["Cublas"] * 2
    assert asked == [64]
    assert "no room" in caplog.text


def prefer(monkeypatch, switch) -> None:
    switch.now = "Cublaslt"


def no_switch(monkeypatch, switch) -> None:
    monkeypatch.delattr(torch.backends.cuda, "preferred_blas_library")


def rocm(monkeypatch, switch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")


def deterministic(monkeypatch, switch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize("setting", [prefer, no_switch, rocm, deterministic])
def test_nothing_is_measured_where_there_is_no_choice(switch, timed, monkeypatch, setting) -> None:
    rows_asked = timed(100.0, 50.0)
    setting(monkeypatch, switch)
    library_of(BlasChoice(None), switch)
    assert rows_asked == switch.history == []


def test_nothing_is_measured_for_a_single_row_or_a_cpu(switch, timed) -> None:
    rows_asked, choice = timed(100.0, 50.0), BlasChoice(None)
    library_of(choice, switch, rows=1)
    library_of(choice, switch, device=CPU)
    assert rows_asked == switch.history == []


def test_products_are_those_of_a_compiled_step() -> None:
    model = half_model()
    assert counts(model) == {(32, 32): 4, (16, 32): 4, (48, 32): 4, (32, 48): 2, (64, 32): 1}
    pack_linears(model)
    assert counts(model) == {(64, 32): 3, (32, 32): 2, (96, 32): 2, (32, 48): 2}


def test_a_packed_product_has_no_bias() -> None:
    model = half_model(name="qwen2")
    for packs in (False, True):
        if packs:
            pack_linears(model)
        q_proj = model.model.layers[0].self_attn.q_proj
        _, bias = operands(q_proj)
        assert (bias is None) is packs


def wrap_in_lora(model) -> None:
    get_peft_model(model, LoraConfig(target_modules="all-linear"))
    model.lm_head = torch.nn.Identity()


def hook(model) -> None:
    model._hf_hook = object()


class Other(Linear):
    pass


def change_class(model) -> None:
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = Other


@pytest.mark.parametrize(
    "change",
    [
        wrap_in_lora,
        hook,
        change_class,
        lambda model: model.float(),
        lambda model: model.to("meta"),
    ],
    ids=["lora", "hook", "class", "float32", "meta"],
)
def test_what_is_not_plain_does_not_count(switch, monkeypatch, change) -> None:
    model = half_model()
    change(model)
    assert counts(model) == {}
    monkeypatch.setattr(blas_choice, "measured", lambda *_: pytest.fail("nothing to measure"))
    with BlasChoice(None).preferred(model, GPU, 64):
        assert switch.now == "Cublas"


def test_quantized_weights_do_not_count() -> None:
    class Quantized(torch.Tensor):
        pass

    model = half_model()
    layer = model.lm_head
    before = counts(model)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    assert counts(model) == {k: n for k, n in before.items() if k != (64, 32)}


@pytest.mark.parametrize("rows", [2, 300])
def test_both_libraries_multiply_by_the_same_weights(switch, monkeypatch, rows) -> None:
    products = {
        "many": [(torch.ones(24, 16), None) for _ in range(32)],
        "few": [(torch.ones(40, 24), torch.ones(40)) for _ in range(3)],
    }
    multiplied: list[tuple[str, Any, int]] = []
    monkeypatch.setattr(
        blas_choice,
        "linear",
        lambda x, weight, bias: multiplied.append((switch.now, x.shape, id(weight))),
    )

    def medians(graphs) -> list[float]:
        assert [graph.library for graph in graphs] == ["Cublas", "Cublaslt"] * 2
        # What a graph reads is its own, or is gone when it is replayed.
        assert [graph.inputs["x"].shape[1] for graph in graphs] == [16, 16, 24, 24]
        return [80.0, 160.0, 30.0, 15.0]

    monkeypatch.setattr(blas_choice, "_medians_us", medians)
    state = torch.get_rng_state()
    found = measured(products, rows, Uncaptured(switch))
    assert torch.equal(torch.get_rng_state(), state)
    assert found == [(32, 10.0, 20.0), (3, 10.0, 5.0)]
    by_cublas = [each[1:] for each in multiplied if each[0] == "Cublas"]
    assert by_cublas == [each[1:] for each in multiplied if each[0] == "Cublaslt"]
    assert [shape for shape, _ in by_cublas] == [(rows, 16)] * 8 + [(rows, 24)] * 3
    assert len({weight for _, weight in by_cublas}) == 11
    assert switch.now == "Cublas"


def test_only_packed_models_choose() -> None:
    for pack in (False, True):
        model = hf_cascade.patch(new_model(), pack_linears=pack)
        assert (model.cascade.compiler.blas is not None) is pack
