#include "grid_rule.cuh"
#include "launch_attention.h"
#include "ops.h"
#include "work_list.cuh"

namespace hf_cascade {
namespace {

constexpr int kMaxGroupSize = kRowsPerTile;           // a query token's heads must fit one tile
constexpr int64_t kScratchStates = 8192;              // see num_scratch_states
constexpr int64_t kMaxPoolChunks = int64_t{1} << 32;  // 64 GB; offsets are 32-bit, in 16 bytes

// ---------------------------------------------------------------------- what the kernels serve

// head_dim as below, fp16 or bf16, page_size 16 to 128 in powers of two, group_size to 128, a
// positive scale. Everything else is ops/composed.py's.
void launch_for_head_dim(const AttentionParams& params, int64_t head_dim, ElementType dtype,
                         cudaStream_t stream) {
  switch (head_dim) {
    case 64:
      return launch_attention<64>(params, dtype, stream);
    case 80:
      return launch_attention<80>(params, dtype, stream);
    case 96:
      return launch_attention<96>(params, dtype, stream);
    case 128:
      return launch_attention<128>(params, dtype, stream);
    case 256:
      return launch_attention<256>(params, dtype, stream);
  }
}

bool serves_head_dim(int64_t head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

bool serves_page_size(int64_t page_size) {
  return page_size == 16 || page_size == 32 || page_size == 64 || page_size == 128;
}

// The index arguments that all attention ops share.
struct Nodes {
  const Tensor &q_indptr, &kv_indptr, &kv_indices, &kv_len, &first_slot;
  const Tensor* leaves;         // null: no suffix
  const Tensor* reader_indptr;  // null: no prefix
  const Tensor* readers;

  int64_t num_seqs() const { return q_indptr.size(0) - 1; }
  int64_t num_nodes() const { return kv_len.size(0); }
  int64_t num_reads() const { return readers ? readers->size(0) : 0; }
};

bool are_served(const Nodes& nodes, const Tensor& q) {
  const auto index = [&](const Tensor& t) { return is_index(t, q); };
  if (!index(nodes.q_indptr) || !index(nodes.kv_indptr) || !index(nodes.kv_indices) ||
      !index(nodes.kv_len) || !index(nodes.first_slot) || nodes.q_indptr.size(0) < 1) {
    return false;
  }
  const int64_t num_nodes = nodes.num_nodes();
  if (nodes.kv_indptr.size(0) != num_nodes + 1 || nodes.first_slot.size(0) != num_nodes) {
    return false;
  }
  if (nodes.leaves && (!index(*nodes.leaves) || nodes.leaves->size(0) != nodes.num_seqs())) {
    return false;
  }
  return !nodes.readers || (index(*nodes.readers) && index(*nodes.reader_indptr) &&
                            nodes.reader_indptr->size(0) == num_nodes + 1);
}

bool is_served(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Nodes& nodes,
               double sm_scale) {
  if (!is_half(q) || !has_whole_rows(q) || !is_pool(k_pool, v_pool)) return false;
  const int64_t num_kv_heads = k_pool.size(1), head_dim = k_pool.size(3);
  return k_pool.numel() > 0 && q.scalar_type() == k_pool.scalar_type() &&
         is_on_device_of(q, k_pool) && q.size(2) == head_dim && serves_head_dim(head_dim) &&
         serves_page_size(k_pool.size(2)) && num_kv_heads > 0 && q.size(1) > 0 &&
         q.size(1) % num_kv_heads == 0 && q.size(1) / num_kv_heads <= kMaxGroupSize &&
         sm_scale > 0 &&
         k_pool.numel() * static_cast<int64_t>(k_pool.element_size()) / kAccessBytes <
             kMaxPoolChunks &&
         are_served(nodes, q);
}

// ---------------------------------------------------------------------- the work list

// Places for partial states. At most one a node read and one more for every shortest split, of
// the tokens that the page table can hold; capped, since splits then are longer.
int64_t num_scratch_states(int64_t num_seqs, int64_t num_reads, int64_t num_listed_pages,
                           int64_t page_size) {
  const int64_t least = num_reads + num_seqs;
  const int64_t most = least + num_seqs * (num_listed_pages * page_size / kSplitUnit);
  const int64_t cap = least > kScratchStates ? least : kScratchStates;
  return most < cap ? most : cap;
}

const int32_t* index_data(const Tensor* t) {
  return t ? static_cast<const int32_t*>(t->data_ptr()) : nullptr;
}

TreeParams tree_params(const Nodes& nodes, int64_t num_tokens) {
  TreeParams tree = {};
  tree.q_indptr = index_data(&nodes.q_indptr);
  tree.kv_indptr = index_data(&nodes.kv_indptr);
  tree.kv_indices = index_data(&nodes.kv_indices);
  tree.kv_len = index_data(&nodes.kv_len);
  tree.first_slot = index_data(&nodes.first_slot);
  tree.leaves = index_data(nodes.leaves);
  tree.reader_indptr = index_data(nodes.reader_indptr);
  tree.readers = index_data(nodes.readers);
  tree.num_tokens = static_cast<int>(num_tokens);
  tree.num_seqs = static_cast<int>(nodes.num_seqs());
  tree.num_nodes = static_cast<int>(nodes.num_nodes());
  tree.num_reads = static_cast<int>(nodes.num_reads());
  return tree;
}

int log2_of(int64_t power_of_two) {
  int log2 = 0;
  while ((int64_t{1} << log2) < power_of_two) ++log2;
  return log2;
}

// Of the attention kernel's CTAs.
int stages_of(int64_t head_dim) {
  return num_stages(static_cast<int>(head_dim),
                    device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

template <bool kFits>
void launch_work_list(int num_ctas, int shared_bytes, const Tensor& like, const TreeParams& tree,
                      const WorkList& list, const WorkShape& shape, int32_t* scratch,
                      int32_t* ticket) {
  check_launch(cudaFuncSetAttribute(work_list_kernel<kFits>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "work_list: shared memory");
  launch("work_list", work_list_kernel<kFits>, num_ctas, num_list_threads(tree), shared_bytes,
         current_stream(like), tree, find_inputs(tree), list, shape, scratch, ticket);
}

// num_states as num_scratch_states has it; `ticket`: see new_ticket, null if no launch follows.
Tensor make_work_list(const TreeParams& tree, const Tensor& like, int64_t num_q_heads,
                      int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_states,
                      bool batch_invariant, const Tensor* ticket) {
  const int64_t most_items = num_states * num_kv_heads;
  const int64_t size = work_list_size(tree.num_seqs, tree.num_reads, most_items);
  Tensor work = torch::stable::new_empty(like, {size}, ScalarType::Int);
  if (num_q_heads / num_kv_heads > kMaxGroupSize) return work;  // nobody will read it
  const WorkList list = view_work_list(static_cast<int32_t*>(work.data_ptr()), tree, most_items);
  WorkShape shape = {};
  shape.num_kv_heads = static_cast<int>(num_kv_heads);
  shape.group_size = static_cast<int>(num_q_heads / num_kv_heads);
  shape.tile_tokens = tokens_per_tile(shape.group_size);
  shape.head_dim = static_cast<int>(head_dim);
  shape.page_size_log2 = log2_of(page_size);
  shape.num_ctas = num_attention_ctas(device_attribute(cudaDevAttrMultiProcessorCount),
                                      tree.num_seqs * num_q_heads, has_early_launch());
  shape.num_stages = stages_of(head_dim);
  shape.max_states = static_cast<int>(num_states);
  shape.batch_invariant = batch_invariant;
  int32_t* counters = ticket ? static_cast<int32_t*>(ticket->data_ptr()) : nullptr;

  const int64_t num_words = list_words(tree);
  const int64_t room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  const int64_t bytes = num_words * int64_t{sizeof(int32_t)};
  if (bytes <= room) {
    launch_work_list<true>(num_list_ctas(most_items, num_list_threads(tree)),
                           static_cast<int>(bytes), like, tree, list, shape, nullptr, counters);
  } else {
    const Tensor scratch = torch::stable::new_empty(like, {num_words}, ScalarType::Int);
    launch_work_list<false>(1, 0, like, tree, list, shape,
                            static_cast<int32_t*>(scratch.data_ptr()), counters);
  }
  return work;
}

// ---------------------------------------------------------------------- the launch

// Work items that were handed out: shared ones, leaves'.
Tensor new_ticket(const Tensor& like) {
  return torch::stable::new_empty(like, {2}, ScalarType::Int);
}

int64_t num_scratch_states(const Nodes& nodes, const Tensor& k_pool) {
  return num_scratch_states(nodes.num_seqs(), nodes.num_reads(), nodes.kv_indices.size(0),
                            k_pool.size(2));
}

void check_work_list(const Tensor& work, const Nodes& nodes, const Tensor& k_pool) {
  const int64_t most_items = num_scratch_states(nodes, k_pool) * k_pool.size(1);
  const int64_t expected = work_list_size(nodes.num_seqs(), nodes.num_reads(), most_items);
  STD_TORCH_CHECK(work.numel() == expected,
                  "work must be what work_list makes of these arguments, ", expected,
                  " values, got ", work.numel());
}

// `ticket` is zero by the time this kernel runs. Without a work list it makes its own, which sees
// to that; with one, an append comes before it, beside which it may start if that writes each
// leaf's last token and nothing else.
State attend(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Nodes& nodes,
             double sm_scale, const std::optional<Tensor>& given_work, bool may_start_early,
             const Tensor& ticket) {
  const int64_t num_tokens = q.size(0), num_q_heads = q.size(1), head_dim = q.size(2);
  const int64_t num_kv_heads = k_pool.size(1), page_size = k_pool.size(2);
  const TreeParams tree = tree_params(nodes, num_tokens);
  const int64_t num_states = num_scratch_states(nodes, k_pool);
  const Tensor work = given_work ? *given_work
                                 : make_work_list(tree, q, num_q_heads, num_kv_heads, head_dim,
                                                  page_size, num_states, false, &ticket);
  const int64_t most_items = num_states * num_kv_heads;
  Tensor out = torch::stable::new_empty(q, {num_tokens, num_q_heads, head_dim});
  Tensor lse = torch::stable::new_empty(q, {num_tokens, num_q_heads}, ScalarType::Float);
  if (num_tokens == 0) return {out, lse};
  const Tensor state_out =
      torch::stable::new_empty(q, {num_states, num_q_heads, head_dim}, ScalarType::Half);
  const Tensor state_lse =
      torch::stable::new_empty(q, {num_states, num_q_heads, 2}, ScalarType::Float);

  AttentionParams params = {};
  params.tree = tree;
  params.work = view_work_list(static_cast<int32_t*>(work.data_ptr()), tree, most_items);
  params.q = q.data_ptr();
  params.k_pool = k_pool.data_ptr();
  params.v_pool = v_pool.data_ptr();
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.state_out = static_cast<__half*>(state_out.data_ptr());
  params.state_lse = static_cast<LseAndScale*>(state_lse.data_ptr());
  params.ticket = static_cast<int32_t*>(ticket.data_ptr());
  params.may_start_early = may_start_early;
  params.q_token_stride = stride_in_chunks(q, 0);
  params.q_head_stride = stride_in_chunks(q, 1);
  params.num_pages = static_cast<uint64_t>(k_pool.size(0));
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.group_size = static_cast<int>(num_q_heads / num_kv_heads);
  params.query_rows = tokens_per_tile(params.group_size) * params.group_size;
  params.page_size_log2 = log2_of(page_size);
  params.scale_log2 = static_cast<float>(sm_scale * 1.4426950408889634);
  const ElementType dtype =
      q.scalar_type() == ScalarType::Half ? ElementType::kHalf : ElementType::kBFloat16;
  launch_for_head_dim(params, head_dim, dtype, current_stream(q));
  return {out, lse};
}

}  // namespace

Tensor work_list(Tensor q_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_len,
                 Tensor first_slot, Tensor leaves, Tensor reader_indptr, Tensor readers,
                 int64_t page_size, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
                 bool batch_invariant) {
  const Nodes nodes{q_indptr,   kv_indptr, kv_indices,     kv_len,
                    first_slot, &leaves,   &reader_indptr, &readers};
  STD_TORCH_CHECK(are_served(nodes, q_indptr),
                  "work_list: index arguments must be int32, contiguous, on one GPU and of lengths "
                  "that fit together");
  STD_TORCH_CHECK(serves_page_size(page_size) && serves_head_dim(head_dim) && num_kv_heads > 0 &&
                      num_q_heads > 0 && num_q_heads % num_kv_heads == 0,
                  "work_list: no kernel has page_size ", page_size, ", head_dim ", head_dim, ", ",
                  num_q_heads, " query heads over ", num_kv_heads);
  const torch::stable::accelerator::DeviceGuard guard(q_indptr.get_device_index());
  const TreeParams tree = tree_params(nodes, 0);
  const int64_t num_states =
      num_scratch_states(tree.num_seqs, tree.num_reads, kv_indices.size(0), page_size);
  return make_work_list(tree, q_indptr, num_q_heads, num_kv_heads, head_dim, page_size, num_states,
                        batch_invariant, nullptr);
}

State prefix_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor q_indptr, Tensor kv_indptr,
                       Tensor kv_indices, Tensor kv_len, Tensor first_slot, Tensor reader_indptr,
                       Tensor readers, double sm_scale) {
  const Nodes nodes{q_indptr,   kv_indptr, kv_indices,     kv_len,
                    first_slot, nullptr,   &reader_indptr, &readers};
  if (!is_served(q, k_pool, v_pool, nodes, sm_scale)) {
    return composed_state("hf_cascade::composed_prefix_attention", q, k_pool, v_pool, q_indptr,
                          kv_indptr, kv_indices, kv_len, first_slot, reader_indptr, readers,
                          sm_scale);
  }
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  return attend(q, k_pool, v_pool, nodes, sm_scale, std::nullopt, false, new_ticket(q));
}

State suffix_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor q_indptr, Tensor kv_indptr,
                       Tensor kv_indices, Tensor kv_len, Tensor first_slot, Tensor leaves,
                       double sm_scale) {
  const Nodes nodes{q_indptr, kv_indptr, kv_indices, kv_len, first_slot, &leaves, nullptr, nullptr};
  if (!is_served(q, k_pool, v_pool, nodes, sm_scale)) {
    return composed_state("hf_cascade::composed_suffix_attention", q, k_pool, v_pool, q_indptr,
                          kv_indptr, kv_indices, kv_len, first_slot, leaves, sm_scale);
  }
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  return attend(q, k_pool, v_pool, nodes, sm_scale, std::nullopt, false, new_ticket(q));
}

State cascade_attention(Tensor q, Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, Tensor slots,
                        Tensor q_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_len,
                        Tensor first_slot, Tensor leaves, Tensor reader_indptr, Tensor readers,
                        double sm_scale, std::optional<Tensor> work, std::optional<Tensor> cos,
                        std::optional<Tensor> sin) {
  const Nodes nodes{q_indptr,   kv_indptr, kv_indices,     kv_len,
                    first_slot, &leaves,   &reader_indptr, &readers};
  const bool rotates = cos || sin;
  if (!is_served(q, k_pool, v_pool, nodes, sm_scale) || !can_append(k, v, k_pool, v_pool, slots) ||
      (work && !is_index(*work, q)) || (rotates && !(cos && sin && can_rotate(q, k, *cos, *sin)))) {
    return composed_state("hf_cascade::composed_cascade_attention", q, k, v, k_pool, v_pool, slots,
                          q_indptr, kv_indptr, kv_indices, kv_len, first_slot, leaves,
                          reader_indptr, readers, sm_scale, work, cos, sin);
  }
  if (work) check_work_list(*work, nodes, k_pool);  // before the pools change
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const Tensor ticket = new_ticket(q);
  const Tensor* counters = q.size(0) > 0 ? &ticket : nullptr;
  const bool is_step = k.size(0) == q.size(0);  // not several new tokens for one query
  if (!rotates) {
    launch_append(k, v, k_pool, v_pool, slots, counters);
    return attend(q, k_pool, v_pool, nodes, sm_scale, work, work && is_step, ticket);
  }
  const Tensor rotated = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  launch_rotating_append(q, k, v, k_pool, v_pool, slots, *cos, *sin, rotated, counters);
  return attend(rotated, k_pool, v_pool, nodes, sm_scale, work, work && is_step, ticket);
}

}  // namespace hf_cascade
