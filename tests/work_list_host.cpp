// The kernel of csrc/work_list.cuh on the CPU: what it decides can be tested without a GPU.
//
//   Shared memory  holds the tables, and garbage at first.
//   Fails          with a message where threads wait for ever, or write past what is theirs.
// host_sources.py compiles it, with an empty ptx.cuh.
#include "host_cuda.h"

namespace hf_cascade {

namespace ptx {
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
}  // namespace ptx

constexpr int kSharedWords = 56 * 1024;  // what the kernel may ask for is some less
// Not constant at first: else g++ calls an initializer, for the kernel's `extern`, that it left
// out.
thread_local int32_t memory[kSharedWords] = {host::current};

}  // namespace hf_cascade

#include "grid_rule.cuh"
#include "work_list.cuh"

// ---------------------------------------------------------------------- what tests call

using namespace hf_cascade;

namespace {

constexpr int32_t kGarbage = 0x5a5a5a5a;
constexpr int kGuard = 64;  // words behind what the kernel may write

// Garbage, and the guard behind it.
void spoil(int32_t* words, int64_t length) { std::fill_n(words, length + kGuard, kGarbage); }

bool is_intact(const int32_t* guard) {
  return std::all_of(guard, guard + kGuard, [](int32_t word) { return word == kGarbage; });
}

int64_t most_items(const WorkShape& shape) {
  return int64_t{shape.max_states} * shape.num_kv_heads;
}

int64_t list_size(const TreeParams& tree, const WorkShape& shape) {
  return work_list_size(tree.num_seqs, tree.num_reads, most_items(shape));
}

}  // namespace

extern "C" {

// CTAs of the attention kernel on a GPU of so many multiprocessors.
int attention_ctas(int num_multiprocessors, int64_t num_rows, bool has_early_launch) {
  return num_attention_ctas(num_multiprocessors, num_rows, has_early_launch);
}

// Words that make_list wants.
int64_t list_room(const TreeParams* tree, const WorkShape* shape) {
  return list_size(*tree, *shape) + kGuard;
}

int64_t num_guard_words() { return kGuard; }

int64_t first_item(const TreeParams* tree) { return items_offset(tree->num_seqs, tree->num_reads); }

// Writes the list to `words` by a launch of num_ctas whose tables are in shared memory or, not
// in_shared, in global memory. The seed draws how many threads a CTA has and who goes first.
// Returns null or what went wrong.
const char* make_list(const TreeParams* tree, const WorkShape* shape, bool in_shared, int num_ctas,
                      unsigned seed, int32_t* words) {
  static_assert(host::kMostThreads >= kMostListThreads, "a CTA may be as large as the kernel's");
  const int64_t table_words = list_words(*tree), size = list_size(*tree, *shape);
  if (in_shared && table_words + kGuard > kSharedWords) return "the tree does not fit";
  std::vector<int32_t> scratch(table_words + kGuard), ticket(2 + kGuard);
  spoil(words, size);
  spoil(ticket.data(), 2);
  const WorkList list = view_work_list(words, *tree, most_items(*shape));
  host::kernel = [&] {
    const auto run = in_shared ? work_list_kernel<true> : work_list_kernel<false>;
    run(*tree, find_inputs(*tree), list, *shape, in_shared ? nullptr : scratch.data(),
        ticket.data());
  };
  std::mt19937 random(seed);
  host::num_ctas.x = static_cast<unsigned>(num_ctas);
  static_assert(kFewestListThreads << 2 == kMostListThreads);
  host::num_threads.x = kFewestListThreads << random() % 3;
  for (host::cta.x = 0; host::cta.x < host::num_ctas.x; ++host::cta.x) {
    int32_t* tables = in_shared ? memory : scratch.data();
    spoil(tables, table_words);
    if (!host::run_cta(random)) return "threads wait for ever";
    if (!is_intact(tables + table_words)) return "a write behind the tables";
  }
  if (!is_intact(words + size)) return "a write behind the list";
  if (ticket[0] != 0 || ticket[1] != 0 || !is_intact(&ticket[2])) return "wrong ticket counters";
  return nullptr;
}

}  // extern "C"
