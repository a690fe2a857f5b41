"""The op namespace `torch.ops.hf_cascade`: how an op is declared, and why it has no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import kernels

LIBRARY = torch.library.Library("hf_cascade", "DEF")


def define(schema: str, *, implementation: Callable, fake: Callable) -> None:
    """Declare `hf_cascade::<schema>`.

    Args:
        schema: name, arguments and returns as torch.library writes them; an argument that the op
            writes into is marked `Tensor(a!)`.
        implementation: composed of torch operators, serves every device without a kernel. It is
            also `hf_cascade::composed_<name>`, to which a CUDA kernel hands what does not fit it.
        fake: shapes and dtypes of the results, for tracing; checks as the implementation does.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.define(f"composed_{schema}")
    LIBRARY.impl(f"composed_{name}", implementation, "CompositeExplicitAutograd")
    LIBRARY.impl(name, _with_kernels(name, implementation), "CompositeExplicitAutograd")
    LIBRARY.impl(name, _without_gradient(name), "Autograd")
    torch.library.register_fake(f"hf_cascade::{name}", fake, lib=LIBRARY)


def _with_kernels(name: str, implementation: Callable) -> Callable:
    """`implementation`, but the first call with a CUDA tensor looks for the kernels first."""

    def served(*args):
        if args[0].is_cuda and kernels.load().library:
            return getattr(torch.ops.hf_cascade, name).default(*args)  # now a kernel's
        return implementation(*args)

    return served


def refuse_gradients(name: str, *args: object) -> None:
    """An error where one is asked for of an op's arguments."""
    if torch.is_grad_enabled():
        for value in args:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"hf_cascade::{name} is for inference and has no gradient; call it under "
                    "torch.no_grad() or detach its inputs"
                )


def _without_gradient(name: str) -> Callable:
    def guarded(*args, **kwargs):
        refuse_gradients(name, *args, *kwargs.values())
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.hf_cascade, name).default(*args, **kwargs)

    return guarded
