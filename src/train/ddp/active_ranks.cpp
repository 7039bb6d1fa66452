#include "train/ddp/active_ranks.h"

#include "comm/base/check.h"
#include "train/ddp/parameter.h"
#include "train/tensor/public_call.h"
#include <maniple/train/uneven_inputs.h>

namespace maniple {

ActiveRanks::ActiveRanks(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)), count_(group_->size()) {}

void ActiveRanks::start(const Mode& mode) {
  MANIPLE_REQUIRE(!mode_, "with_uneven_inputs: this DistributedDataParallel is inside another with_uneven_inputs");
  mode_ = mode;
  were_uneven_ = false;
  last_first_ = 0;
}

void ActiveRanks::stop() noexcept {
  mode_.reset();
  count_ = group_->size();
  first_ = 0;
}

bool ActiveRanks::exchange(bool active) {
  std::vector<std::uint8_t> marks(group_->size(), 0);
  marks[group_->rank()] = active ? 1 : 0;
  group_->all_reduce(buffer_of(marks), ReduceOp::max, {}, public_place());
  count_ = 0;
  std::vector<int> inactive;
  for (int r = 0; r < group_->size(); ++r) {
    if (marks[r] == 0) {
      inactive.push_back(r);
    } else if (count_++ == 0) {
      first_ = r;
    }
  }
  if (count_ == 0) return false;
  last_first_ = first_;
  were_uneven_ = were_uneven_ || !inactive.empty();
  if (!inactive.empty() && mode_->throw_on_early_termination) {
    throw UnevenInputs(format_text("{}{} {} {} no more batches, {} still {}; throw_on_early_termination is set",
                                   ddp_prefix(*group_), inactive.size() == 1 ? "rank" : "ranks", joined(inactive),
                                   inactive.size() == 1 ? "has" : "have", count_, count_ == 1 ? "trains" : "train"));
  }
  return true;
}

double ActiveRanks::gradient_factor() const noexcept {
  if (!mode_ || mode_->divide_by_initial_world_size || all()) return 1.0;
  return static_cast<double>(group_->size()) / count_;
}

}  // namespace maniple
