// CUDA implementations for the ops that ops/*.py declares.
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(hf_cascade, CUDA, m) {
  m.impl("merge_state", TORCH_BOX(&hf_cascade::merge_state));
  m.impl("merge_states", TORCH_BOX(&hf_cascade::merge_states));
  m.impl("append_kv", TORCH_BOX(&hf_cascade::append_kv));
  m.impl("work_list", TORCH_BOX(&hf_cascade::work_list));
  m.impl("prefix_attention", TORCH_BOX(&hf_cascade::prefix_attention));
  m.impl("suffix_attention", TORCH_BOX(&hf_cascade::suffix_attention));
  m.impl("cascade_attention", TORCH_BOX(&hf_cascade::cascade_attention));
}
