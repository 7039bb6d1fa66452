// Assigns cores to local ranks in contiguous blocks, keeping physical cores and NUMA nodes together.
#pragma once

#include <string>
#include <vector>

namespace maniple::launch {

/// A hardware thread that the launcher may use.
struct Cpu {
  int id = 0;
  int package = 0;
  int numa = 0;
  int core = 0;  ///< physical core within the package; its hardware threads share this number
  friend bool operator==(const Cpu&, const Cpu&) = default;
};

/// The hardware threads of each rank. Empty when there are too few: any binding would then force some ranks to share
/// while other cores idle. Pure.
///
/// Cores are sorted by package, NUMA node and number, then cut into blocks of nearly equal size; a core keeps all its
/// hardware threads. When the ranks divide evenly among NUMA nodes, no block crosses a node boundary. If there are more
/// ranks than physical cores, hardware threads are divided instead of cores.
///
/// With `cores_per_rank` each rank gets that many physical cores, from as few NUMA nodes as possible; the remaining
/// cores stay free.
std::vector<std::vector<int>> bind_ranks(std::vector<Cpu> cpus, int ranks, int cores_per_rank = 0);

/// The position of one launcher's ranks among the job's ranks on this machine. All launchers of a job on one machine
/// compute the same division and take their own part of it.
struct CoreRequest {
  int first = 0;           ///< index of this launcher's first rank among them
  int count = 1;           ///< number of this launcher's ranks
  int total = 1;           ///< number of the job's ranks on this machine
  int cores_per_rank = 0;  ///< 0: all cores are divided among the ranks
};

struct CoreBinding {
  std::vector<std::vector<int>> cpus = {};  ///< for each rank of this launcher; empty: the ranks are not bound
  int threads = 1;                          ///< threads that a rank should use: its number of physical cores
  std::string why_not = {};                 ///< reason for people, if the ranks are not bound
};
/// Pure.
CoreBinding bind_part(const CoreRequest& request, const std::vector<Cpu>& allowed);

enum class BindPolicy {
  automatic,  ///< like `cores`, unless another job of this user runs on this machine
  cores,
  none,
};

/// The hardware threads that sched_getaffinity allows, with their topology from /sys.
std::vector<Cpu> allowed_cpus();
/// The topology of the hardware threads `ids`, from a folder like /sys/devices/system/cpu.
std::vector<Cpu> describe_ids(const std::vector<int>& ids, const std::string& folder);

/// Identifies the machine and the cores the launcher may use. Launchers with equal ids share cores.
std::string core_set_id();

/// The number of hardware threads that sched_getaffinity allows.
int allowed_cpu_count();

/// "0-3,8" for tables.
std::string describe_cpus(const std::vector<int>& cpus);

}  // namespace maniple::launch
