"""Any history of calls leaves the tree as plain lists of tokens would be."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trees import (
    check_structure,
    deterministic,
    ids,
    insert,
    kv_of,
    new_tree,
    path_ids,
    path_slots,
    snapshot,
)

from hf_cascade.errors import OutOfPagesError
from hf_cascade.tree import UNKNOWN_TOKEN, Node, token_bytes

TOKENS = st.lists(st.integers(0, 2), max_size=7)


class TreeAgainstLists(RuleBasedStateMachine):
    """Any history of calls, against plain lists of tokens and a memory that simulates storage.

    `sequences` maps each live leaf to the true tokens of its sequence, also where the tree only
    knows UNKNOWN_TOKEN; `memory` maps a slot to what was last written there.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 16]), max_pages=st.sampled_from([8, 30, 300])
    )
    def start(self, page_size: int, max_pages: int) -> None:
        self.tree, self.allocator = new_tree(page_size, max_pages)
        self.sequences: dict[Node, list[int]] = {}
        self.memory: dict[int, int] = {}

    def attempt(self, change, *args):
        """The result of `change`; None, and nothing changed, if there are too few pages."""
        before = snapshot(self.tree, self.allocator)
        try:
            return change(*args)
        except OutOfPagesError:
            assert snapshot(self.tree, self.allocator) == before
            return None

    def pick(self, data, count: int = 1) -> list[Node]:
        leaves = st.sampled_from(list(self.sequences))
        return data.draw(st.lists(leaves, min_size=1, max_size=count, unique_by=id))

    def true_tokens(self, node: Node) -> list[int]:
        length = sum(ancestor.kv_len for ancestor in self.tree.path(node))
        leaf = next(leaf for leaf in self.sequences if node in self.tree.path(leaf))
        return self.sequences[leaf][:length]

    def write(self, slots: list[int], values: list[int]) -> None:
        assert len(slots) == len(values)
        self.memory.update(zip(slots, values, strict=True))

    @rule(data=st.data(), count=st.integers(1, 4))
    def insert_rows(self, data, count: int) -> None:
        known = [path_ids(self.tree, leaf) for leaf in self.sequences]
        held = {tuple(row[:end]) for row in known for end in range(1, len(row) + 1)}
        held = {prefix for prefix in held if UNKNOWN_TOKEN not in prefix}
        rows = []
        for _ in range(count):
            stem = list(data.draw(st.sampled_from(sorted(held)))) if held else []
            row = data.draw(st.booleans()) * stem + data.draw(TOKENS)
            rows.append(row or [1])
        for row in rows:
            node, matched = self.tree.match(token_bytes(row))
            assert matched == max(
                (n for n in range(1, len(row) + 1) if tuple(row[:n]) in held), default=0
            )
            if node is not None:
                assert path_ids(self.tree, node)[:matched] == row[:matched]
                assert matched > sum(n.kv_len for n in self.tree.path(node)[:-1])
        ends = self.attempt(insert, self.tree, *rows)
        if ends is None:
            return
        assert [path_ids(self.tree, end) for end in ends] == rows
        new = [node for node in self.tree.nodes() if not node.num_sequences]
        wanted = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)} - held
        assert sum(node.kv_len for node in new) == len(wanted)
        for node in new:
            assert node.kv_len
            assert node.first_slot == 0
            assert len(node.children) != 1 or node in ends
            self.write(self.tree.slots(node), kv_of(path_ids(self.tree, node))[-node.kv_len :])
        repeats = data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
        starts = [i for i, repeat in enumerate(repeats) for _ in range(repeat)]
        starts = data.draw(st.permutations(starts))
        leaves = self.tree.open_leaves([ends[i] for i in starts])
        for i, leaf in zip(starts, leaves, strict=True):
            assert leaf not in self.sequences
            self.sequences[leaf] = rows[i]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_read=st.booleans())
    def extend_leaves(self, data, is_read: bool) -> None:
        leaves = self.pick(data, 4)
        self.extend(leaves, [data.draw(TOKENS) for _ in leaves], is_read)

    def extend(self, leaves: list[Node], new: list[list[int]], is_read: bool) -> None:
        shown = [tokens if is_read else [UNKNOWN_TOKEN] * len(tokens) for tokens in new]
        lengths = [leaf.kv_len for leaf in leaves]
        self.attempt(self.tree.extend, leaves, [token_bytes(tokens) for tokens in shown])
        for leaf, tokens, length in zip(leaves, new, lengths, strict=True):
            if leaf.kv_len > length:  # there were pages enough
                self.sequences[leaf] = self.sequences[leaf] + tokens
                values = kv_of(self.sequences[leaf])
                slots = self.tree.slots(leaf, length, leaf.kv_len)
                self.write(slots, values[len(values) - len(tokens) :])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork_leaf(self, data, count: int) -> None:
        [leaf] = self.pick(data)
        tokens = self.sequences.pop(leaf)
        self.sequences.update(dict.fromkeys(self.tree.fork(leaf, count), tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 2))
    def open_any_node(self, data, count: int) -> None:
        node = data.draw(st.sampled_from(self.tree.nodes()))
        tokens = self.true_tokens(node)
        self.sequences.update(dict.fromkeys(self.tree.open_leaves([node] * count), tokens))

    @precondition(lambda self: any(node.kv_len > 1 for node in self.tree.nodes()))
    @rule(data=st.data())
    def cut_node(self, data) -> None:
        node = data.draw(st.sampled_from([n for n in self.tree.nodes() if n.kv_len > 1]))
        at, tokens = data.draw(st.integers(1, node.kv_len - 1)), ids(node)
        upper = self.tree.cut(node, at)
        assert (ids(upper), ids(node)) == (tokens[:at], tokens[at:])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def prune_leaf(self, data) -> None:
        [leaf] = self.pick(data)
        self.tree.prune(leaf)
        del self.sequences[leaf]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), width=st.integers(1, 4), grown=st.lists(st.integers(0, 5), max_size=3))
    def search_beams(self, data, width: int, grown: list[int]) -> None:
        """Beams of one sequence part; they grow and are chosen from, again and again."""
        [leaf] = self.pick(data)
        tokens = self.sequences.pop(leaf)
        beams = self.tree.fork(leaf, width)
        self.sequences.update(dict.fromkeys(beams, tokens))
        for count in grown:
            for token, beam in enumerate(beams):
                self.extend([beam], [[token] * count], is_read=True)
            old = st.integers(0, len(beams) - 1)
            beams = self.reorder(beams, data.draw(st.lists(old, min_size=1, max_size=5)))
            self.every_sequence_reads_its_own_kv()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def reorder_leaves(self, data) -> None:
        leaves = self.pick(data, 4)
        order = data.draw(st.lists(st.integers(0, len(leaves) - 1), max_size=5))
        self.reorder(leaves, order)

    def reorder(self, leaves: list[Node], order: list[int]) -> list[Node]:
        result = self.attempt(self.tree.reorder, leaves, order)
        if result is None:
            return leaves
        new_leaves, copies = result
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets), "a copy overwrites the source of another"
        page_size, old = self.allocator.page_size, dict(self.memory)
        for source, target in copies:
            for offset in range(page_size):
                self.memory[target * page_size + offset] = old.get(source * page_size + offset)
        tokens = [self.sequences.pop(leaf) for leaf in leaves]
        for source, leaf in zip(order, new_leaves, strict=True):
            assert leaf not in self.sequences
            self.sequences[leaf] = tokens[source]
        return new_leaves

    @invariant()
    def every_sequence_reads_its_own_kv(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_structure(self.tree, self.allocator)
        assert {node for node in self.tree.nodes() if node.is_leaf} == set(self.sequences)
        for slot in list(self.memory):
            if not self.allocator.owners(slot // self.allocator.page_size):
                del self.memory[slot]
        owned: dict[int, int] = {}
        for leaf, tokens in self.sequences.items():
            shown, slots, values = (
                path_ids(self.tree, leaf),
                path_slots(self.tree, leaf),
                kv_of(tokens),
            )
            assert len(shown) == len(tokens)
            assert all(a in (b, UNKNOWN_TOKEN) for a, b in zip(shown, tokens, strict=True))
            assert [self.memory.get(slot) for slot in slots] == values
            for slot, value in zip(slots, values, strict=True):
                assert owned.setdefault(slot, value) == value, "one slot, two tokens"

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for leaf in self.sequences:
                self.tree.prune(leaf)
            assert self.tree.roots == []
            assert self.allocator.pages_in_use == 0


def test_any_history_reads_back_as_plain_lists_of_tokens():
    """No token is lost, no slot is shared by two tokens, no page is left over."""
    run_state_machine_as_test(TreeAgainstLists, settings=deterministic(200, stateful_step_count=25))
