"""`patch` and `unpatch`: the two functions that a user needs."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel

from .compat import (
    COMPILED_ATTRIBUTES,
    CascadeGenerate,
    cascade_class,
    check_version,
    original_class,
)
from .errors import UnsupportedModelError
from .gates import model_obstacles
from .packing import unpack_linears
from .runtime import Cascade, Options

Model = TypeVar("Model", bound=torch.nn.Module)


def patch(
    model: Model,
    *,
    page_size: int = 16,
    max_pages: int | None = None,
    strict: bool = False,
    compile: bool | Literal["auto"] = "auto",
    pack_linears: bool = False,
    batch_invariant: bool = False,
) -> Model:
    """Make `model.generate` compute, store and read shared prefixes once.

    Rows of a call share whatever they have in common: samples of one prompt, beams, identical
    rows, prompts with common beginnings. Outside `generate` the model is what it was. Calls that
    can't be served run on stock transformers, with a CascadeFallbackWarning once a reason.

    Patching a patched model is harmless; with other options it starts anew with those.

    Args:
        model: a decoder-only transformers model on any device, or a PEFT model around one.
        page_size: tokens per page of KV, one of 1, 2, 4, .., 128. The CUDA kernels need 16 or more:
            with less, torch operators take their place (`model.cascade.stats.backend`).
        max_pages: most pages in use at once; a page holds page_size tokens in every layer. None is
            no limit but memory. A call that needs more raises OutOfPagesError.
        strict: raise UnsupportedCallError instead of falling back.
        compile: run the decode steps (samples, greedy search and beams) through torch.compile, with
            cascades fused (`fuse_pass`), and on a GPU as one CUDA graph. The first call takes
            long and logs a warning that it does; later ones reuse what was compiled. "auto" does
            so on a GPU, and where compiling fails it runs the steps as they are.
        pack_linears: lay the weights of layers that read the same input (q, k and v; gate and up)
            side by side, so that a compiled step multiplies by them at once. They stay the
            parameters they are, but `torch.save(layer.weight)` writes all that lie with it, also
            after `unpatch`, which leaves them there: save a clone.
        batch_invariant: for the CUDA kernels, cut each part of the KV by its own length alone and
            not by what is fastest for the whole batch: the bits of a decoded row's attention then
            do not depend on the other rows, at some cost in speed. That is, as long as these share
            its prompt up to the same places (another prompt that leaves it midway divides what was
            one part), and as partial states fit (`ops.work_list`). Matrix products, which are
            torch's, may still depend on their number. Elsewhere (on the CPU, say) nothing changes.
    Returns:
        `model` itself. `model.cascade` has `stats`, `describe()`, `strict()` and `release()`.
    Raises:
        UnsupportedModelError: the model can't be served, or this version of transformers is not
            one that was tested; the message names what is in the way.
        ValueError: an option is out of range.
    """
    options = Options(
        page_size=page_size,
        max_pages=max_pages,
        strict=strict,
        compile=compile,
        pack_linears=pack_linears,
        batch_invariant=batch_invariant,
    )
    check_version()
    base = _base_model(model)
    if isinstance(base, CascadeGenerate):
        if base.cascade.options == options:
            return model
        unpatch(model)
    obstacles = model_obstacles(base, GenerationMixin)
    if hasattr(base, "cascade"):
        obstacles.append("it has an attribute `cascade` of its own")
    if obstacles:
        raise UnsupportedModelError(
            f"{type(base).__name__} can't be patched: {'; '.join(obstacles)}"
        )
    base.cascade = Cascade(options)
    try:
        base.__class__ = cascade_class(type(base))  # type: ignore[arg-type]
    except BaseException:
        del base.cascade
        raise
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch` and give the page pool back; harmless on a model that is not patched.

    Returns:
        `model` itself, as it was before `patch`.
    """
    base = _base_model(model)
    if isinstance(base, CascadeGenerate):
        with base.cascade.lock:  # not under a call of another thread
            base.cascade.release()
            unpack_linears(base)
            for name in COMPILED_ATTRIBUTES:
                vars(base).pop(name, None)
            base.__class__ = original_class(type(base))
            del base.cascade  # last: a patched model has one at any time
    return model


def _base_model(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not (isinstance(base, PreTrainedModel) and isinstance(base, GenerationMixin)):
        advice = ""
        if isinstance(getattr(base, "model", None), GenerationMixin):  # of a pipeline
            advice = ": patch its `.model`"
        elif isinstance(getattr(base, "_orig_mod", None), GenerationMixin):  # of torch.compile
            advice = ": patch the model that was compiled, with compile=True to compile its steps"
        raise UnsupportedModelError(
            f"a transformers model with generate is needed, got {type(base).__name__}{advice}"
        )
    return base
