"""Errors of the log-probabilities of sampled tokens, patched and stock.

Those of the decode steps that sampled the tokens (patched), and those of stock's decode steps fed
with the same tokens, each against one forward pass of stock over the whole text: in the model's
dtype, bfloat16, and in float32 with the same weights, the truth. A pass in bfloat16 rounds as
stock's steps do, so these come nearer to it than either comes to the truth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 512, 64, 4


def sample(model: PreTrainedModel, ids: Tensor) -> Any:
    """What generate returns, logits included."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
        num_return_sequences=SAMPLES, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@torch.no_grad()
def errors(
    out: Any, prompt_length: int, stock: PreTrainedModel, exact: PreTrainedModel
) -> dict[str, dict[str, Tensor]]:
    """Absolute errors, [samples, tokens], by the pass they are measured against and the side.

    Args:
        out: of `sample`.
        prompt_length: tokens before the sampled ones.
        stock: the model, not patched or outside generate.
        exact: the same weights in float32.
    """
    tokens = out.sequences[:, prompt_length:, None]

    def log_p(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, tokens).squeeze(-1)

    def forward_pass(model: PreTrainedModel) -> Tensor:
        return log_p(model(out.sequences[:, :-1], logits_to_keep=tokens.shape[1]).logits)

    cache, inputs = DynamicCache(), [out.sequences[:, :prompt_length], *tokens[:, :-1].unbind(1)]
    steps = [stock(x, past_key_values=cache, logits_to_keep=1).logits for x in inputs]
    sides = {"patched": log_p(torch.stack(out.logits, 1)), "stock": log_p(torch.cat(steps, 1))}
    passes = {"bfloat16": forward_pass(stock), "float32": forward_pass(exact)}
    return {
        dtype: {side: (found - true).abs() for side, found in sides.items()}
        for dtype, true in passes.items()
    }


def describe(found: dict[str, dict[str, Tensor]]) -> str:
    """One line: the largest error of each side and, in brackets, its root mean square."""
    parts = [
        f"{dtype} pass: "
        + ", ".join(
            f"{side} {x.max():.4f} ({x.square().mean().sqrt():.4f})" for side, x in of.items()
        )
        for dtype, of in found.items()
    ]
    return f"max (RMS) |log p - that of a {'; '.join(parts)}|"
