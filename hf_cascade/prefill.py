"""Packed prefill: every token of the KV tree that no one has computed yet, as one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import CascadeCache
from .plan import Query, to_device
from .tree import Node


@dataclass(frozen=True)
class Prompts:
    """The rows of a prompt batch, left padding stripped.

    Attributes:
        inputs: what the model is fed: ids [batch, length] or embeddings [batch, length, hidden].
        rows: each row's tokens as bytes; rows of embeddings get an id per distinct embedding.
        starts: column of each row's first token.
    """

    inputs: Tensor
    rows: list[bytes]
    starts: list[int]


def read_prompts(
    input_ids: Tensor, inputs_embeds: Tensor | None, attention_mask: Tensor | None
) -> Prompts:
    """Read a prompt batch to the host.

    Args:
        input_ids: [batch, length], ignored where there are embeddings.
        inputs_embeds: [batch, length, hidden_size] or None.
        attention_mask: [batch, length], zeros at the left only, or None.
    """
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if attention_mask is None:
        starts = [0] * inputs.shape[0]
    else:
        starts = (attention_mask == 0).sum(1).tolist()
    if inputs_embeds is None:
        ids = input_ids.to("cpu", torch.int32).numpy()
    else:
        ids = _embedding_ids(inputs_embeds)
    rows = [row[start:].tobytes() for row, start in zip(ids, starts, strict=True)]
    return Prompts(inputs, rows, starts)


def packed_prefill(
    model: Any, cache: CascadeCache, prompts: Prompts, chunk_size: int | None
) -> tuple[CausalLMOutputWithPast, int]:
    """Compute the prompts' tree and open a leaf per row.

    Every layer stores KV before it attends, so a child's tokens see their ancestors' KV of the
    same pass. In topological order the tokens can be cut anywhere into chunks.

    Args:
        model: the patched model.
        cache: empty.
        prompts: the batch.
        chunk_size: most tokens of one forward pass; None is all at once.
    Returns:
        The model's output with logits [batch, 1, vocab_size] of each row's last token, and the
        number of tokens forwarded.
    Raises:
        OutOfPagesError: before anything is computed.
    """
    rows = list(dict.fromkeys(prompts.rows))  # samples of a prompt come as copies of it
    end_of = dict(zip(rows, cache.tree.insert(rows), strict=True))
    ends = [end_of[row] for row in prompts.rows]
    queries = [Query(node, 0, node.kv_len) for node in cache.tree.nodes()]
    source = _sources(cache, queries, prompts, ends)
    positions = torch.cat([_positions(cache, query) for query in queries]).to(source.device)
    last_of = {node: i for i, node in enumerate(dict.fromkeys(ends))}
    logits: list[Tensor | None] = [None] * len(last_of)
    start = 0
    for chunk in _chunks(queries, chunk_size):
        lengths = [query.stop - query.start for query in chunk]
        stop = start + sum(lengths)
        # Which packed tokens of this chunk end a prompt: those that the model needs logits of.
        wanted = {
            chunk_end - 1: last_of[query.node]
            for chunk_end, query in zip(accumulate(lengths), chunk, strict=True)
            if query.node in last_of and query.stop == query.node.kv_len
        }
        chunk_logits = _forward(
            model, cache, chunk, prompts.inputs.flatten(0, 1)[source[start:stop]],
            positions[start:stop], sorted(wanted),
        )  # fmt: skip
        for row, token in zip(chunk_logits, sorted(wanted), strict=False):
            logits[wanted[token]] = row
        start = stop
    cache.start_decoding(ends, prompts.inputs.shape[1])
    per_end = torch.stack([row for row in logits if row is not None])
    per_row = per_end.index_select(0, to_device([last_of[end] for end in ends], per_end.device))
    return CausalLMOutputWithPast(
        logits=per_row[:, None],  # type: ignore[arg-type]
        past_key_values=cache,
    ), stop


def _forward(
    model: Any,
    cache: CascadeCache,
    chunk: Sequence[Query],
    inputs: Tensor,
    positions: Tensor,
    wanted: list[int],
) -> Tensor:
    cache.begin(chunk)
    # Offloaded weights are on "meta" between their uses; hooks then move the inputs.
    device = inputs.device if model.device.type == "meta" else model.device
    kept = to_device(wanted or [0], device).long()
    keeps_logits = model._supports_logits_to_keep()
    name = "input_ids" if inputs.ndim == 1 else "inputs_embeds"
    outputs = model(
        **{name: inputs[None].to(device)},
        position_ids=positions[None].to(device),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        hf_cascade=cache,
        **({"logits_to_keep": kept} if keeps_logits else {}),
    )
    cache.end()
    return outputs.logits[0] if keeps_logits else outputs.logits[0, kept]


def _chunks(queries: Sequence[Query], size: int | None) -> Iterator[list[Query]]:
    """The queries in order, cut where a chunk is full."""
    if size is None:
        yield list(queries)
        return
    chunk: list[Query] = []
    room = size
    for query in queries:
        start = query.start
        while start < query.stop:
            stop = min(query.stop, start + room)
            chunk.append(Query(query.node, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _sources(
    cache: CascadeCache, queries: Sequence[Query], prompts: Prompts, ends: Sequence[Node]
) -> Tensor:
    """Index of each query token in the flattened prompt batch: any row that has it will do."""
    first_index: dict[Node, int] = {}
    length = prompts.inputs.shape[1]
    for row, (end, start) in enumerate(zip(ends, prompts.starts, strict=True)):
        index = row * length + start
        for node in cache.tree.path(end):
            first_index.setdefault(node, index)
            index += node.kv_len
    runs = [_range(first_index[query.node], query) for query in queries]
    return torch.cat(runs).to(prompts.inputs.device)


def _positions(cache: CascadeCache, query: Query) -> Tensor:
    return _range(sum(node.kv_len for node in cache.tree.path(query.node)[:-1]), query)


def _range(first: int, query: Query) -> Tensor:
    # On the CPU, whatever default device torch was given.
    return torch.arange(first + query.start, first + query.stop, device="cpu")


def _embedding_ids(inputs_embeds: Tensor) -> np.ndarray:
    """[batch, length] int32: equal ids for embeddings that are equal bit for bit."""
    as_bytes = inputs_embeds.detach().contiguous().view(torch.uint8).cpu().numpy()
    ids: dict[bytes, int] = {}
    return np.array(
        [[ids.setdefault(row.tobytes(), len(ids)) for row in batch] for batch in as_bytes],
        dtype=np.int32,
    )
