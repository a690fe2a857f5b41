"""KV trees for tests: how to make one, what it holds, and what has to be true of any."""

from __future__ import annotations

from hypothesis import settings

from hf_cascade.pages import PageAllocator
from hf_cascade.tree import KVTree, Node, token_bytes

PAGE_SIZES = (1, 2, 3, 16)


def deterministic(max_examples: int, **options) -> settings:
    return settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None, **options
    )


def new_tree(page_size: int, max_pages: int | None = None) -> tuple[KVTree, PageAllocator]:
    allocator = PageAllocator(page_size, max_pages)
    return KVTree(allocator), allocator


def insert(tree: KVTree, *rows: list[int]) -> list[Node]:
    return tree.insert([token_bytes(row) for row in rows])


def grow(tree: KVTree, *rows: list[int]) -> list[Node]:
    """Insert rows and open a leaf for each."""
    return tree.open_leaves(insert(tree, *rows))


def ids(node: Node) -> list[int]:
    return memoryview(bytes(node.tokens)).cast("i").tolist()


def path_ids(tree: KVTree, node: Node) -> list[int]:
    return [token for ancestor in tree.path(node) for token in ids(ancestor)]


def path_slots(tree: KVTree, node: Node) -> list[int]:
    return [slot for ancestor in tree.path(node) for slot in tree.slots(ancestor)]


def kv_of(tokens: list[int]) -> list[int]:
    """A stand-in for KV: like it, each value depends on its token and on all before it."""
    values = [0]
    for token in tokens:
        values.append(hash((values[-1], token)))
    return values[1:]


def snapshot(tree: KVTree, allocator: PageAllocator) -> tuple:
    """All that the tree and the allocator hold, comparable and detached from both."""
    nodes = tree.nodes()
    shape = [
        (id(node), ids(node), id(node.parent), [id(child) for child in node.children])
        for node in nodes
    ]
    storage = [(list(node.pages), node.first_slot, node.num_sequences) for node in nodes]
    owners = [allocator.owners(page) for page in range(allocator.num_pages)]
    in_use = (allocator.num_pages, allocator.pages_in_use, allocator.peak_pages_in_use)
    return [id(root) for root in tree.roots], shape, storage, owners, in_use


def check_structure(tree: KVTree, allocator: PageAllocator) -> None:
    nodes = tree.nodes()
    assert len(set(nodes)) == len(nodes)
    assert all(root.parent is None and root.kv_len for root in tree.roots)
    seen: set[Node] = set()
    for node in nodes:
        seen.add(node)
        assert node.parent is None or (node.parent in seen and node in node.parent.children)
        assert all(child.parent is node for child in node.children)
        assert node.num_sequences == sum(n.num_sequences for n in node.children) + node.is_leaf
        end = node.first_slot + node.kv_len
        assert len(node.pages) == -(-end // allocator.page_size)
        assert len(set(node.pages)) == len(node.pages)
        assert node.first_slot < allocator.page_size
        assert node.kv_len or not node.first_slot
        assert tree.path(node)[-1] is node
    listed = [page for node in nodes for page in node.pages]
    for page in range(allocator.num_pages):
        assert allocator.owners(page) == listed.count(page), f"page {page}"
    free = sum(allocator.owners(page) == 0 for page in range(allocator.num_pages))
    assert allocator.pages_in_use == len(set(listed)) == allocator.num_pages - free
