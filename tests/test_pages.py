"""Pages: counted exactly, kept while the pool grows, and usable in every autograd mode."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
from hf_cascade.ops.reads import Tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cascade.errors import OutOfPagesError
from hf_cascade.pages import PageAllocator, PagePool

NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 2, 4, 8


def states(dtype: torch.dtype = torch.float32, num_kv_heads: int = NUM_KV_HEADS) -> Tensor:
    return torch.zeros(1, num_kv_heads, HEAD_DIM, dtype=dtype)


def new_pool(num_pages: int, max_pages: int | None = None) -> PagePool:
    pool = PagePool(PageAllocator(PAGE_SIZE, max_pages))
    pool.allocator.allocate(num_pages)
    return pool


# PageAllocator


def test_the_lowest_free_page_comes_first():
    allocator = PageAllocator(PAGE_SIZE)
    assert allocator.allocate(5) == [0, 1, 2, 3, 4]
    allocator.release([3, 0, 1])
    assert allocator.allocate(2) == [0, 1]
    assert allocator.allocate(3) == [3, 5, 6]
    assert allocator.num_pages == 7


def test_allocate_is_all_or_nothing_and_says_what_is_missing():
    allocator = PageAllocator(PAGE_SIZE, max_pages=4)
    pages = allocator.allocate(3)
    allocator.release(pages[1:2])
    with pytest.raises(OutOfPagesError) as caught:
        allocator.allocate(3)
    error = caught.value
    assert (error.needed, error.available, error.max_pages) == (3, 2, 4)
    assert "3 pages are needed, 2 of max_pages=4" in str(error)
    assert "hf_cascade.patch" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.needed) == (str(error), 3)
    assert (allocator.pages_in_use, allocator.peak_pages_in_use, allocator.num_pages) == (2, 3, 3)
    assert allocator.allocate(2) == [1, 3]
    assert allocator.allocate(0) == []
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1)


def test_a_page_is_free_when_its_last_owner_lets_go():
    allocator = PageAllocator(PAGE_SIZE)
    [page] = allocator.allocate(1)
    allocator.retain([page, page])
    assert allocator.owners(page) == 3
    allocator.release([page])
    allocator.release([page])
    assert (allocator.owners(page), allocator.pages_in_use) == (1, 1)
    assert allocator.allocate(1) == [1]
    allocator.release([page])
    assert (allocator.owners(page), allocator.pages_in_use) == (0, 1)


@pytest.mark.parametrize("method", ["release", "retain"])
@pytest.mark.parametrize("page", [0, 1, 7, -1])
def test_a_free_page_is_neither_released_nor_retained(method, page):
    allocator = PageAllocator(PAGE_SIZE)
    allocator.release(allocator.allocate(2))
    with pytest.raises(AssertionError, match=f"page {page} is free"):
        getattr(allocator, method)([page])
    assert allocator.owners(page) == 0
    assert allocator.pages_in_use == 0
    assert allocator.allocate(3) == [0, 1, 2]


def test_a_double_release_in_one_call_is_caught():
    allocator = PageAllocator(PAGE_SIZE)
    [page] = allocator.allocate(1)
    with pytest.raises(AssertionError, match="is free"):
        allocator.release([page, page])


def test_the_peak_remembers_until_it_is_reset():
    allocator = PageAllocator(PAGE_SIZE)
    allocator.release(allocator.allocate(5))
    allocator.allocate(2)
    assert (allocator.pages_in_use, allocator.peak_pages_in_use) == (2, 5)
    allocator.reset_peak()
    assert allocator.peak_pages_in_use == 2
    allocator.allocate(1)
    assert allocator.peak_pages_in_use == 3


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from("arf"), st.integers(0, 6)), max_size=40),
    max_pages=st.sampled_from([None, 0, 1, 9]),
)
def test_used_and_free_are_all_pages_after_every_call(calls, max_pages):
    """The reference is a plain counter of owners."""
    allocator, owners = PageAllocator(PAGE_SIZE, max_pages), Counter()
    total = peak = 0
    for call, number in calls:
        used = sorted(+owners)
        page = used[number % len(used)] if used else None
        if call == "a" and max_pages is not None and len(used) + number > max_pages:
            with pytest.raises(OutOfPagesError):
                allocator.allocate(number)
        elif call == "a":
            free = [page for page in range(total + number) if not owners[page]][:number]
            assert allocator.allocate(number) == free
            owners.update(free)
            total = max([total, *(page + 1 for page in free)])
        elif call == "r" and used:
            allocator.retain([page])
            owners[page] += 1
        elif call == "f" and used:
            allocator.release([page])
            owners[page] -= 1
        peak = max(peak, len(+owners))
        assert [allocator.owners(page) for page in range(total)] == [
            owners[p] for p in range(total)
        ]
        assert allocator.num_pages == total
        assert (allocator.pages_in_use, allocator.peak_pages_in_use) == (len(+owners), peak)


# PagePool


def grown(pool):
    """The tensors of layer 0, able to hold every page handed out: what a pass begins with."""
    pool.grow()
    return pool.layer(0, states(), states(), is_first_pass=True)


def test_growth_keeps_contents():
    pool = new_pool(1)
    written = []
    for step in range(9):
        k_pool, v_pool = grown(pool)
        assert k_pool.shape[0] >= pool.allocator.num_pages
        page = pool.allocator.num_pages - 1
        k_pool[page], v_pool[page] = step, -step
        written.append((page, step))
        pool.allocator.allocate(1 + step % 3)
    k_pool, v_pool = grown(pool)
    for page, step in written:
        assert (k_pool[page] == step).all()
        assert (v_pool[page] == -step).all()


def test_on_a_cpu_a_head_s_tokens_of_consecutive_pages_are_neighbours():
    pool = new_pool(5)
    for side in (*pool.layer(0, states(), states(), is_first_pass=True), *grown(pool)):
        tokens = Tokens(slice(1, 4), num_nodes=1, first_slot=2, kv_len=9).of(side)
        assert tokens.stride()[2:] == (HEAD_DIM, 1)
        assert tokens.data_ptr() == side[1, 0, 2].data_ptr()  # no copy of them


def test_a_pool_that_fits_is_the_same_storage():
    pool = new_pool(3)
    before = grown(pool)
    pool.allocator.release([0, 1])
    pool.allocator.allocate(2)
    after = grown(pool)
    assert [tensor.data_ptr() for tensor in after] == [tensor.data_ptr() for tensor in before]


@pytest.mark.parametrize(
    ("reserved", "capacities"),
    [
        (0, [2, 3, 4, 5, 6, 7, 8, 9]),
        (100, [4, 4, 4, 10, 10, 10, 10, 10]),
        (7, [4, 4, 4, 7, 7, 7, 8, 9]),
    ],
)
def test_growth_doubles_but_not_beyond_what_was_announced(reserved, capacities):
    pool = new_pool(2)
    pool.reserve(reserved)
    assert pool.layers() == [], "announcing allocates nothing"
    for capacity in capacities:
        assert grown(pool)[0].shape[0] == capacity
        pool.allocator.allocate(1)


def test_storage_never_shrinks_when_less_is_announced():
    pool = new_pool(4)
    pool.reserve(8)
    before = grown(pool)[0]
    pool.reserve(1)
    assert grown(pool)[0] is before
    pool.allocator.allocate(5)
    assert grown(pool)[0].shape[0] == 9


@pytest.mark.parametrize("reserved", [0, 5, 100])
def test_storage_is_never_larger_than_max_pages(reserved):
    pool = new_pool(3, max_pages=5)
    pool.reserve(reserved)
    assert grown(pool)[0].shape[0] <= 5
    for _ in range(2):
        pool.allocator.allocate(1)
        assert grown(pool)[0].shape[0] <= 5


def test_each_layer_takes_its_shape_and_dtype_from_what_it_is_given():
    pool = new_pool(3)
    k, v = states(torch.float16), torch.zeros(5, NUM_KV_HEADS, 16, dtype=torch.bfloat16)
    k_pool, v_pool = pool.layer(7, k, v, is_first_pass=True)
    assert (k_pool.shape, k_pool.dtype) == ((3, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), torch.float16)
    assert (v_pool.shape, v_pool.dtype) == ((3, NUM_KV_HEADS, PAGE_SIZE, 16), torch.bfloat16)
    other, _ = pool.layer(2, states(num_kv_heads=5), states(num_kv_heads=5), is_first_pass=True)
    assert other.shape[1] == 5
    assert [k_pool.dtype for k_pool, _ in pool.layers()] == [torch.float32, torch.float16]


@pytest.mark.parametrize(
    "changed", [states(torch.bfloat16), states(num_kv_heads=3), states()[..., :4]]
)
@pytest.mark.parametrize("is_key", [True, False])
def test_a_changed_model_gets_fresh_storage(changed, is_key):
    pool = new_pool(2)
    pool.layer(0, states(), states(), is_first_pass=True)
    k, v = (changed, states()) if is_key else (states(), changed)
    k_pool, v_pool = pool.layer(0, k, v, is_first_pass=True)
    for tensor, given_states in ((k_pool, k), (v_pool, v)):
        assert tensor.dtype == given_states.dtype
        assert tensor.shape[::3] == (2, given_states.shape[-1])
        assert tensor.shape[1] == given_states.shape[1]
    assert len(pool.layers()) == 1


def test_copy_pages_copies_whole_pages_in_every_layer_and_nothing_else():
    pool = new_pool(6)
    for layer_idx in range(3):
        k_pool, v_pool = pool.layer(layer_idx, states(), states(), is_first_pass=True)
        k_pool.copy_(torch.randn(k_pool.shape))
        v_pool.copy_(torch.randn(v_pool.shape))
    before = [(k.clone(), v.clone()) for k, v in pool.layers()]
    pool.copy_pages([(0, 4), (0, 5), (3, 1)])
    source = torch.tensor([0, 3, 2, 3, 0, 0])
    for (k, v), (old_k, old_v) in zip(pool.layers(), before, strict=True):
        assert torch.equal(k, old_k[source])
        assert torch.equal(v, old_v[source])
    pool.copy_pages([])
    new_pool(2).copy_pages([(0, 1)])  # nothing stored yet, nothing to copy


def test_pages_handed_out_since_the_last_layer_can_be_copied_to():
    """Beam search clones right after a step: the targets are newer than the pool."""
    pool = new_pool(2)
    k_pool, _ = pool.layer(0, states(), states(), is_first_pass=True)
    k_pool[1] = 5
    [target] = pool.allocator.allocate(1)
    pool.copy_pages([(1, target)])
    k_pool, _ = pool.layer(0, states(), states(), is_first_pass=True)
    assert (k_pool[target] == 5).all()
    assert (k_pool[1] == 5).all()


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("after", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_storage_born_in_any_mode_can_be_written_in_any_other(inside, after):
    pool = new_pool(2)
    with inside():
        k = states() + 1
        for tensor in pool.layer(0, k, k, is_first_pass=True):
            assert not tensor.is_inference()
            tensor[0, :, 0] = k[0]
    pool.allocator.allocate(1)  # grows: contents pass from one mode to the other
    with after():
        for tensor in grown(pool):
            assert not tensor.requires_grad
            tensor[1, :, 0] = 2
        pool.copy_pages([(0, 2)])
        for tensor in grown(pool):
            assert (tensor[[0, 2], :, 0] == 1).all()
            assert (tensor[1, :, 0] == 2).all()


def test_storage_does_not_join_the_graph_of_what_it_is_shaped_by():
    pool = new_pool(2)
    k = states().requires_grad_()
    assert not any(
        tensor.requires_grad for tensor in pool.layer(0, k * 2, k * 2, is_first_pass=True)
    )
    pool.allocator.allocate(3)
    assert not any(
        tensor.requires_grad for tensor in pool.layer(0, k * 2, k * 2, is_first_pass=True)
    )


@pytest.mark.parametrize("num_pages", [1, 3, 8])
def test_page_bytes_are_those_of_the_storage(num_pages):
    pool = new_pool(num_pages)
    assert pool.page_bytes() == 0
    pool.layer(0, states(), states(), is_first_pass=True)
    pool.layer(1, states(torch.float16), states(torch.float16, num_kv_heads=3), is_first_pass=True)
    stored = sum(tensor.untyped_storage().nbytes() for pair in pool.layers() for tensor in pair)
    assert pool.page_bytes() * num_pages == stored
    numbers = PAGE_SIZE * HEAD_DIM
    assert pool.page_bytes() == 4 * 2 * NUM_KV_HEADS * numbers + 2 * (NUM_KV_HEADS + 3) * numbers


def test_page_bytes_before_any_page_is_handed_out():
    pool = new_pool(0)
    k_pool, _ = pool.layer(0, states(), states(), is_first_pass=True)
    assert k_pool.shape[0] == 0
    assert pool.page_bytes() == 2 * 4 * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
