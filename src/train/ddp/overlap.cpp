#include "train/ddp/overlap.h"

#include <ATen/Parallel.h>

#include "base/codec.h"
#include "topology/core_set.h"

namespace maniple {

Overlap choose_overlap(const OverlapFacts& facts) noexcept {
  constexpr std::size_t kWorthWaking = 2 * 1024 * 1024;
  if (facts.hosts > 1) return Overlap::thread;
  const bool spare_cores = facts.cores > 2 * facts.threads;
  return spare_cores && facts.gradient_bytes >= kWorthWaking ? Overlap::thread : Overlap::none;
}

Overlap resolve_overlap(Overlap requested, ProcessGroup& group, std::size_t gradient_bytes) {
  if (requested != Overlap::automatic) return requested;
  OverlapFacts facts{.hosts = group.topology().node_count(), .gradient_bytes = gradient_bytes};
  if (facts.hosts == 1 && group.size() > 1) {
    // A launcher binds ranks to cores of their own: only together do they know how many there are.
    ByteWriter mine;
    mine.put(static_cast<std::int32_t>(at::get_num_threads()));
    mine.put_string(CoreSet::of_this_process().encode());
    CoreSet cores;
    facts.threads = 0;
    for (const std::string& answer : group.all_gather_objects(mine.take())) {
      ByteReader reader(answer);
      facts.threads += reader.get<std::int32_t>();
      cores.add(CoreSet::decode(reader.get_string(CoreSet::kMostCores / 8)));
    }
    facts.cores = cores.count();
  }
  return choose_overlap(facts);
}

}  // namespace maniple
