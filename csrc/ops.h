// The ops, as functions of tensors; ops/*.py has their schemas and says what each promises.
#pragma once

#include "checks.h"

namespace hf_cascade {

using State = std::tuple<Tensor, Tensor>;  // (out, lse)

State merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b);
State merge_states(Tensor out, Tensor lse);

void append_kv(Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, Tensor slots);
// Whether the kernel serves these arguments.
bool can_append(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                const Tensor& slots);
// Appends and, where there is one, sets `ticket`, two int32, to 0 for the launch that follows.
void launch_append(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                   const Tensor& slots, const Tensor* ticket);
// The same for an append that applies RoPE to k, and to q: into `rotated`, contiguous, shaped as q.
bool can_rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin);
void launch_rotating_append(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pool,
                            const Tensor& v_pool, const Tensor& slots, const Tensor& cos,
                            const Tensor& sin, const Tensor& rotated, const Tensor* ticket);

Tensor work_list(Tensor q_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_len,
                 Tensor first_slot, Tensor leaves, Tensor reader_indptr, Tensor readers,
                 int64_t page_size, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
                 bool batch_invariant);
State prefix_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor q_indptr, Tensor kv_indptr,
                       Tensor kv_indices, Tensor kv_len, Tensor first_slot, Tensor reader_indptr,
                       Tensor readers, double sm_scale);
State suffix_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor q_indptr, Tensor kv_indptr,
                       Tensor kv_indices, Tensor kv_len, Tensor first_slot, Tensor leaves,
                       double sm_scale);
State cascade_attention(Tensor q, Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, Tensor slots,
                        Tensor q_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_len,
                        Tensor first_slot, Tensor leaves, Tensor reader_indptr, Tensor readers,
                        double sm_scale, std::optional<Tensor> work, std::optional<Tensor> cos,
                        std::optional<Tensor> sin);

}  // namespace hf_cascade
