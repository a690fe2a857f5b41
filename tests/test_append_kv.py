"""Appending writes each token's K and V into its own slot, and nothing anywhere else."""

import cases
import pytest
import torch
from cases import int32
from hf_cascade.ops import DROPPED_SLOT, append_kv, reference
from torch import Tensor

NUM_SLOTS, NUM_TOKENS = 256, 40
TOKEN = (2, 16)  # num_kv_heads, head_dim


@pytest.mark.parametrize("append", [append_kv, reference.append_kv], ids=["op", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 128])
@pytest.mark.parametrize("num_dropped", [0, 1, NUM_TOKENS])
def test_tokens_are_written_to_their_slots_only(num_dropped, page_size, dtype, append):
    k, v, slots = new_tokens(dtype)
    slots[:num_dropped] = DROPPED_SLOT
    k_pool, v_pool = empty_pool(page_size, dtype), empty_pool(page_size, dtype)
    append(k, v, k_pool, v_pool, slots)
    assert_holds(k_pool, k, slots)
    assert_holds(v_pool, v, slots)


@pytest.mark.parametrize("page_size", [1, 4, 128, NUM_SLOTS])
def test_pools_may_lie_slot_by_slot(page_size):
    k, v, slots = new_tokens()
    slots[0] = DROPPED_SLOT
    k_pool, v_pool = (empty_pool(page_size, by_slot=True) for _ in range(2))
    append_kv(k, v, k_pool, v_pool, slots)
    assert_holds(k_pool, k, slots)
    assert_holds(v_pool, v, slots)


@pytest.mark.parametrize("by_slot", [False, True])
def test_pools_may_be_parts_of_others(by_slot):
    k, v, slots = new_tokens()
    num_pages, *page = empty_pool().shape
    wholes = [cases.empty_pool((num_pages + 2, *page), k.dtype, by_slot=by_slot) for _ in range(2)]
    k_pool, v_pool = (whole[1:-1] for whole in wholes)
    append_kv(k, v, k_pool, v_pool, slots)
    assert_holds(k_pool, k, slots)
    assert_holds(v_pool, v, slots)
    assert all(whole[place].isnan().all() for whole in wholes for place in (0, -1))


@pytest.mark.parametrize("by_slot", [False, True])
def test_the_first_and_the_last_slot_are_slots(by_slot):
    k, v, _ = new_tokens()
    k_pool, v_pool = (empty_pool(by_slot=by_slot) for _ in range(2))
    slots = int32([NUM_SLOTS - 1, 0])
    append_kv(k[:2], v[:2], k_pool, v_pool, slots)
    assert_holds(k_pool, k[:2], slots)
    assert_holds(v_pool, v[:2], slots)


def test_a_slot_is_reused_by_writing_again():
    k, v, slots = new_tokens()
    k_pool, v_pool = empty_pool(), empty_pool()
    append_kv(k, v, k_pool, v_pool, slots)
    append_kv(-k, -v, k_pool, v_pool, slots)
    assert_holds(k_pool, -k, slots)
    assert_holds(v_pool, -v, slots)


def test_no_tokens_write_nothing():
    k, v, slots = (x[:0] for x in new_tokens())
    k_pool, v_pool = empty_pool(), empty_pool()
    append_kv(k, v, k_pool, v_pool, slots)
    assert_holds(k_pool, k, slots)
    assert_holds(v_pool, v, slots)


def test_tokens_and_pools_may_be_views():
    k, v, slots = new_tokens()
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))  # heads first
    layers = torch.full((64, 3, TOKEN[0], 4, TOKEN[1]), torch.nan)  # one layer of many
    append_kv(k, v, layers[:, 0], layers[:, 2], slots)
    assert_holds(layers[:, 0], k, slots)
    assert_holds(layers[:, 1], k[:0], slots[:0])
    assert_holds(layers[:, 2], v, slots)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("k", torch.zeros(NUM_TOKENS, *TOKEN).half()),
        ("k", torch.zeros(NUM_TOKENS, 3, 16)),
        ("k", torch.zeros(NUM_TOKENS, 32)),
        ("k", torch.zeros(NUM_TOKENS - 1, *TOKEN)),
        ("v", torch.zeros(NUM_TOKENS, 2, 8)),
        ("v", torch.zeros(NUM_TOKENS, *TOKEN).double()),
        ("k_pool", torch.zeros(NUM_SLOTS, *TOKEN)),
        ("v_pool", torch.zeros(NUM_SLOTS // 4, 2, 4, 8)),
        ("v_pool", torch.zeros(NUM_SLOTS // 4, 2, 4, 16).half()),
        ("slots", torch.zeros(NUM_TOKENS, dtype=torch.int64)),
        ("slots", torch.zeros(NUM_TOKENS, 1, dtype=torch.int32)),
        ("slots", torch.zeros(NUM_TOKENS + 1, dtype=torch.int32)),
        ("slots", int32([NUM_SLOTS, *range(1, NUM_TOKENS)])),
        ("slots", int32([DROPPED_SLOT - 1, *range(1, NUM_TOKENS)])),
    ],
)
def test_an_unfit_argument_is_named_before_anything_is_written(argument, value):
    k, v, slots = new_tokens()
    arguments = {"k": k, "v": v, "k_pool": empty_pool(), "v_pool": empty_pool(), "slots": slots}
    with pytest.raises(ValueError, match=rf"\b{argument}\b.* must"):
        append_kv(**arguments | {argument: value})
    assert arguments["k_pool"].isnan().all()
    assert arguments["v_pool"].isnan().all()


def test_gradients_are_refused():
    k, v, slots = new_tokens()
    with pytest.raises(RuntimeError, match=r"append_kv .* has no gradient"):
        append_kv(k.requires_grad_(), v, empty_pool(), empty_pool(), slots)


def new_tokens(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and slots, all different."""
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, NUM_TOKENS, *TOKEN, generator=random).to(dtype)
    return k, v, torch.randperm(NUM_SLOTS, generator=random)[:NUM_TOKENS].int()


def empty_pool(
    page_size: int = 4, dtype: torch.dtype = torch.float32, *, by_slot: bool = False
) -> Tensor:
    num_kv_heads, head_dim = TOKEN
    shape = (NUM_SLOTS // page_size, num_kv_heads, page_size, head_dim)
    return cases.empty_pool(shape, dtype, by_slot=by_slot)


def assert_holds(pool: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """The pool holds these tokens in these slots, and NaN in all others."""
    stored = pool.transpose(1, 2).flatten(0, 1)  # [num_slots, num_kv_heads, head_dim]
    expected = torch.full_like(stored, torch.nan)
    kept = slots != DROPPED_SLOT
    expected[slots[kept]] = tokens[kept]
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
