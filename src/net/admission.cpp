#include "net/admission.h"

#include <fmt/format.h>

namespace maniple {

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address) {
  if (there.job != here.job) {
    return {"another job", fmt::format("this is job \"{}\", not \"{}\"", here.job, there.job)};
  }
  if (there.generation < here.generation) {
    return {"stale generation",
            fmt::format("generation {} is superseded by generation {}", there.generation, here.generation)};
  }
  if (there.generation > here.generation) {
    return {"newer generation", fmt::format("generation {} is over, as generation {} is there: {} is a leftover of it",
                                            here.generation, there.generation, here_address.to_string())};
  }
  if (here.world_size >= 0 && there.world_size >= 0 && here.world_size != there.world_size) {
    return {"world size",
            fmt::format("world size is {} at {} but {} at {} (rank {})", here.world_size, here_address.to_string(),
                        there.world_size, there_address.to_string(), there.rank)};
  }
  const std::int32_t world_size = here.world_size >= 0 ? here.world_size : there.world_size;
  if (there.rank < -1 || (world_size >= 0 && there.rank >= world_size)) {
    return {"rank", fmt::format("rank {} of {} does not exist: expected 0 to {}", there.rank, there_address.to_string(),
                                world_size - 1)};
  }
  if (there.to >= 0 && here.rank >= 0 && there.to != here.rank) {
    return {"another rank", fmt::format("this is rank {}, not rank {}: something between the two processes leads to the wrong one",
                                        here.rank, there.to)};
  }
  return {};
}

}  // namespace maniple
