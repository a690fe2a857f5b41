"""A decode step of the ops alone: samples of one document, against attention over each of them.

For code that keeps its own KV: the index tensors of a small tree, written out. hf_cascade.patch
makes them for a model.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_cascade import ops

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64
SAMPLES, SHARED, OWN = 4, 100, 20  # sequences, tokens of the document, and of each one's own


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.ops_by_hand", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    error, saved = decode_step(parser.parse_args().device)
    print(f"largest difference from attention over each sequence by itself: {error:.1e}")
    print(f"KV read: 1 / {saved:.1f} of what {SAMPLES} separate sequences read")


def decode_step(device: str) -> tuple[float, float]:
    """The largest difference from SDPA, and how many times less KV is read."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # Node 0 is the document, nodes 1 to 4 are the leaves. Each lists its pages, here one after the
    # other; a leaf has room for the token of this step.
    pages_of = [-(-SHARED // PAGE_SIZE)] + [-(-(OWN + 1) // PAGE_SIZE)] * SAMPLES
    kv_indptr = [sum(pages_of[:n]) for n in range(len(pages_of) + 1)]
    first_slots = [PAGE_SIZE * page for page in kv_indptr[:-1]]
    tree = {
        "q_indptr": index(*range(SAMPLES + 1)),  # one query token each
        "kv_indptr": index(*kv_indptr),
        "kv_indices": index(*range(kv_indptr[-1])),
        "kv_len": index(SHARED, *[OWN + 1] * SAMPLES),  # with the token that this step appends
        "first_slot": index(*[0] * (SAMPLES + 1)),
        "leaves": index(*range(1, SAMPLES + 1)),
        "reader_indptr": index(0, *[SAMPLES] * (SAMPLES + 1)),  # only the document has readers
        "readers": index(*range(SAMPLES)),
    }
    k_pool, v_pool = (random(kv_indptr[-1], KV_HEADS, PAGE_SIZE, HEAD_DIM) for _ in "kv")
    q, k, v = random(SAMPLES, HEADS, HEAD_DIM), *(random(SAMPLES, KV_HEADS, HEAD_DIM) for _ in "kv")
    slots = index(*(first + OWN for first in first_slots[1:]))  # where the new tokens go
    out, _ = ops.cascade_attention(q, k, v, k_pool, v_pool, slots, **tree, sm_scale=HEAD_DIM**-0.5)

    # The same by SDPA: each sequence's KV flattened, read anew for each.
    by_slot = [pool.transpose(1, 2).flatten(0, 1) for pool in (k_pool, v_pool)]
    error = 0.0
    for seq in range(SAMPLES):
        first = first_slots[1 + seq]
        seen = [*range(SHARED), *range(first, first + OWN + 1)]
        keys, values = (pool[seen].transpose(0, 1)[None] for pool in by_slot)
        alone = scaled_dot_product_attention(q[seq][None, :, None], keys, values, enable_gqa=True)
        error = max(error, float((alone[0, :, 0] - out[seq]).abs().max()))
    return error, SAMPLES * (SHARED + OWN + 1) / (SHARED + SAMPLES * (OWN + 1))


if __name__ == "__main__":
    main()
