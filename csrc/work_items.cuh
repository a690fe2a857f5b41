// Which item has which number: matrix warps' nodes one after the other, then nodes of one reader,
// then leaves. Knows CUDA only.
#pragma once

#include "params.h"
#include "split_rule.cuh"

namespace hf_cascade {

// What is found of the tree on the way to the items, in shared memory where it fits. A shared node
// is one that has readers and tokens; they are numbered in the order of the nodes.
struct ListTables {
  int32_t* shared_nodes;   // [N], of which num_shared_nodes are set
  int32_t* shared_ranks;   // [N + 1], shared nodes before node n
  int32_t* splits;         // [N], of the i-th shared node
  int32_t* lengths;        // [N], tokens of each of them
  int32_t* matrix_items;   // [N + 1], items of the shared nodes before the i-th, of those that
  int32_t* single_items;   // [N + 1]   matrix warps read, and of those that leaf warps read
  int32_t* read_states;    // [num_reads], states of its sequence before a read's, -1: an empty node
  int32_t* prefix_states;  // [B], states of a sequence's prefix
  int32_t* leaf_lengths;   // [B], tokens of a split of the leaf
  int32_t* path_indptr;    // [B + 1], states (not decoding: prefix nodes) before b's
  int32_t* leaf_states;    // [B + 1], states of the leaves (not decoding: items) before b's
  uint32_t* read_bits;     // [num_shared_nodes, ceil(B / 32)], sequences that read a shared node
  int32_t* first_reads;    // the same, the first of these reads
  int32_t num_seq_words;   // ceil(B / 32)
  int32_t num_shared_nodes;
};

// Places the tables at `memory`; returns the words that they take. (Null to count them, for which
// the pointers are sums of integers: a choice between null and not is made anew wherever they are
// used.)
__host__ __device__ inline int64_t place_tables(ListTables& tables, int32_t* memory, int num_seqs,
                                                int num_nodes, int num_reads) {
  int64_t used = 0;
  const auto place = [&](int64_t length) {
    const auto address = reinterpret_cast<uintptr_t>(memory) + used * sizeof(int32_t);
    used += length;
    return reinterpret_cast<int32_t*>(address);
  };
  const int most_shared = num_nodes < num_reads ? num_nodes : num_reads;
  tables.num_seq_words = ceil_div(num_seqs, 32);
  tables.num_shared_nodes = 0;
  tables.shared_nodes = place(num_nodes);
  tables.shared_ranks = place(num_nodes + 1);
  tables.splits = place(num_nodes);
  tables.lengths = place(num_nodes);
  tables.matrix_items = place(num_nodes + 1);
  tables.single_items = place(num_nodes + 1);
  tables.read_states = place(num_reads);
  tables.prefix_states = place(num_seqs);
  tables.leaf_lengths = place(num_seqs);
  tables.path_indptr = place(num_seqs + 1);
  tables.leaf_states = place(num_seqs + 1);
  tables.read_bits =
      reinterpret_cast<uint32_t*>(place(int64_t{most_shared} * tables.num_seq_words));
  tables.first_reads = place(int64_t{most_shared} * tables.num_seq_words);
  return used;
}

__host__ __device__ inline int num_readers_of(const TreeParams& tree, int node) {
  return tree.reader_indptr ? tree.reader_indptr[node + 1] - tree.reader_indptr[node] : 0;
}

__host__ __device__ inline int leaf_length(const TreeParams& tree, int seq) {
  return tree.leaves ? tree.kv_len[tree.leaves[seq]] : 0;
}

// Items of one split of a shared node that matrix warps read.
__host__ __device__ inline int num_columns(int num_readers, const WorkShape& shape) {
  return ceil_div(num_readers, shape.tile_tokens) * shape.num_kv_heads;
}

// A node that takes part: `states` of it for each split.
struct Entry {
  int kv_len, columns, states;
  bool is_leaf, by_leaf_warps;
};

__host__ __device__ inline Entry find_entry(int i, const TreeParams& tree, const ListTables& tables,
                                            const WorkShape& shape) {
  if (i >= tables.num_shared_nodes) {
    const int kv_len = leaf_length(tree, i - tables.num_shared_nodes);
    return {kv_len, shape.num_kv_heads, 1, true, leaf_warps_read_leaves(shape)};
  }
  const int node = tables.shared_nodes[i], num_readers = num_readers_of(tree, node);
  const bool single = is_single(num_readers, shape);
  return {tree.kv_len[node], single ? shape.num_kv_heads : num_columns(num_readers, shape),
          num_readers, false, single};
}

// The KV of an item: one split of a node.
__host__ __device__ inline void set_range(Item& item, const TreeParams& tree, int node, int split,
                                          int length, const WorkShape& shape) {
  const int begin = split * length, rest = tree.kv_len[node] - begin;
  if (rest <= 0) return;  // a node without tokens may have no pages to look at
  item.begin_slot = tree.first_slot[node] + begin;
  item.end_slot = item.begin_slot + (rest < length ? rest : length);
  item.pages = tree.kv_indptr[node];
  item.grows = rest <= length;
  for (int i = 0; i < kItemPages; ++i) {
    const int slot = align_slot(item.begin_slot) + i * kBoxTokens;
    if (slot >= item.end_slot) break;
    item.first_pages[i] = tree.kv_indices[item.pages + (slot >> shape.page_size_log2)];
  }
}

// A sequence's row of q, -1 if it has none, and where the `state`-th of its states goes.
struct TokenTarget {
  int32_t token;
  Target target;
};

__host__ __device__ inline TokenTarget find_target(const TreeParams& tree, const ListTables& tables,
                                                   int seq, int state) {
  const int token = tree.q_indptr[seq], begin = tables.path_indptr[seq];
  if (tree.q_indptr[seq + 1] <= token) return {-1, kNowhere};
  const bool is_lone = tables.path_indptr[seq + 1] - begin == 1;
  return {token, is_lone ? ~token : begin + state};
}

__host__ __device__ inline void set_token(Item& item, const TreeParams& tree,
                                          const ListTables& tables, int seq, int state) {
  const TokenTarget found = find_target(tree, tables, seq, state);
  item.first_read = -1;
  item.num_tokens = 1;
  item.token = item.first_token = found.token;
  item.target = found.target;
}

// Decoding: the row of q of the first of these reads, if each read has one and they are
// consecutive; else -1.
__host__ __device__ inline int first_token_of(const TreeParams& tree, int first_read,
                                              int num_reads) {
  const int first = tree.readers[first_read], last = tree.readers[first_read + num_reads - 1];
  const int first_token = tree.q_indptr[first], last_token = tree.q_indptr[last];
  // Readers ascend, so these are neighbours; and none has two tokens, so none before the last lacks
  // its own.
  const bool are_consecutive =
      last - first == num_reads - 1 && last_token - first_token == num_reads - 1;
  return are_consecutive && tree.q_indptr[last + 1] > last_token ? first_token : -1;
}

// Of a decoding launch, the `index`-th item.
__host__ __device__ inline Item make_item(int index, const TreeParams& tree,
                                          const ListTables& tables, const WorkShape& shape) {
  Item item = {};
  const int num_shared = tables.num_shared_nodes, heads = shape.num_kv_heads;
  const int num_matrix_items = tables.matrix_items[num_shared];
  const int num_node_items = num_matrix_items + tables.single_items[num_shared];
  const bool is_matrix = index < num_matrix_items, is_leaf = index >= num_node_items;
  // Whose it is, a shared node's or a sequence's, and which of its items.
  const int32_t* before = is_matrix ? tables.matrix_items : tables.single_items;
  int rest = is_matrix ? index : index - num_matrix_items;
  int owner;
  if (is_leaf) {
    rest = index - num_node_items;
    owner = find_item(tables.leaf_states, tree.num_seqs, rest / heads);
    rest -= tables.leaf_states[owner] * heads;
  } else {
    owner = find_item(before, num_shared, rest);
    rest -= before[owner];
  }
  const int node = !is_leaf ? tables.shared_nodes[owner] : tree.leaves ? tree.leaves[owner] : -1;
  if (is_matrix) {
    const int first_read = tree.reader_indptr[node];
    const int num_readers = tree.reader_indptr[node + 1] - first_read;
    const int tile_tokens = shape.tile_tokens, num_tiles = ceil_div(num_readers, tile_tokens);
    const int column = rest / num_tiles, skipped = (rest - column * num_tiles) * tile_tokens;
    rest = column;
    item.first_read = first_read + skipped;
    item.num_tokens = min(tile_tokens, num_readers - skipped);
    item.first_token = first_token_of(tree, item.first_read, item.num_tokens);
  }
  const int split = rest / heads;
  item.head = rest - split * heads;
  if (is_matrix) {
    item.split = split;
  } else {
    const int read = is_leaf ? 0 : tree.reader_indptr[node];
    const int seq = is_leaf ? owner : tree.readers[read];
    const int states = is_leaf ? tables.prefix_states[owner] : tables.read_states[read];
    set_token(item, tree, tables, seq, states + split);
  }
  const int length = is_leaf ? tables.leaf_lengths[owner] : tables.lengths[owner];
  if (node >= 0) set_range(item, tree, node, split, length, shape);
  return item;
}

}  // namespace hf_cascade
