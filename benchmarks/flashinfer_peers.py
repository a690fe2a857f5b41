"""FlashInfer's ways to decode over a KV tree, to be timed in the same run as ours.

A tree is given to FlashInfer level by level, in the HND layout that our pools have:

    fa2_dec, fa2_dectc, fa3_dec, fa3_dectc
                 each shared level by BatchPrefillWithPagedKVCacheWrapper (backend fa2 or fa3), the
                 leaves by BatchDecodeWithPagedKVCacheWrapper (on CUDA cores, or on tensor cores:
                 tc), then merge_state_in_place
    decode, decode_tc
                 BatchDecodeWithPagedKVCacheWrapper over each sequence's whole context
    cascade_wrapper
                 MultiLevelCascadeAttentionWrapper

All is in FlashInfer's favour: its plans are made before the clock starts (our work list is in our
time), made for exactly this shape, and it appends nothing to the pools. Levels with the same
readers are joined into one.

Measured with flashinfer-python 0.5.3 and apache-tvm-ffi 0.1.11; importing this file imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import flashinfer
import torch
from torch import Tensor

if TYPE_CHECKING:
    from bench_attention import Shape, Step

VERSION = flashinfer.__version__
NAMES = (
    *("fa2_dec", "fa2_dectc", "fa3_dec", "fa3_dectc"),
    *("decode", "decode_tc", "cascade_wrapper"),
)
WORKSPACE_BYTES = 256 * 2**20  # FlashInfer's advice is 128 MB
TOLERANCE = 0.02  # relative, between two bf16 answers: each is within 0.004 of the true one

# (q [batch, num_q_heads, head_dim], (k_pool, v_pool)) -> out, like q.
Attend = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


@dataclass(frozen=True)
class Level:
    """Nodes that split the first `num_rows` rows evenly among them.

    Args:
        num_rows: rows of q that read this level; later ones read nothing of it.
        pages: of each node, [num_pages], int32, on the host.
        last_page_len: of each node, tokens in its last page.
    """

    num_rows: int
    pages: tuple[Tensor, ...]
    last_page_len: tuple[int, ...]

    def qo_indptr(self) -> Tensor:
        """[num_nodes + 1]: node i is read by rows qo_indptr[i] to qo_indptr[i + 1]."""
        per_node = self.num_rows // len(self.pages)
        return torch.arange(0, self.num_rows + 1, per_node, dtype=torch.int32)

    def page_table(self) -> tuple[Tensor, Tensor, Tensor]:
        """(kv_indptr [num_nodes + 1], kv_indices, last_page_len [num_nodes]), int32."""
        counts = torch.tensor([0, *(len(pages) for pages in self.pages)])
        last_page_len = torch.tensor(self.last_page_len, dtype=torch.int32)
        return counts.cumsum(0).int(), torch.cat(self.pages), last_page_len


def contenders(shape: Shape, step: Step, expected: Tensor) -> dict[str, Callable[[], None]]:
    """The compositions that could be the fastest, each as a whole step that a graph can capture.

    Left out, with a printed reason, is one that FlashInfer refuses, that answers otherwise, or
    whose layer takes, even before it is captured, over a millisecond and over three times the
    fastest one's.

    Args:
        expected: [batch, num_q_heads, head_dim], our answer on the first layer's pool.
    Returns:
        By name (of NAMES), a function that attends once in every layer of the step.
    """
    planner, levels = Planner(step), split_levels(shape, step)
    known, layer_us = {}, {}
    for name in NAMES:
        try:
            known[name] = compose(name, levels, planner)
            difference = _difference(known[name](step.q, step.pools[0]), expected)
            if difference < TOLERANCE:
                layer_us[name] = _eager_us(known[name], step)
            else:  # nan too
                print(f"# {shape.name}: {name} left out: off ours by {difference:.1e}")
        except Exception as error:  # of whatever class FlashInfer's bindings raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"# {shape.name}: {name} left out: {reason}")
    limit = max(1000.0, 3 * min(layer_us.values(), default=0.0))
    for name in [name for name, us in layer_us.items() if us > limit]:
        print(f"# {shape.name}: {name} left out: a layer takes {layer_us.pop(name):.0f} us")
    return {name: _in_every_layer(step, known[name]) for name in layer_us}


def compose(name: str, levels: Sequence[Level], planner: Planner) -> Attend:
    """The composition of this name (one of NAMES), planned for a tree by levels, leaves last."""
    *shared, leaves = levels
    if name == "cascade_wrapper":
        return planner.cascade(levels).run
    if name in ("decode", "decode_tc"):
        return planner.decode(flatten(levels), name == "decode_tc").run
    backend, suffix = name.split("_")
    prefixes = [(level.num_rows, planner.prefill(level, backend)) for level in shared]
    return _merged(prefixes, planner.decode(leaves, suffix == "dectc"))


class Planner:
    """Makes FlashInfer's wrappers, planned for the heads and pools of one step.

    They share a workspace, since they run one after the other.
    """

    def __init__(self, step: Step) -> None:
        _, num_kv_heads, page_size, head_dim = step.pools[0][0].shape
        self.sizes = (step.q.shape[1], num_kv_heads, head_dim, page_size)
        self.dtypes = {"q_data_type": step.q.dtype, "kv_data_type": step.q.dtype}
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)

    def prefill(self, level: Level, backend: str) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        """All rows of a node as one request with as many query tokens, no causality."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "HND", backend=backend
        )
        wrapper.plan(level.qo_indptr(), *level.page_table(), *self.sizes, **self.dtypes)
        return wrapper

    def decode(
        self, level: Level, use_tensor_cores: bool
    ) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
        """One request a row: each row has a node of its own."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "HND", use_tensor_cores=use_tensor_cores
        )
        wrapper.plan(*level.page_table(), *self.sizes, **self.dtypes)
        return wrapper

    def cascade(self, levels: Sequence[Level]) -> flashinfer.MultiLevelCascadeAttentionWrapper:
        """All levels at once.

        Raises:
            ValueError: some rows read no shared level; the wrapper can't leave rows out.
        """
        if len({level.num_rows for level in levels}) > 1:
            raise ValueError("some rows read no shared level")
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), self.workspace, "HND")
        tables = zip(*(level.page_table() for level in levels), strict=True)
        wrapper.plan(
            [level.qo_indptr() for level in levels], *map(list, tables), *self.sizes, **self.dtypes
        )
        return wrapper


def split_levels(shape: Shape, step: Step) -> list[Level]:
    """The tree by levels, leaves last; shared levels with the same readers are one level.

    Raises:
        ValueError: a shared node doesn't fill its last page, so that tables can't be joined.
    """
    page_size = step.pools[0][0].shape[2]
    lengths = [length for length, _ in shape.nodes()]
    counts = step.args["kv_indptr"].diff().tolist()
    pages = step.args["kv_indices"].cpu().split(counts)
    levels: list[Level] = []
    first = 0
    for count in shape.levels[:-1]:
        own = pages[first : first + count]
        if any(length % page_size for length in lengths[first : first + count]):
            raise ValueError(f"{shape.name}: a shared node must fill its pages of {page_size}")
        if levels and len(levels[-1].pages) == count:
            above = levels.pop().pages
            own = tuple(torch.cat(both) for both in zip(above, own, strict=True))
        levels.append(Level(shape.batch - shape.loners, own, (page_size,) * count))
        first += count
    last = tuple((length - 1) % page_size + 1 for length in lengths[first:])
    return [*levels, Level(shape.batch, pages[first:], last)]


def flatten(levels: Sequence[Level]) -> Level:
    """The whole context of each row as one node of its own: no page is copied, only its id."""
    leaves = levels[-1]
    contexts = []
    for row in range(leaves.num_rows):
        read = [level for level in levels if row < level.num_rows]
        contexts.append(torch.cat([lv.pages[row * len(lv.pages) // lv.num_rows] for lv in read]))
    return Level(leaves.num_rows, tuple(contexts), leaves.last_page_len)


def _merged(
    prefixes: Sequence[tuple[int, flashinfer.BatchPrefillWithPagedKVCacheWrapper]],
    suffix: flashinfer.BatchDecodeWithPagedKVCacheWrapper,
) -> Attend:
    def attend(q: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
        out, lse = suffix.run(q, pool, return_lse=True)
        for num_rows, prefix in prefixes:
            state = prefix.run(q[:num_rows], pool, return_lse=True)
            flashinfer.merge_state_in_place(out[:num_rows], lse[:num_rows], *state)
        return out

    return attend


def _in_every_layer(step: Step, attend: Attend) -> Callable[[], None]:
    def run() -> None:
        for layer in range(step.num_layers):
            attend(step.q, step.pools[layer % len(step.pools)])

    return run


def _difference(out: Tensor, expected: Tensor) -> float:
    true = expected.float()
    return ((out.float() - true).norm() / true.norm()).item()


def _eager_us(attend: Attend, step: Step) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    attend(step.q, step.pools[0])
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000
