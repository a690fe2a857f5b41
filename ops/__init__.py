"""The ops of hf_cascade, as functions and as `torch.ops.hf_cascade.*`; needs torch only."""

from . import kernels
from .append import DROPPED_SLOT, append_kv
from .cascade import cascade_attention, prefix_attention, suffix_attention, work_list
from .merge import merge_state, merge_states

__all__ = [
    "DROPPED_SLOT",
    "append_kv",
    "cascade_attention",
    "kernels",
    "merge_state",
    "merge_states",
    "prefix_attention",
    "suffix_attention",
    "work_list",
]
