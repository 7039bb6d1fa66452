// Which cores each local rank may use: contiguous blocks, physical cores and NUMA nodes kept together.
#pragma once

#include <string>
#include <vector>

namespace maniple::launch {

/// A hardware thread that the launcher may use.
struct Cpu {
  int id = 0;
  int package = 0;
  int numa = 0;
  int core = 0;  ///< the same for the hardware threads of one physical core of a package
  friend bool operator==(const Cpu&, const Cpu&) = default;
};

/// The hardware threads of each rank, or nothing at all when there are too few: then any binding would force ranks to
/// share while others idle. Pure.
///
/// Cores are put in order (package, NUMA node, number) and cut into blocks as equal as can be, a core with all of its
/// hardware threads. When the ranks divide evenly among NUMA nodes, no block crosses one. Only when there are more
/// ranks than physical cores, hardware threads are shared out instead.
///
/// With `cores_per_rank` each gets that many physical cores, from as few NUMA nodes as they fit in; the rest stays
/// free.
std::vector<std::vector<int>> bind_ranks(std::vector<Cpu> cpus, int ranks, int cores_per_rank = 0);

/// The ranks that one launcher starts, among those of its job on this machine. Launchers of one job on one machine
/// compute the same division and take their part of it.
struct CoreRequest {
  int first = 0;           ///< of this launcher's ranks among them
  int count = 1;           ///< of this launcher's ranks
  int total = 1;           ///< ranks of the job on this machine
  int cores_per_rank = 0;  ///< 0: all cores are shared out
};

struct CoreBinding {
  std::vector<std::vector<int>> cpus = {};  ///< for each rank of this launcher; empty: they are not bound
  int threads = 1;                          ///< that a rank should use: its physical cores
  std::string why_not = {};                 ///< for people, when they are not bound
};
/// Pure.
CoreBinding bind_part(const CoreRequest& request, const std::vector<Cpu>& allowed);

enum class BindPolicy {
  automatic,  ///< as `cores`, unless another job of this user runs on this machine
  cores,
  none,
};

/// What sched_getaffinity allows, with what /sys says about it.
std::vector<Cpu> allowed_cpus();
/// The same of these hardware threads, from a folder like /sys/devices/system/cpu.
std::vector<Cpu> describe_ids(const std::vector<int>& ids, const std::string& folder);

/// The machine, and what of it the launcher may use: launchers for which it is the same share their cores.
std::string core_set_id();

/// How many hardware threads sched_getaffinity allows.
int allowed_cpu_count();

/// "0-3,8" for tables.
std::string describe_cpus(const std::vector<int>& cpus);

}  // namespace maniple::launch
