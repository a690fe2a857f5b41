// The runtime values that several kernels share, with a shape beside each pointer. Knows CUDA only.
// N nodes, B sequences; ops/cascade.py says what each array means.
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

// Where the state of a query token goes: the place of its partial state or, below 0, ~token, its
// row of `out`. kNowhere: the sequence has no query token.
using Target = int32_t;
constexpr Target kNowhere = INT32_MIN;

// How a launch is laid out, the part that depends on the lengths. All of it lies in one int32
// tensor (the op `work_list` makes it) so that one list serves all layers of a step.
struct WorkHeader {
  int32_t is_decode;         // each sequence has at most one query token
  int32_t num_shared_items;  // work items of matrix warps: of shared nodes (or, not decoding, of
                             //   query tiles)
  int32_t num_leaf_items;    // decoding: work items of leaf warps
  int32_t shared_are_still;  // no node whose items are matrix warps' grows in this step
  int32_t shared_stages;     // of the CTA's stages, those of matrix warps; leaf warps have the rest
  int32_t shared_split;      // of nodes that matrix warps read, see split_rule.cuh
  int32_t leaf_split;        // of leaves, and of nodes that leaf warps read
  int32_t all_leaf_warps;    // take items, each with few buffers; else fewer of them, with more
  int32_t shape;             // launch_shape (tiles.cuh) of whom it was made for
};

static_assert(sizeof(WorkHeader) == 36, "as ops/cascade.py has it");

constexpr int kItemPages = 4;

// A work item of a decoding launch: all that finding its first KV needs, so that who takes it has
// one load to wait for and not a chain of them. Its query rows are those of one kv head's group, of
// one token (leaf warps') or of the readers [first_read, first_read + num_tokens).
struct alignas(16) Item {
  int32_t head;        // kv head
  int32_t num_tokens;  // query tokens
  int32_t begin_slot;  // of its KV, counted from the first slot of the node's first page; an empty
  int32_t end_slot;    //   range: nothing to see, the state is empty
  int32_t pages;       // the node's in kv_indices
  int32_t first_read;  // of a shared node, in readers; -1: of one token
  int32_t split;       // of a shared node: which one, added to the reads' targets
  int32_t token;       // of one token: its row of q; -1: the sequence has none
  int32_t target;      // of one token: a Target
  int32_t grows;       // the node's last token, which may be of this step, is in its range
  int32_t first_pages[kItemPages];  // of its first blocks of 16 slots, as far as it has them
  int32_t first_token;  // its first row of q, if its tokens are consecutive rows; else -1
  int32_t padding;
};
static_assert(sizeof(Item) == 64, "as ops/cascade.py has it");

struct WorkList {
  int32_t* leaf_items;   // [B + 1], not decoding: items of the sequences before b
  int32_t* path_indptr;  // [B + 1], partial states (not decoding: prefix nodes) before b's
  int32_t* path;         // [num_reads]; decoding: per read, where the state of its first split goes
                         //   (a Target); not decoding: each sequence's prefix nodes, root first
  int32_t* read_tokens;  // [num_reads]; decoding: per read, its row of q, or 0 if it has none
  WorkHeader* header;
  // Decoding: [most_items], shared nodes' from the front on and leaves' from the back, so that a
  // CTA finds its first ones without the header.
  Item* items;
  int most_items;

  __host__ __device__ Item* shared_item(int i) const { return items + i; }
  __host__ __device__ Item* leaf_item(int i) const { return items + (most_items - 1 - i); }
};

// Offset of the items, in int32, a multiple of 16 bytes; ops/cascade.py computes the same.
inline int64_t items_offset(int64_t num_seqs, int64_t num_reads) {
  const int64_t before =
      int64_t{sizeof(WorkHeader) / sizeof(int32_t)} + 2 * (num_seqs + 1) + 2 * num_reads;
  return (before + 3) / 4 * 4;
}

// most_items: a state takes at most one a kv head.
inline int64_t work_list_size(int64_t num_seqs, int64_t num_reads, int64_t most_items) {
  return items_offset(num_seqs, num_reads) + most_items * int64_t{sizeof(Item) / sizeof(int32_t)};
}

inline WorkList view_work_list(int32_t* work, const TreeParams& tree, int64_t most_items) {
  WorkList list;
  list.header = reinterpret_cast<WorkHeader*>(work);
  list.leaf_items = work + sizeof(WorkHeader) / sizeof(int32_t);
  list.path_indptr = list.leaf_items + tree.num_seqs + 1;
  list.path = list.path_indptr + tree.num_seqs + 1;
  list.read_tokens = list.path + tree.num_reads;
  list.items = reinterpret_cast<Item*>(work + items_offset(tree.num_seqs, tree.num_reads));
  list.most_items = static_cast<int>(most_items);
  return list;
}

}  // namespace hf_cascade
