// The runtime values that several kernels share, with a shape beside each pointer. Plain structs:
// no CUDA, no torch. N nodes, B sequences; ops/cascade.py says what each array means.
#pragma once

#include <cstdint>

namespace hf_cascade {

struct TreeParams {
  const int32_t* q_indptr;       // [B + 1]
  const int32_t* kv_indptr;      // [N + 1], in pages
  const int32_t* kv_indices;     // [num listed pages]
  const int32_t* kv_len;         // [N], tokens
  const int32_t* first_slot;     // [N]
  const int32_t* leaves;         // [B]; null where the suffix is not asked for
  const int32_t* reader_indptr;  // [N + 1]; null where the prefix is not asked for
  const int32_t* readers;        // [num_reads], ascending within a node
  int num_tokens;                // rows of packed q
  int num_seqs;                  // B
  int num_nodes;                 // N
  int num_reads;
};

// Where the state of a query token goes: the slot of its partial state or, below 0, ~token, its row
// of `out`. kNowhere: the sequence has no query token.
using Target = int32_t;
constexpr Target kNowhere = INT32_MIN;

// How a launch is laid out, the part that depends on the lengths. All of it lies in one int32
// tensor (the op `attention_work` makes it) so that one list serves all layers of a step.
struct WorkHeader {
  int32_t is_decode;         // each sequence has at most one query token
  int32_t split_shift;       // KV splits are this many times doubled to fit the scratch
  int32_t num_shared_items;  // work items of shared nodes
  int32_t num_leaf_items;    // work items of leaves (or, not decoding, of query tiles)
  int32_t num_shared_nodes;
  int32_t shared_are_still;  // no node that has readers grows in this step
  int32_t heads_log2;        // a leaf's work item is of this many kv heads, a power of two
  int32_t padding;
};

// A work item of a decoding launch: all that finding its KV needs, so that the producer of the
// attention kernel has one load to wait for and not a chain of them.
struct alignas(16) Item {
  int32_t seq;         // of a leaf; -1: a shared node's item
  int32_t head;        // kv head; of a leaf: the first of its heads
  int32_t num_tokens;  // query tokens
  int32_t num_tiles;   // 0: nothing to see, the state is empty
  int32_t begin_slot;  // of its tokens, counted from the first slot of the node's first page
  int32_t end_slot;
  int32_t pages;  // the node's in kv_indices
  int32_t split;
  int32_t first_read;  // shared: in readers
  int32_t slot;        // leaf: of its partial state; negative: ~token, the row of `out`
  int32_t token;       // leaf: its row of q; -1: it has no query token
  int32_t padding;
};

struct WorkList {
  WorkHeader* header;
  int32_t* shared_nodes;  // [N], of which num_shared_nodes are set: the nodes with readers
  int32_t* shared_items;  // [N + 1], items of the shared nodes before the i-th
  int32_t* leaf_items;    // [B + 1], decoding: states of the leaves before sequence b's; not
                          //   decoding: items before b's
  int32_t* path_indptr;   // [B + 1], partial states (not decoding: prefix nodes) before b's
  int32_t* path;  // [num_reads]; decoding: per read, where the state of its first split goes
                  //   (a Target); not decoding: the prefix nodes of each sequence, root first
  int32_t* read_tokens;  // [num_reads]; decoding: per read, its row of q, or 0 if it has none
  Item* items;           // [num items], when decoding
};

// Offset of the items, in int32, a multiple of 16 bytes; ops/cascade.py computes the same.
inline int64_t items_offset(int64_t num_seqs, int64_t num_nodes, int64_t num_reads) {
  const int64_t before = int64_t{sizeof(WorkHeader) / sizeof(int32_t)} + 2 * num_nodes + 1 +
                         2 * (num_seqs + 1) + 2 * num_reads;
  return (before + 3) / 4 * 4;
}

// A state takes at most one item a kv head.
inline int64_t work_list_size(int64_t num_seqs, int64_t num_nodes, int64_t num_reads,
                              int64_t max_states, int64_t num_kv_heads) {
  return items_offset(num_seqs, num_nodes, num_reads) +
         max_states * num_kv_heads * int64_t{sizeof(Item) / sizeof(int32_t)};
}

inline WorkList view_work_list(int32_t* work, const TreeParams& tree) {
  WorkList list;
  list.header = reinterpret_cast<WorkHeader*>(work);
  list.shared_nodes = work + sizeof(WorkHeader) / sizeof(int32_t);
  list.shared_items = list.shared_nodes + tree.num_nodes;
  list.leaf_items = list.shared_items + tree.num_nodes + 1;
  list.path_indptr = list.leaf_items + tree.num_seqs + 1;
  list.path = list.path_indptr + tree.num_seqs + 1;
  list.read_tokens = list.path + tree.num_reads;
  list.items =
      reinterpret_cast<Item*>(work + items_offset(tree.num_seqs, tree.num_nodes, tree.num_reads));
  return list;
}

}  // namespace hf_cascade
