"""The topology of the KV tree: who shares which tokens, and on which pages those lie.

A node is a maximal run of tokens shared by the same sequences. Its tokens fill the slots of its
pages one after the other, from `first_slot` of the first page on:

    node 0  [t t t t][t t . .]           6 tokens, pages 0 and 1, page_size 4
    node 1          └─[. . t t][t . . .] 3 tokens, pages 1 and 2, first_slot 2: cut off from node 0
    node 2          └─[t t . .]          2 tokens, page 3: a new child starts in a fresh page

Three rules keep pages safe to share. Only leaves grow, and each live sequence has its own leaf.
Whatever lies behind the end of a leaf in its last page belongs to nobody else. Each node counts as
one owner of each of its pages. Nothing here touches K or V: storage is the caller's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise, takewhile
from typing import Protocol

from .tree_text import describe_node, describe_tree

UNKNOWN_TOKEN = -1
"""A token whose id the host never read. It matches nothing, not even another unknown token."""


class Allocator(Protocol):
    """What the tree asks of `pages.PageAllocator`."""

    page_size: int

    def allocate(self, count: int) -> list[int]: ...
    def retain(self, pages: Iterable[int]) -> None: ...
    def release(self, pages: Iterable[int]) -> None: ...
    def owners(self, page: int) -> int: ...


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """A run of tokens; equal to itself only.

    Args:
        tokens: token ids as int32, the bytes of `token_bytes`.
        pages: ids of the pages that hold the tokens, ceil((first_slot + kv_len) / page_size).
        first_slot: slot of the first token within pages[0]; 0 in an empty node.
        num_sequences: live sequences with this node on their path; 0 until `open_leaves`.
    """

    tokens: bytearray = field(default_factory=bytearray)
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    first_slot: int = 0
    num_sequences: int = 0

    @property
    def kv_len(self) -> int:
        return len(self.tokens) // 4

    @property
    def is_leaf(self) -> bool:
        """Whether a live sequence ends here, and goes on growing here."""
        return self.num_sequences == 1 and not self.children

    def __repr__(self) -> str:
        return f"<Node: {describe_node(self)}>"


class KVTree:
    """A forest of nodes over the pages of one allocator."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.roots: list[Node] = []

    # Sequences come: match, insert, open_leaves, fork

    def match(self, tokens: bytes) -> tuple[Node | None, int]:
        """The deepest node on the path of `tokens`, and how many of them the tree holds.

        The last of these tokens may lie inside the node. (None, 0) when the tree holds none.
        """
        best: tuple[Node | None, int] = (None, 0)
        waiting = [(self.roots, 0)]
        while waiting:
            siblings, start = waiting.pop()
            first_token = tokens[4 * start : 4 * start + 4]
            # Several may go on alike: leaves of one parent that decoded the same tokens.
            for node in [node for node in siblings if node.tokens[:4] in (first_token, b"")]:
                held = start + _common_tokens(node.tokens, tokens, start)
                if held > best[1]:
                    best = (node, held)
                if held - start == node.kv_len:
                    waiting.append((node.children, held))
        return best

    def insert(self, rows: Sequence[bytes]) -> list[Node]:
        """Make the tree hold `rows`, and return the node that each row ends with.

        Rows share all they can with each other and with the tree; nodes divide only where rows
        part or end. The nodes created here, whose KV is to be computed, have num_sequences 0 until
        `open_leaves`, which must be the next change of the tree.

        Args:
            rows: one prompt each, as `token_bytes`; identical rows end in the same node.
        Raises:
            ValueError: a row is empty or not whole tokens.
            OutOfPagesError: the rows don't fit, all together; nothing has changed.
        """
        for index, row in enumerate(rows):
            if not row or len(row) % 4:
                raise ValueError(f"rows[{index}] must be one or more int32, got {len(row)} bytes")
        # Sorted, rows that begin alike are neighbours: two rows have in common the least of what
        # neighbours have on the way from one to the other.
        order = sorted(range(len(rows)), key=rows.__getitem__)
        common = [_common_tokens(rows[a], rows[b], 0) for a, b in pairwise(order)] + [0]
        runs: list[list[tuple[int, int]]] = []  # per row in order, the tokens of its new nodes
        for place, index in enumerate(order):
            held = max(self.match(rows[index])[1], common[place - 1])
            borders = accumulate(common[place:], min, initial=len(rows[index]) // 4)
            runs.append(list(pairwise(sorted({held, *takewhile(held.__lt__, borders)}))))
        needed = [self._num_pages(stop - start) for row_runs in runs for start, stop in row_runs]
        pages = iter(self.allocator.allocate(sum(needed)))

        nodes: dict[int, Node] = {}
        for index, row_runs in zip(order, runs, strict=True):
            node, held = self.match(rows[index])
            if node is not None:
                at = held - sum(ancestor.kv_len for ancestor in self.path(node)[:-1])
                node = self.cut(node, at) if at < node.kv_len else self._fork_point(node)
            for start, stop in row_runs:
                node = Node(bytearray(rows[index][4 * start : 4 * stop]), node)
                node.pages += islice(pages, self._num_pages(stop - start))
                self._siblings(node).append(node)
            assert node is not None
            nodes[index] = node
        ends = [nodes[index] for index in range(len(rows))]
        # Back from sorted order: siblings created here stand in the order of their first rows.
        first_row = {node: i for i in reversed(range(len(ends))) for node in self.path(ends[i])}
        for siblings in [self.roots, *(node.children for node in first_row)]:
            siblings.sort(key=lambda node: -1 if node.num_sequences else first_row.get(node, -1))
        return ends

    def open_leaves(self, ends: Sequence[Node]) -> list[Node]:
        """One leaf per sequence, in order, to decode into. Takes no pages.

        Args:
            ends: the node that each sequence ends with so far; a node given k times starts k
                sequences. A childless node that starts a single one becomes its leaf.
        """
        leaves = {}
        for node, count in Counter(ends).items():
            if count == 1 and not node.children and not node.num_sequences:
                self._count_sequences(node, 1)
                leaves[node] = iter([node])
            else:
                leaves[node] = iter(self.fork(self._fork_point(node), count))
        return [next(leaves[node]) for node in ends]

    def fork(self, node: Node, count: int) -> list[Node]:
        """Give `node` `count` empty children, each the leaf of a new sequence. Copies nothing.

        The sequence of a leaf that is forked lives on in the children.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self._count_sequences(node, count - node.is_leaf)
        children = [Node(parent=node, num_sequences=1) for _ in range(count)]
        node.children += children
        return children

    # Sequences grow: extend, slots, reorder

    def extend(self, leaves: Sequence[Node], tokens: Sequence[bytes]) -> None:
        """Append tokens to each leaf.

        Args:
            leaves: leaves of live sequences, each at most once.
            tokens: what to append to each, as `token_bytes`; UNKNOWN_TOKEN is allowed.
        Raises:
            OutOfPagesError: the tokens don't fit, all together; nothing has changed.
        """
        self._check_leaves(leaves)
        if len(tokens) != len(leaves) or any(len(new) % 4 for new in tokens):
            raise ValueError(f"tokens must be whole int32 for each of {len(leaves)} leaves")
        num_new_pages = [
            self._num_pages(leaf.first_slot + leaf.kv_len + len(new) // 4) - len(leaf.pages)
            for leaf, new in zip(leaves, tokens, strict=True)
        ]
        pages = iter(self.allocator.allocate(sum(num_new_pages)))
        for leaf, new, count in zip(leaves, tokens, num_new_pages, strict=True):
            leaf.pages.extend(islice(pages, count))
            leaf.tokens += new

    def slots(self, node: Node, start: int = 0, stop: int | None = None) -> list[int]:
        """Where tokens [start, stop) of `node`, all by default, lie: page * page_size + offset."""
        stop = node.kv_len if stop is None else stop
        if not 0 <= start <= stop <= node.kv_len:
            raise ValueError(f"[{start}, {stop}) must lie within the {node.kv_len} tokens of node")
        page_size, pages, first_slot = self.allocator.page_size, node.pages, node.first_slot
        positions = range(first_slot + start, first_slot + stop)
        return [pages[at // page_size] * page_size + at % page_size for at in positions]

    def reorder(
        self, leaves: Sequence[Node], order: Sequence[int]
    ) -> tuple[list[Node], list[tuple[int, int]]]:
        """Let new sequence i continue old sequence order[i]; prune those that nobody continues.

        The first to continue a sequence takes over its leaf; others get a clone that shares the
        full pages and has its own copy of the last one, if that is partly filled.

        Returns:
            The new leaves, and (source page, target page) copies that the caller must make in
            storage before anything is written.
        Raises:
            OutOfPagesError: even the pages set free don't hold the copies; nothing has changed.
        """
        self._check_leaves(leaves)
        if not all(0 <= source < len(leaves) for source in order):
            raise ValueError(f"order must index {len(leaves)} leaves, got {list(order)}")
        takers = Counter(leaves[source] for source in order)
        ended = [leaf for leaf in leaves if leaf not in takers]
        needed = sum(count - 1 for leaf, count in takers.items() if self._last_page_open(leaf))
        # Pages that pruning will set free pass to the clones first, so a failure changes nothing.
        ending = Counter(node for leaf in ended for node in self.path(leaf))
        gone = (node for node, count in ending.items() if count == node.num_sequences)
        freed = Counter(page for node in gone for page in node.pages)
        reused = [page for page, count in freed.items() if count == self.allocator.owners(page)]
        targets = reused[:needed] + self.allocator.allocate(max(0, needed - len(reused)))
        self.allocator.retain(reused[:needed])

        new_leaves: dict[Node, Iterator[Node]] = {}
        copies: list[tuple[int, int]] = []
        for leaf, count in takers.items():
            num_full = len(leaf.pages) - self._last_page_open(leaf)
            clones = []
            for _ in range(count - 1):
                pages = leaf.pages[:num_full]
                self.allocator.retain(pages)
                for source_page in leaf.pages[num_full:]:
                    pages.append(targets.pop())
                    copies.append((source_page, pages[-1]))
                clones.append(Node(leaf.tokens[:], leaf.parent, [], pages, leaf.first_slot))
            self._siblings(leaf).extend(clones)
            for clone in clones:
                self._count_sequences(clone, 1)
            new_leaves[leaf] = iter([leaf, *clones])
        for leaf in ended:
            self.prune(leaf)
        return [next(new_leaves[leaves[source]]) for source in order], copies

    # Nodes divide and join, sequences go: cut, prune, clear

    def cut(self, node: Node, at: int) -> Node:
        """Divide `node` before its token `at`; returns the new upper part. Copies nothing.

        `node` itself goes on as the lower part, so that whoever holds a leaf, or the node that a
        row ends with, still does. A page with tokens of both parts is owned by both.
        """
        if not 0 < at < node.kv_len:
            raise ValueError(f"at must be between 0 and kv_len={node.kv_len}, got {at}")
        return self._divide(node, at)

    def prune(self, leaf: Node) -> None:
        """End the sequence of `leaf`: free what only it used, join what needs no border now.

        Joined nodes go on as the lowest of them: leaves of other sequences stay valid.
        """
        self._check_leaves([leaf])
        path = self.path(leaf)
        self._count_sequences(leaf, -1)
        top = next(node for node in path if not node.num_sequences)
        self._siblings(top).remove(top)
        self._free(_depth_first([top]))
        node = top.parent
        while node and node.parent and len(node.parent.children) == 1:
            node = node.parent
        while node and len(node.children) == 1:
            child = node.children[0]
            self._join(node, child)
            node = child

    def clear(self) -> None:
        """Free every node. Leaves held elsewhere are no longer valid."""
        self._free(self.nodes())
        self.roots.clear()

    # Reading

    def nodes(self) -> list[Node]:
        """All nodes, depth first, parents before their children."""
        return list(_depth_first(self.roots))

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root down to `node`."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def describe(self) -> str:
        """The tree as text, one line per node; leaves side by side that look alike share one."""
        return describe_tree(self.roots, self.nodes())

    # Helpers

    def _num_pages(self, num_slots: int) -> int:
        return -(-num_slots // self.allocator.page_size)

    def _last_page_open(self, node: Node) -> bool:
        return (node.first_slot + node.kv_len) % self.allocator.page_size != 0

    def _siblings(self, node: Node) -> list[Node]:
        return self.roots if node.parent is None else node.parent.children

    def _count_sequences(self, node: Node, change: int) -> None:
        for ancestor in self.path(node):
            ancestor.num_sequences += change

    def _check_leaves(self, leaves: Sequence[Node]) -> None:
        if len(set(leaves)) != len(leaves):
            raise ValueError("leaves must be distinct, got a leaf more than once")
        for index, leaf in enumerate(leaves):
            if not leaf.is_leaf:
                raise ValueError(f"leaves[{index}] must be a leaf of a live sequence, got {leaf}")

    def _fork_point(self, node: Node) -> Node:
        """A node that ends where `node` ends and may have children, as a leaf may not."""
        if not node.is_leaf:
            return node
        if node.parent is not None and not node.tokens:
            return node.parent
        return self._divide(node, node.kv_len)

    def _divide(self, node: Node, at: int) -> Node:
        page_size, border = self.allocator.page_size, node.first_slot + at
        upper = Node(
            tokens=node.tokens[: 4 * at],
            parent=node.parent,
            children=[node],
            pages=node.pages[: self._num_pages(border)],
            first_slot=node.first_slot,
            num_sequences=node.num_sequences,
        )
        self._replace(node, upper)
        del node.tokens[: 4 * at]
        node.parent = upper
        node.pages = node.pages[border // page_size :] if node.tokens else []
        node.first_slot = border % page_size if node.tokens else 0
        self.allocator.retain(node.pages[: node.first_slot > 0])
        return upper

    def _join(self, node: Node, child: Node) -> None:
        """Put `node` into its only child, if the child starts in the slot where `node` ends.

        An empty child of a node whose last page is open does not: the rest of that page may be a
        clone's, and the child would grow into it.
        """
        is_open = self._last_page_open(node)
        if is_open and child.pages[:1] != node.pages[-1:]:
            return
        self._replace(node, child)
        child.parent, child.first_slot = node.parent, node.first_slot
        child.tokens[:0] = node.tokens
        child.pages[:0] = node.pages[: len(node.pages) - is_open]
        self.allocator.release(node.pages[len(node.pages) - is_open :])

    def _replace(self, node: Node, by: Node) -> None:
        siblings = self._siblings(node)
        siblings[siblings.index(node)] = by

    def _free(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.allocator.release(node.pages)
            node.num_sequences, node.pages = 0, []


def token_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as the int32 bytes that the tree compares and stores."""
    return array("i", ids).tobytes()


def _common_tokens(a: bytes | bytearray, b: bytes, start: int) -> int:
    """How many tokens a and b[start:] begin with in common (start counts tokens too).

    Compares runs that double while they are equal, then halve: nearly all of it is memcmp.
    """
    limit = min(len(a) // 4, len(b) // 4 - start)
    equal, step, growing = 0, 1, True
    while step and equal < limit:
        stop = min(equal + step, limit)
        run = a[4 * equal : 4 * stop]
        alike = run == b[4 * (start + equal) : 4 * (start + stop)] and _UNKNOWN not in run
        equal = stop if alike else equal
        growing = growing and alike
        step = 2 * step if growing else step // 2
    return equal


def _depth_first(siblings: Sequence[Node]) -> Iterator[Node]:
    waiting = list(reversed(siblings))
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


_UNKNOWN = token_bytes([UNKNOWN_TOKEN])
