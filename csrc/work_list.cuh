// Making the work list: which items a launch has, and where their partial states go.
//
// Once a step, for all layers: one CTA counts (work_list_kernel), then a thread an item writes it
// down (items_kernel). An item is (node, KV split, query tile, kv head),
// of a leaf (leaf, KV split, some kv heads).
//   Memory   the lengths and the readers, a few KB, once, to shared memory; writes as much.
//   Compute  a warp a sequence walks the shared nodes 32 at a time, each lane looking for the
//            sequence among one node's readers; prefix sums over sequences and nodes.
//   Writes   the WorkList, and 0 to the ticket counter of the launch that follows, if one does.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace hf_cascade {

constexpr int kBoxTokens = 16;     // tiles start at multiples of this many slots: no page is
                                   // smaller, and the copy engine moves that many at a time
constexpr int kRowsPerTile = 128;  // query rows of one item of a shared node
constexpr int kLeafTokens = 16;    // of a leaf, that a warp takes at a time
constexpr int kMaxLeafRows = 8;    // query rows of a leaf that go the leaf's way
constexpr int kMinSplit = 256;     // tokens; half of it where kv heads are few
constexpr int kLongSplit = 1024;   // tokens; from here on more items pay more than fewer states
constexpr int kLeafSplits = 8;     // of a leaf, at least, as far as they are no shorter than that
constexpr int kMaxSplit = 4096;    // tokens; longer ones leave CTAs idle at the end
constexpr int kItemsPerCta = 4;    // leaves' items keep to one head until there are as many
constexpr int kMaxHeadsLog2 = 2;   // a leaf's item has up to 4 kv heads
constexpr int kWorkListThreads = 1024;
constexpr int kStagedWords = 11 * 1024;  // with what else there is, within 48 KB

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Rows of K, and of V, that a stage of the attention kernel holds: 32 KB for both. Of 128 rows,
// three stages are too few where memory is the limit, and gain nothing elsewhere
// (benchmarks/NOTES.md, 8).
__host__ __device__ constexpr int kv_tile_rows(int head_dim) { return head_dim <= 128 ? 64 : 32; }

// Tokens of one KV split. A function of the node and the head count alone, never of the batch, so
// that a row's bits do not depend on its companions; unless the scratch is full and splits double.
__host__ __device__ inline int split_length(int kv_len, int num_kv_heads, int split_shift,
                                            bool is_leaf) {
  // For a lone sequence 64 items; 128 if they stay long.
  const auto fair = [&](int num_items) {
    return (int64_t{kv_len} * num_kv_heads / num_items + 63) / 64 * 64;
  };
  const int64_t shortest = num_kv_heads >= 8 ? kMinSplit : kMinSplit / 2;
  int64_t length = fair(64) <= kLongSplit ? fair(64) : fair(128);
  if (fair(64) > kLongSplit && length < kLongSplit) length = kLongSplit;
  length = length < shortest ? shortest : length > kMaxSplit ? kMaxSplit : length;
  // One warp walks a leaf's split, 16 tokens at a time: many steps are long to wait for.
  const int64_t longest = kv_len / kLeafSplits > kMinSplit ? kv_len / kLeafSplits : kMinSplit;
  if (is_leaf && length > longest) length = (longest + 63) / 64 * 64;
  length <<= split_shift;
  return static_cast<int>(length < (1 << 30) ? length : (1 << 30));
}

__device__ inline int num_splits(int kv_len, int num_kv_heads, int split_shift, bool is_leaf) {
  return ceil_div(kv_len, split_length(kv_len, num_kv_heads, split_shift, is_leaf));
}

__host__ __device__ inline int tokens_per_tile(int group_size) { return kRowsPerTile / group_size; }

// How many kv heads a leaf's item has: as many as a tile has room for, since the copy engine brings
// the same 16 slots of several heads at once. Fewer where items would be too few for the chip. Each
// head is computed by itself, so this does not show in the bits.
__device__ inline int choose_heads_log2(int64_t leaf_heads, int num_kv_heads, int group_size,
                                        int kv_tile, int num_ctas) {
  int heads_log2 = 0;
  if (group_size > kMaxLeafRows) return heads_log2;
  while (heads_log2 < kMaxHeadsLog2 && (kLeafTokens << (heads_log2 + 1)) <= kv_tile &&
         num_kv_heads % (2 << heads_log2) == 0 &&
         leaf_heads >> (heads_log2 + 1) >= kItemsPerCta * num_ctas) {
    ++heads_log2;
  }
  return heads_log2;
}

// Exclusive prefix sums of `value(i)` for i < n into target[0 .. n], by the whole CTA.
template <typename Value>
__device__ void exclusive_sums(int32_t* target, int n, Value value) {
  __shared__ int32_t warp_sums[kWorkListThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t total = 0;
  for (int start = 0; start < n; start += kWorkListThreads) {
    const int i = start + static_cast<int>(threadIdx.x);
    const int32_t own = i < n ? value(i) : 0;
    int32_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int32_t before = total;
    for (int w = 0; w < kWorkListThreads / 32; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
    if (i < n) target[i] = before + sum - own;
    __syncthreads();
  }
  if (threadIdx.x == 0) target[n] = total;
  __syncthreads();
}

// Index of `seq` among readers[begin, end), ascending; -1 if it is not there.
__device__ inline int find_reader(const int32_t* readers, int begin, int end, int seq) {
  while (begin < end) {
    const int middle = (begin + end) / 2;
    const int32_t found = readers[middle];
    if (found == seq) return middle;
    if (found < seq) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return -1;
}

// Copies the arrays that are searched and walked into shared memory, if they fit.
__device__ inline TreeParams stage_tree(const TreeParams& tree, int32_t* memory, int num_words) {
  TreeParams staged = tree;
  const int num_leaves = tree.leaves ? tree.num_seqs : 0;
  const int num_offsets = tree.reader_indptr ? tree.num_nodes + 1 : 0;
  if (tree.num_seqs + 1 + tree.num_nodes + num_leaves + num_offsets + tree.num_reads > num_words) {
    return staged;
  }
  const auto stage = [&](const int32_t*& values, int length) {
    for (int i = threadIdx.x; i < length; i += kWorkListThreads) memory[i] = values[i];
    if (length > 0) values = memory;
    memory += length;
  };
  stage(staged.q_indptr, tree.num_seqs + 1);
  stage(staged.kv_len, tree.num_nodes);
  stage(staged.leaves, num_leaves);
  stage(staged.reader_indptr, num_offsets);
  stage(staged.readers, tree.num_reads);
  return staged;
}

static __global__ void __launch_bounds__(kWorkListThreads)
    work_list_kernel(const TreeParams given_tree, const WorkList work, int num_kv_heads,
                     int group_size, int max_states, int kv_tile, int num_ctas, int32_t* ticket) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  constexpr int kWarps = kWorkListThreads / 32;
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  if (thread == 0 && ticket) *ticket = 0;
  extern __shared__ int32_t staging[];
  const TreeParams tree = stage_tree(given_tree, staging, kStagedWords);
  __syncthreads();

  bool one_token = true;
  for (int b = thread; b < tree.num_seqs; b += kWorkListThreads) {
    one_token &= tree.q_indptr[b + 1] - tree.q_indptr[b] <= 1;
  }
  const bool is_decode = __syncthreads_and(one_token);
  // A node may have readers and yet grow in this very step: prompts of one token, packed.
  bool still = true;
  if (tree.leaves && tree.reader_indptr) {
    for (int b = thread; b < tree.num_seqs; b += kWorkListThreads) {
      const int leaf = tree.leaves[b];
      still &= tree.reader_indptr[leaf + 1] == tree.reader_indptr[leaf];
    }
  }
  const bool shared_are_still = __syncthreads_and(still);

  const auto num_readers = [&](int n) {
    return tree.reader_indptr ? tree.reader_indptr[n + 1] - tree.reader_indptr[n] : 0;
  };
  // shared_items serves as scratch for the ranks here.
  const auto is_shared = [&](int n) { return num_readers(n) > 0 && tree.kv_len[n] > 0 ? 1 : 0; };
  exclusive_sums(work.shared_items, tree.num_nodes, is_shared);
  const int num_shared_nodes = work.shared_items[tree.num_nodes];
  for (int n = thread; n < tree.num_nodes; n += kWorkListThreads) {
    if (is_shared(n)) work.shared_nodes[work.shared_items[n]] = n;
  }
  __syncthreads();

  const auto leaf_len = [&](int b) { return tree.leaves ? tree.kv_len[tree.leaves[b]] : 0; };
  // Calls visit(read, node, states before it on the path) for each shared node of b's path.
  const auto walk_path = [&](int b, int shift, auto visit) {
    int states = 0;
    for (int start = 0; start < num_shared_nodes; start += 32) {
      const int i = start + lane;
      int read = -1, node = 0;
      if (i < num_shared_nodes) {
        node = work.shared_nodes[i];
        read = find_reader(tree.readers, tree.reader_indptr[node], tree.reader_indptr[node + 1], b);
      }
      const int own = read < 0    ? 0
                      : is_decode ? num_splits(tree.kv_len[node], num_kv_heads, shift, false)
                                  : 1;
      int sum = own;
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += below;
      }
      if (read >= 0) visit(read, node, states + sum - own);
      states += __shfl_sync(~0u, sum, 31);
    }
    return states;
  };

  // Count each sequence's states; double the splits until the scratch can hold them all.
  int shift = 0;
  for (;; ++shift) {
    for (int b = warp; b < tree.num_seqs; b += kWarps) {
      const int states = walk_path(b, shift, [](int, int, int) {});
      if (lane == 0) work.leaf_items[b] = states;  // scratch: those of the prefix
    }
    __syncthreads();
    exclusive_sums(work.path_indptr, tree.num_seqs, [&](int b) {
      const int prefix = work.leaf_items[b];
      if (!is_decode) return prefix;
      // A sequence with nothing to see still needs an item, to write the empty state.
      const int leaf = num_splits(leaf_len(b), num_kv_heads, shift, true);
      return prefix + leaf > 0 ? prefix + leaf : 1;
    });
    if (!is_decode || work.path_indptr[tree.num_seqs] <= max_states || shift == 20) break;
    __syncthreads();
  }
  for (int b = warp; b < tree.num_seqs; b += kWarps) {
    const int base = work.path_indptr[b];
    const bool is_lone = work.path_indptr[b + 1] - base == 1;
    const int token = tree.q_indptr[b];
    const bool has_query = tree.q_indptr[b + 1] > token;
    walk_path(b, shift, [&](int read, int node, int before) {
      if (is_decode) {
        work.path[read] = !has_query ? kNowhere : is_lone ? ~token : base + before;
        work.read_tokens[read] = has_query ? token : 0;
      } else {
        work.path[base + before] = node;
      }
    });
  }
  __syncthreads();

  // Items. The scratch in leaf_items is read before it is overwritten: each thread its own entry.
  const int tile_tokens = tokens_per_tile(group_size);
  exclusive_sums(work.leaf_items, tree.num_seqs, [&](int b) {
    if (is_decode) {
      return work.path_indptr[b + 1] - work.path_indptr[b] - work.leaf_items[b];
    }
    return ceil_div(tree.q_indptr[b + 1] - tree.q_indptr[b], tile_tokens) * num_kv_heads;
  });
  exclusive_sums(work.shared_items, num_shared_nodes, [&](int i) {
    if (!is_decode) return 0;
    const int n = work.shared_nodes[i];
    return num_splits(tree.kv_len[n], num_kv_heads, shift, false) *
           ceil_div(num_readers(n), tile_tokens) * num_kv_heads;
  });

  if (thread == 0) {
    WorkHeader header = {};
    header.is_decode = is_decode;
    header.shared_are_still = shared_are_still;
    header.split_shift = shift;
    header.num_shared_items = work.shared_items[num_shared_nodes];
    header.num_leaf_items = work.leaf_items[tree.num_seqs];
    header.num_shared_nodes = num_shared_nodes;
    if (is_decode) {
      const int64_t leaf_heads = int64_t{header.num_leaf_items} * num_kv_heads;
      header.heads_log2 =
          choose_heads_log2(leaf_heads, num_kv_heads, group_size, kv_tile, num_ctas);
      header.num_leaf_items = static_cast<int>(leaf_heads >> header.heads_log2);
    }
    *work.header = header;
  }
}

// The largest i < n with sums[i] <= value.
__device__ inline int find_item(const int32_t* sums, int n, int value) {
  int low = 0;
  while (n > 1) {
    const int half = n / 2;
    if (sums[low + half] <= value) low += half;
    n -= half;
  }
  return low;
}

__device__ inline int align_slot(int slot) { return slot / kBoxTokens * kBoxTokens; }

// KV tiles that cover tokens [begin, end) of a node; a tile starts at a multiple of 16 slots.
__device__ inline int count_tiles(int first_slot, int begin, int end, int kv_tile) {
  if (begin >= end) return 0;
  return ceil_div(first_slot + end - align_slot(first_slot + begin), kv_tile);
}

// A thread an item: writes the launch's items in the order in which they are handed out.
static __global__ void items_kernel(const TreeParams tree, const WorkList work, int num_kv_heads,
                                    int group_size, int kv_tile) {
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const WorkHeader header = *work.header;
  if (!header.is_decode) return;
  const int num_items = header.num_shared_items + header.num_leaf_items;
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int ticket = thread; ticket < num_items;
       ticket += static_cast<int>(gridDim.x * blockDim.x)) {
    Item item = {};
    int node = -1;
    // Shared items are the longest and come first. Leaves between them would use the memory that
    // shared nodes of many rows leave idle, and were tried twice (benchmarks/NOTES.md, 5 and 8).
    if (ticket < header.num_shared_items) {
      const int i = find_item(work.shared_items, header.num_shared_nodes, ticket);
      int rest = ticket - work.shared_items[i];
      node = work.shared_nodes[i];
      const int reads_begin = tree.reader_indptr[node];
      const int num_readers = tree.reader_indptr[node + 1] - reads_begin;
      const int tile_tokens = tokens_per_tile(group_size);
      const int num_query_tiles = ceil_div(num_readers, tile_tokens);
      const int query_tile = rest % num_query_tiles;
      rest /= num_query_tiles;
      item.seq = -1;
      item.head = rest % num_kv_heads;
      item.split = rest / num_kv_heads;
      item.first_read = reads_begin + query_tile * tile_tokens;
      item.num_tokens = min(tile_tokens, num_readers - query_tile * tile_tokens);
    } else {
      const int num_groups = num_kv_heads >> header.heads_log2;
      const int index = ticket - header.num_shared_items, state = index / num_groups;
      item.seq = find_item(work.leaf_items, tree.num_seqs, state);
      const int splits = work.leaf_items[item.seq + 1] - work.leaf_items[item.seq];
      const int states_end = work.path_indptr[item.seq + 1];
      const int token = tree.q_indptr[item.seq];
      item.head = index % num_groups << header.heads_log2;
      item.split = state - work.leaf_items[item.seq];
      item.num_tokens = 1;
      item.token = tree.q_indptr[item.seq + 1] > token ? token : -1;
      const bool is_lone = states_end - work.path_indptr[item.seq] == 1;
      item.slot = is_lone ? ~token : states_end - splits + item.split;
      if (tree.leaves) node = tree.leaves[item.seq];
    }
    if (node >= 0) {
      const int kv_len = tree.kv_len[node], first_slot = tree.first_slot[node];
      const int length = split_length(kv_len, num_kv_heads, header.split_shift, item.seq >= 0);
      const int begin = item.split * length, end = min(kv_len, begin + length);
      const int tile_tokens = item.seq < 0 ? kv_tile : kv_tile >> header.heads_log2;
      item.num_tiles = count_tiles(first_slot, begin, end, tile_tokens);
      if (begin < end) {  // a node without tokens may have no pages to look at
        item.begin_slot = first_slot + begin;
        item.end_slot = first_slot + end;
        item.pages = tree.kv_indptr[node];
      }
    }
    work.items[ticket] = item;
  }
}

}  // namespace hf_cascade
