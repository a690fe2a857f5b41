"""The cache that `generate` hands to the model: a KV tree over a page pool.

A pass is one forward through the model: `begin` plans it, then every layer calls `update` (which
only records) and `attend` (which stores the KV and computes attention), and `end` checks that
every layer did both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from .errors import UnsupportedModelError
from .ops import (
    append_kv,
    cascade_attention,
    composed,
    kernels,
    merge_state,
    prefix_attention,
    suffix_attention,
    work_list,
)
from .ops.checks import check_queries
from .ops.library import refuse_gradients
from .ops.reads import Sizes
from .pages import PagePool
from .plan import Plan, Query, build_layout, build_plan
from .step_plan import StepPlan
from .tree import UNKNOWN_TOKEN, KVTree, Node, token_bytes

# What `get_mask_sizes` answers, and nothing else does: "this pass needs no mask".
CASCADE_KV_OFFSET = -(2**31)

_UNKNOWN = token_bytes([UNKNOWN_TOKEN])
_STEPS_AHEAD = 4096  # that a step plan lists pages for; max_length may be "no limit", 1e30


class CascadeCache(Cache):
    """KV of the rows of one `generate` call.

    Args:
        tree: topology; one leaf per row once `start_decoding` was called.
        pool: storage, shared with other calls of the model.
        batch_invariant: of its passes' work lists, see `ops.work_list`.
    """

    # Decode steps are compiled: their plan keeps its tensors and shapes, and whoever runs a step
    # calls `advance` first.
    is_compileable = False

    def __init__(self, tree: KVTree, pool: PagePool, *, batch_invariant: bool = False) -> None:
        super().__init__(layers=[])
        self.tree, self.pool = tree, pool
        self._batch_invariant = batch_invariant
        self.leaves: list[Node | None] = []  # None: the row is over, its pages are returned
        self.prompt_length: list[int] = []  # tokens of each row's prompt, padding excluded
        self.decode_steps = 0
        self.row_steps = 0  # decoded tokens stored, over all rows, those that are over included
        self.longest_path = 0
        self._longest_served: int | None = None  # None is no limit
        self.may_step_too_far = False  # a decode step more than the call needs does no harm
        self.may_run_dry = False  # steps may go on beyond max_length, with nothing to compute
        self._length = 0
        self._max_new_tokens = 0
        self._step_plan: StepPlan | None = None
        self._steps_planned = 0  # that it still has room for
        self.num_step_plans = 0  # what was captured with an earlier one is out of date
        self._is_reshaped = True  # the tree is not as the step plan has it
        self._is_fresh_root = False  # all that the pass computes
        self._has_begun = self._is_first_pass = False
        self._grown = 0  # rows that grew in the last step
        self._plans: dict[torch.device, Plan] = {}
        self._work_lists: dict[tuple[torch.device, int, int, int], Tensor] = {}
        self._passes: dict[torch.device, composed.Pass] = {}
        self._recorded: tuple[Tensor, Tensor, int] | None = None
        self._updated: list[int] = []
        self._attended: list[int] = []

    # The pass

    def begin(self, queries: Sequence[Query | None]) -> None:
        """Plan a pass of these queries; the model's packed rows are their tokens in order."""
        self.pool.grow()
        self._layout = build_layout(self.tree, queries)
        self._begin_pass()
        first = queries[0]
        self._is_fresh_root = (
            len(queries) == 1 and first is not None and not first.start and not first.node.parent
        )
        self._plans = {device: build_plan(self._layout, device) for device in self._plans}

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Store the KV recorded last, then attend: the cascade of the blog.

        Eagerly that is one op or, where it would be composed of torch's, what it is composed of:
        the op's own cost, of so many arguments, shows in a small model's steps.
        Under torch.compile it is the blog's four, for `fuse_pass` to fuse as it does in any code
        that composes them. A fresh root alone needs no KV but its own.

        Args:
            query: [batch, num_q_heads, q_len, head_dim]; batch x q_len are the pass's tokens.
            scaling: factor on q k^T.
        Returns:
            [batch, q_len, num_q_heads, head_dim], typed like the values.
        """
        assert self._recorded is not None
        key, value, layer_idx = self._recorded
        self._recorded = None
        # Under autocast the projections' dtype (that of v) differs from what norms and RoPE make
        # of q and k. SDPA casts all three to it, and so do we.
        q, k, v = (_packed(x, value.dtype) for x in (query, key, value))
        plan = self._plan_on(v.device)
        k_pool, v_pool = self.pool.layer(layer_idx, k, v, is_first_pass=self._is_first_pass)
        self._attended.append(layer_idx)
        if self._is_fresh_root:
            append_kv(k, v, k_pool, v_pool, plan.slots)
            q, k, v = (x.to(value.dtype) for x in (query, key, value))
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2)
        batch, _, q_len, _ = query.shape
        if not torch.compiler.is_compiling():
            if kernels.serve(k_pool):
                out, _ = cascade_attention(
                    q, k, v, k_pool, v_pool, plan.slots, *plan.nodes, plan.leaves,
                    plan.reader_indptr, plan.readers, scaling, self._work_list(plan, q, k_pool),
                )  # fmt: skip
            else:
                refuse_gradients("cascade_attention", q, k, v)
                check_queries(q, k_pool, v_pool)  # what torch would take, some of it in silence
                found = self._pass_on(v.device, q.shape[0], k_pool)
                out, _ = composed.cascade_attention(q, k, v, k_pool, v_pool, found, scaling)
            return out.view(batch, q_len, *out.shape[1:])
        append_kv(k, v, k_pool, v_pool, plan.slots)
        suffix = suffix_attention(q, k_pool, v_pool, *plan.nodes, plan.leaves, scaling)
        prefix = prefix_attention(
            q, k_pool, v_pool, *plan.nodes, plan.reader_indptr, plan.readers, scaling
        )
        out, _ = merge_state(*prefix, *suffix)
        return out.view(batch, q_len, *out.shape[1:])

    def end(self) -> None:
        """Check that attention was computed in each layer that the model has.

        Raises:
            UnsupportedModelError: a layer bypassed the attention function or the cache.
        """
        if not self._updated or self._updated != self._attended:
            missed = sorted(set(self._updated) - set(self._attended))
            raise UnsupportedModelError(
                f"layers {missed} did not hand their attention to hf_cascade"
                if missed
                else "the model did not use the cache it was given"
            )

    # Rows

    def reserve(self, rows: Sequence[bytes], max_new_tokens: int) -> None:
        """Tell the pool the most that these prompts (as `token_bytes`) can come to need."""
        self._max_new_tokens = max_new_tokens
        allocator = self.pool.allocator
        tokens = sum(len(row) // 4 + max_new_tokens for row in rows)
        # A row's own leaf and its cut nodes may each leave a page partly filled.
        pages = -(-tokens // allocator.page_size) + 2 * len(rows)
        self.pool.reserve(allocator.pages_in_use + pages)

    def start_decoding(self, ends: Sequence[Node], padded_length: int) -> None:
        """Give every row a leaf of its own.

        Args:
            ends: the node that each row's prompt ends with.
            padded_length: columns of the prompt batch, padding included: what `get_seq_length`
                counts from, as stock caches do.
        """
        self.prompt_length = [sum(node.kv_len for node in self.tree.path(end)) for end in ends]
        self.longest_path = max(self.prompt_length)
        self._check_paths()
        self.leaves = list(self.tree.open_leaves(ends))
        self._length = padded_length

    def begin_step(self) -> None:
        """Plan a decode step: every live row's leaf grows by one token.

        With synced_gpus, steps go on until the last process is done. What this one computes after
        its own last token is for nobody, and takes no pages.
        """
        room = self._max_new_tokens - self.decode_steps
        if room <= 0 and not self.may_run_dry:
            raise UnsupportedModelError(
                f"decoding goes on beyond the {self._max_new_tokens} new tokens that max_length "
                "allows"
            )
        leaves = self.leaves if room > 0 else [None] * len(self.leaves)
        live = [leaf for leaf in leaves if leaf is not None]
        self.tree.extend(live, [_UNKNOWN] * len(live))
        if self.is_compileable:
            self._begin_in_place(leaves, room)
        else:
            self.begin([Query.last_of(leaf) for leaf in leaves])
        self.decode_steps += 1
        self._grown = len(live)
        self.row_steps += self._grown
        self.longest_path += room > 0
        self._check_paths()
        self._length += room > 0

    def limit_paths(self, sliding_window: int) -> None:
        """A layer attends to no more tokens than these: longer paths are an error from now on."""
        known = self._longest_served
        self._longest_served = sliding_window if known is None else min(known, sliding_window)
        self._check_paths()

    def _check_paths(self) -> None:
        if self._longest_served is not None and self._longest_served < self.longest_path:
            raise UnsupportedModelError(
                f"attention with sliding_window={self._longest_served} over "
                f"{self.longest_path} tokens"
            )

    def _begin_in_place(self, leaves: Sequence[Node | None], room: int) -> None:
        """Like `begin`, with the tensors and the shapes of the first step in all later ones."""
        self.pool.grow()
        if self._step_plan is None or (room > 0 and not self._steps_planned):
            self._step_plan = StepPlan(self.tree, self._plans)
            self._steps_planned = min(max(room, 0), _STEPS_AHEAD)
            self.num_step_plans += 1
            self._is_reshaped = True
        if self._is_reshaped or room == 0:
            self._step_plan.rewrite(leaves, self._steps_planned)
            self._plans = self._step_plan.plans
            self._is_reshaped = False
        else:
            self._step_plan.add_pages(leaves)
        self._steps_planned -= self._steps_planned > 0

    def undo_step(self) -> None:
        """Do not count the last step: it was one too many. Only the end of the call may follow."""
        self.decode_steps -= 1
        self.row_steps -= self._grown

    def advance(self) -> None:
        """Begin a pass of the step that `begin_step` planned: device work alone."""
        assert self._step_plan is not None
        self._begin_pass()
        self._is_fresh_root = False
        self._step_plan.advance()

    def _begin_pass(self) -> None:
        self._work_lists.clear()
        self._passes.clear()
        self._updated.clear()
        self._attended.clear()
        self._is_first_pass, self._has_begun = not self._has_begun, True

    def close_rows(self, done: Sequence[bool]) -> None:
        """Return the pages of rows that are over; all over at once is the end of the call."""
        if all(done):
            return
        for row, leaf in enumerate(self.leaves):
            if done[row] and leaf is not None:
                self.tree.prune(leaf)
                self.leaves[row] = None
                self._is_reshaped = True

    # What transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Record a layer's new K and V, [batch, num_kv_heads, q_len, head_dim]; return them."""
        self._updated.append(layer_idx)
        self._recorded = (key_states, value_states, layer_idx)
        return key_states, value_states

    def has_recorded(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are the very tensors that `update` got last."""
        recorded = self._recorded
        return recorded is not None and recorded[0] is key and recorded[1] is value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, CASCADE_KV_OFFSET

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # asked for masks only, and constant: a compiled step must not depend on it

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues from row beam_idx[i]; full pages are shared, partial ones copied."""
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        self.leaves[:], copies = self.tree.reorder(leaves, beam_idx.tolist())
        self.pool.copy_pages(copies)
        self._is_reshaped = True

    def __len__(self) -> int:
        return len(self.pool.layers())

    def _pass_on(self, device: torch.device, num_tokens: int, k_pool: Tensor) -> composed.Pass:
        """What all layers of the pass share where torch operators serve."""
        if device not in self._passes:
            plan = self._plan_on(device)
            sizes = Sizes(num_tokens, k_pool.shape[0], k_pool.shape[2])
            self._passes[device] = composed.find_pass(
                sizes, plan.slots, plan.nodes, plan.leaves, plan.reader_indptr, plan.readers
            )
        return self._passes[device]

    def _work_list(self, plan: Plan, q: Tensor, k_pool: Tensor) -> Tensor:
        """What all layers of the pass share where kernels do."""
        _, num_kv_heads, page_size, head_dim = k_pool.shape
        key = (q.device, q.shape[1], num_kv_heads, head_dim)
        if key not in self._work_lists:
            self._work_lists[key] = work_list(
                *plan.nodes,
                plan.leaves,
                plan.reader_indptr,
                plan.readers,
                page_size=page_size,
                num_q_heads=q.shape[1],
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                batch_invariant=self._batch_invariant,
            )
        return self._work_lists[key]

    def _plan_on(self, device: torch.device) -> Plan:
        if device not in self._plans:  # the first pass; prefill meets all of a split model's
            self._plans[device] = build_plan(self._layout, device)
        return self._plans[device]


def _packed(states: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, heads, q_len, head_dim] to [batch * q_len, heads, head_dim]."""
    # The passes that fuse compiled steps look for the other form.
    if states.shape[2] == 1 and not torch.compiler.is_compiling():
        packed = states.squeeze(2)
    else:
        packed = states.transpose(1, 2).flatten(0, 1)
    return packed if packed.dtype == dtype else packed.to(dtype)
