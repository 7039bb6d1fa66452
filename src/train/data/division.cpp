#include <maniple/train/data.h>

#include "base/check.h"

namespace maniple {

std::size_t per_process_batch_size(std::size_t global_batch, int world_size) {
  MANIPLE_REQUIRE(world_size > 0, "per_process_batch_size: world_size is {}; expected 1 or more", world_size);
  const auto ranks = static_cast<std::size_t>(world_size);
  MANIPLE_REQUIRE(global_batch > 0, "per_process_batch_size: a batch of 0");
  const std::size_t above = (global_batch / ranks + 1) * ranks;
  MANIPLE_REQUIRE(global_batch >= ranks,
                  "per_process_batch_size: a batch of {} leaves some of {} processes without a sample; take {} or more",
                  global_batch, ranks, ranks);
  MANIPLE_REQUIRE(global_batch % ranks == 0,
                  "per_process_batch_size: a batch of {} is no multiple of {} processes; take {} or {}", global_batch,
                  ranks, above - ranks, above);
  return global_batch / ranks;
}

std::size_t per_process_workers(std::size_t total_workers, int world_size) {
  MANIPLE_REQUIRE(world_size > 0, "per_process_workers: world_size is {}; expected 1 or more", world_size);
  const auto ranks = static_cast<std::size_t>(world_size);
  return total_workers / ranks + (total_workers % ranks != 0 ? 1 : 0);
}

}  // namespace maniple
