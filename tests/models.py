"""Tiny random models, and the question asked of them: does patching change what they generate?

Weights are large, biases and norms are random too: tokens are diverse and depend on the whole
prompt, so an error anywhere in attention shows in the next few of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_cascade

VOCAB_SIZE = 64
PAD, BOS = 0, 1

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}
# What is special about each: GQA, MQA, MHA, biases, norms of q and k, experts, multipliers,
# interleaved RoPE, a head_dim of its own, a window wider than any text here.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "phi3": {"num_key_value_heads": 4},
    "cohere": {"logit_scale": 1.0},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"sliding_window": 200},
}


_models: dict[str, PreTrainedModel] = {}


def new_model(name: str = "llama", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of one's own, stock, in eval mode; always the same one for the same arguments."""
    key = repr((name, seed, sorted(config.items())))
    if key not in _models:
        special = ARCHITECTURES.get(name, {}) | config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_SHAPE | special))
        _models[key] = randomize(model, seed)
    return copy.deepcopy(_models[key])


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every parameter a random value; returns the model in eval mode."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise
    return model.eval()


# Prompts


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=random).tolist()


def batch(*rows: Sequence[int]) -> dict[str, Tensor]:
    """Rows as the arguments of generate, left-padded to the longest."""
    length = max(map(len, rows))
    padding = [length - len(row) for row in rows]
    return {
        "input_ids": torch.tensor(
            [[PAD] * pad + list(row) for pad, row in zip(padding, rows, strict=True)]
        ),
        "attention_mask": torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding]),
    }


DOCUMENT = tokens(11, seed=1)
# Two questions about a document, the first of them twice, the document itself, and a loner.
ROWS = (
    DOCUMENT + tokens(3, seed=2),
    DOCUMENT + tokens(5, seed=3),
    DOCUMENT + tokens(3, seed=2),
    DOCUMENT,
    tokens(4, seed=4),
)
RAGGED = batch(*ROWS)
PROMPT = batch(DOCUMENT)


# Running


@dataclass(frozen=True)
class Run:
    """What a `generate` call returned, and the random state that it left behind."""

    out: Any
    random_state: Tensor

    @property
    def sequences(self) -> Tensor:
        return self.out if isinstance(self.out, Tensor) else self.out.sequences


def run(model: Any, *, seed: int = 0, **generate_kwargs: Any) -> Run:
    """`model.generate` after seeding; 8 new tokens unless told otherwise."""
    torch.manual_seed(seed)
    out = model.generate(**{"max_new_tokens": 8, "pad_token_id": PAD} | generate_kwargs)
    return Run(out, torch.get_rng_state())


def assert_same(stock: Run, patched: Run) -> None:
    """The same tokens, and the same random state after them."""
    assert torch.equal(stock.sequences, patched.sequences), (
        f"tokens differ:\n{stock.sequences.tolist()}\n{patched.sequences.tolist()}"
    )
    assert torch.equal(stock.random_state, patched.random_state), "the random state differs"


def parity(
    model: PreTrainedModel,
    *,
    seed: int = 0,
    page_size: int = 4,
    with_model: Callable[[PreTrainedModel], Mapping[str, Any]] = lambda model: {},
    **generate_kwargs: Any,
) -> tuple[Run, Run, PreTrainedModel]:
    """Generate with a stock copy of `model` and with a patched, strict one; they must agree.

    Args:
        model: stays as it is.
        with_model: more arguments of generate, made anew for each of the two models.
    Returns:
        The stock run, the patched run and the patched model.
    """
    stock, patched = copy.deepcopy(model), copy.deepcopy(model)
    hf_cascade.patch(patched, page_size=page_size, strict=True)
    runs = [
        run(each, seed=seed, **generate_kwargs, **with_model(each)) for each in (stock, patched)
    ]
    assert_same(*runs)
    assert patched.cascade.stats.path == "cascade"
    return *runs, patched


def forwarded_tokens(model: PreTrainedModel) -> list[int]:
    """A list to which every forward pass of the model adds its tokens, padding included."""
    counts: list[int] = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[:2].numel()))
    return counts


def trie_size(rows: Sequence[Sequence[int]]) -> int:
    """Tokens left to compute when rows share all that they have in common."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
