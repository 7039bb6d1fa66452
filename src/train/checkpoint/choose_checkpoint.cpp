#include "train/checkpoint/choose_checkpoint.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "comm/base/log.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"

namespace maniple {

std::int64_t choose_checkpoint(const std::string& folder, const LoadOptions& load) {
  restore_replaced(folder);
  if (load.step) {
    verify_checkpoint(folder, *load.step);
    return *load.step;
  }
  std::vector<std::string> errors;
  for (const std::int64_t step : list_checkpoints(folder)) {
    try {
      verify_checkpoint(folder, step);
      return step;
    } catch (const Error& failure) {
      log_warning("{}; trying the one before it", failure.what());
      errors.emplace_back(failure.what());
    }
  }
  if (!errors.empty()) {
    throw ProtocolError(format_text("no checkpoint in {} can be used: {}", folder, joined(errors, "; ")));
  }
  return -1;
}

std::int64_t choose_checkpoint_together(const std::string& folder, const LoadOptions& load, ProcessGroup& ranks) {
  std::string offered, failed;
  if (ranks.rank() == 0) {
    try {
      restore_replaced(folder);
      offered = load.step ? std::to_string(*load.step) : joined(list_checkpoints(folder), " ");
    } catch (const Error& failure) {
      failed = failure.what();
    }
  }
  failed = ranks.broadcast_object(failed, 0, {}, public_place());
  if (!failed.empty()) throw_failed_on<ProtocolError>(ranks, 0, failed);
  std::istringstream steps(ranks.broadcast_object(offered, 0, {}, public_place()));
  std::vector<std::string> errors;
  int first_failed = -1;
  for (std::int64_t step = 0; steps >> step;) {
    std::string mine;
    try {
      const std::string path = folder + "/" + checkpoint_name(step) + "/";
      int next = 0;
      for (const auto& [name, digest] : read_manifest(folder, step).files) {
        if (next++ % ranks.size() == ranks.rank()) verify_file(path + name, digest);
      }
    } catch (const Error& failure) {
      mine = failure.what();
    }
    const std::vector<std::string> all = ranks.all_gather_objects(mine, {}, public_place());
    const auto first_error =
        std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
    if (first_error == all.end()) return step;
    const auto rank = static_cast<int>(first_error - all.begin());
    if (first_failed < 0) first_failed = rank;
    errors.push_back(format_text("rank {}: {}", rank, *first_error));
    if (!load.step && ranks.rank() == 0) log_warning("{}; trying the one before it", errors.back());
  }
  if (errors.empty()) return -1;
  throw_failed_on<ProtocolError>(
      ranks, first_failed,
      load.step ? errors.front() : format_text("no checkpoint in {} can be used: {}", folder, joined(errors, "; ")));
}

}  // namespace maniple
