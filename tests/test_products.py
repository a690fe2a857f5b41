"""Steps of 24 to 127 rows, captured or soon to be, compute by cuBLASLt, and nobody notices."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from models import new_model
from torch._C import _BlasBackend as Library
from transformers import CompileConfig

import hf_cascade
from hf_cascade import compat, products, step
from hf_cascade.capture import Capturer, Graph
from hf_cascade.products import by_faster_library, is_faster_by_cublaslt
from hf_cascade.step import CompiledForward, DecodeStep

VARIABLE = "TORCH_BLAS_PREFER_CUBLASLT"


class Setting:
    """Stands for torch's, which a torch without CUDA does not let anyone change."""

    def __init__(self) -> None:
        self.library = Library.Cublas
        self.chosen: list[object] = []
        self.first_warning: str | None = None

    def __call__(self, library: str | Library | None = None) -> Library:
        if library is not None:
            self.chosen.append(library)
            self.library = Library.Cublaslt if library == "cublaslt" else library
            if self.first_warning is not None:
                text, self.first_warning = self.first_warning, None
                warnings.warn(text, stacklevel=2)
        return self.library


@pytest.fixture
def setting(monkeypatch) -> Setting:
    setting = Setting()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", setting)
    monkeypatch.delenv(VARIABLE, raising=False)
    products._let_warn.cache_clear()
    return setting


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, False), (16, False), (23, False), (24, True), (64, True), (127, True), (128, False)],
)
def test_the_rule(setting: Setting, num_rows: int, expected: bool) -> None:
    assert is_faster_by_cublaslt(num_rows) is expected
    with by_faster_library(num_rows):
        assert setting.library is (Library.Cublaslt if expected else Library.Cublas)
    assert setting.library is Library.Cublas
    assert bool(setting.chosen) is expected


def test_it_holds_until_the_last_has_left(setting: Setting) -> None:
    """As steps of other threads do, that begin and end when they like."""
    first, second = by_faster_library(64), by_faster_library(24)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert setting.library is Library.Cublaslt
    second.__exit__(None, None, None)
    assert setting.library is Library.Cublas


def test_threads_leave_nothing_behind(setting: Setting) -> None:
    """Whoever is within has cuBLASLt."""
    seen = []

    def steps() -> None:
        for _ in range(300):
            with by_faster_library(64):
                time.sleep(0)
                seen.append(setting.library)

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {Library.Cublaslt}
    assert setting.library is Library.Cublas


def test_a_choice_made_within_stays(setting: Setting) -> None:
    with by_faster_library(64):
        setting(Library.Ck)
    assert setting.library is Library.Ck


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(setting: Setting, error: type[BaseException]) -> None:
    for _ in range(2):
        with pytest.raises(error), by_faster_library(64):
            raise error
        assert setting.chosen.pop() == setting.library
        assert setting.library is Library.Cublas


@pytest.mark.parametrize(
    ("library", "variable"),
    [(Library.Cublaslt, None), (Library.Ck, None), (Library.Cublas, "0"), (Library.Cublaslt, "1")],
)
def test_the_users_choice_stays(
    setting: Setting, monkeypatch, library: Library, variable: str | None
) -> None:
    setting.library = library
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    with by_faster_library(64):
        assert setting.library is library
    assert setting.library is library
    assert not setting.chosen


def test_other_warnings_are_heard(setting: Setting) -> None:
    setting.first_warning = "torch.backends.cuda.preferred_blas_library is deprecated"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with by_faster_library(64):
            warnings.warn("of a product", stacklevel=1)
    assert [str(each.message).split()[-1] for each in heard] == ["deprecated", "product"]


def test_torch_itself_says_nothing_and_compiles_nothing_again() -> None:
    """In a process of its own: torch warns once, and past Python's warnings."""
    code = """
import torch
from hf_cascade.products import by_faster_library

library = choose = torch.backends.cuda.preferred_blas_library
if not torch.backends.cuda.is_built():  # it refuses cuBLASLt, but warns of another one
    torch.backends.cuda.preferred_blas_library = lambda name=None: choose(
        "ck" if name == "cublaslt" else name
    )
double = torch.compile(lambda x: 2 * x, backend="eager")
x = torch.ones(2)
double(x)
for num_rows in (64, 16, 64):
    print(library().name)
    with by_faster_library(num_rows), torch.compiler.set_stance("fail_on_recompile"):
        print(library().name, *double(x).tolist())
print(library().name)
"""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
    )
    other = "Cublaslt" if torch.backends.cuda.is_built() else "Ck"
    assert finished.stderr == ""
    assert finished.stdout.split("\n") == [
        "Cublas", f"{other} 2.0 2.0", "Cublas", "Cublas 2.0 2.0", "Cublas", f"{other} 2.0 2.0",
        "Cublas", "",
    ]  # fmt: skip


@pytest.fixture
def products_by(setting: Setting, monkeypatch) -> list[Library]:
    """The library of every step, where steps are captured, or seem to be: see `captured`."""
    seen: list[Library] = []
    run = CompiledForward._run

    def recorded(self, inputs):
        seen.append(setting.library)
        return run(self, inputs)

    def captured(self, function, inputs) -> Graph:
        """What is left of it without a GPU: it runs at once, and can be replayed one time."""
        outputs = function(**inputs)
        replays = iter([None])
        return Graph(SimpleNamespace(replay=lambda: next(replays)), {}, outputs)

    monkeypatch.setattr(CompiledForward, "_run", recorded)
    monkeypatch.setattr(Capturer, "capture", captured)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(step, "kernels", SimpleNamespace(serve=lambda pool: True))
    monkeypatch.setattr(
        compat,
        "DecodeStep",
        lambda forward, cache, *, captures: DecodeStep(forward, cache, captures=True),
    )
    return seen


@pytest.mark.parametrize(
    ("options", "library"),
    [
        ({"num_return_sequences": 8}, Library.Cublaslt),
        ({"num_return_sequences": 7}, Library.Cublas),
        ({"num_beams": 16, "do_sample": False}, Library.Cublaslt),
        ({"num_beams": 43, "do_sample": False}, Library.Cublas),
        ({"num_return_sequences": 16, "eos_token_id": list(range(2, 40))}, Library.Cublaslt),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value.name,
)
def test_captures_of_24_to_127_rows(
    setting: Setting, products_by: list[Library], options: dict, library: Library
) -> None:
    """Three prompts; the first step compiles, the second is captured, by the same library: a second
    call draws the same tokens. Rows that are over count."""
    model = new_model("llama")
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    options = {
        "do_sample": True,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 3,
        "compile_config": CompileConfig(backend="eager", mode=None),
    } | options
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    hf_cascade.patch(model, strict=True, compile=True)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **options), expected)
    assert products_by == [library, library]
    assert setting.library is Library.Cublas


def test_a_step_that_is_not_captured_takes_the_default(
    setting: Setting, products_by: list[Library], monkeypatch
) -> None:
    monkeypatch.setattr(step, "kernels", SimpleNamespace(serve=lambda pool: False))
    model = hf_cascade.patch(new_model("llama"), strict=True, compile=True)
    ids = torch.full((1, 9), 5)
    options = CompileConfig(backend="eager", mode=None)
    model.generate(ids, num_beams=40, max_new_tokens=3, compile_config=options)
    assert products_by == [Library.Cublas, Library.Cublas]


def test_steps_that_cannot_be_captured_take_the_default(
    setting: Setting, products_by: list[Library], monkeypatch
) -> None:
    """All but the one that was to be."""

    def fails(self, function, inputs):
        raise RuntimeError("no capture today")

    monkeypatch.setattr(Capturer, "capture", fails)
    model = hf_cascade.patch(new_model("llama"), strict=True, compile=True)
    options = CompileConfig(backend="eager", mode=None)
    model.generate(torch.full((1, 9), 5), num_beams=40, max_new_tokens=5, compile_config=options)
    assert products_by == [Library.Cublaslt] * 2 + [Library.Cublas] * 2


def test_a_step_that_is_interrupted(
    setting: Setting, products_by: list[Library], monkeypatch
) -> None:
    def interrupted(self, inputs):
        if setting.library is Library.Cublaslt:
            raise KeyboardInterrupt
        return run(self, inputs)

    run = CompiledForward._run
    monkeypatch.setattr(CompiledForward, "_run", interrupted)
    model = hf_cascade.patch(new_model("llama"), strict=True, compile=True)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            torch.full((1, 9), 5),
            do_sample=True,
            num_return_sequences=40,
            max_new_tokens=3,
            compile_config=CompileConfig(backend="eager", mode=None),
        )
    assert products_by == []
    assert setting.library is Library.Cublas
