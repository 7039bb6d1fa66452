// Which cores the ranks of this launcher get, when other launchers of this user run on the same machine.
//
// A launcher that binds its ranks keeps a small file beside the records of jobs (job_directory.h) that names its cores,
// and holds a lock on it: the kernel drops the lock with the process, however it ends, so nothing stale counts. Choosing
// happens under a lock of the directory. Launchers of one job on one machine do not compete: the coordinator tells each
// which part of the machine's ranks is its own, and each computes the same division.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/placement/binding.h"

namespace maniple::launch {

struct HeldCores {
  std::string job;
  int generation = 0;
  int pid = 0;
  std::vector<int> cpus = {};
  friend bool operator==(const HeldCores&, const HeldCores&) = default;
};

/// The file's text and back; throws InvalidArgument. Pure.
std::string encode_held(const HeldCores& held);
HeldCores decode_held(const std::string& text);

class CoreClaim {
 public:
  CoreClaim() = default;
  ~CoreClaim() { release(); }
  CoreClaim(CoreClaim&& other) noexcept { *this = std::move(other); }
  CoreClaim& operator=(CoreClaim&& other) noexcept;

  /// `choose` is told what others hold and returns the cores to claim; none: nothing is claimed. Where there is no
  /// directory for the files it is told of none. Throws what `choose` throws and nothing else.
  static CoreClaim take(const std::string& job, int generation,
                        const std::function<std::vector<int>(const std::vector<HeldCores>& others)>& choose);
  void release() noexcept;
  bool held() const noexcept { return static_cast<bool>(file_); }

 private:
  UniqueFd directory_;
  UniqueFd file_;
  std::string name_;
};

/// The place of a launcher's ranks among those of its job on this machine.
struct CoreWish {
  std::string job;
  int generation = 0;
  int first = 0;           ///< of this launcher's ranks among them
  int count = 1;           ///< of this launcher's ranks
  int total = 1;           ///< ranks of the job on this machine
  int cores_per_rank = 0;  ///< 0: all that are free are shared out
};

struct CoreChoice {
  std::vector<std::vector<int>> cpus = {};  ///< for each rank; empty: they are not bound
  int threads = 1;                          ///< that a rank should use: its physical cores
  std::string why_not = {};                 ///< for people, when they are not bound
};

/// Pure: what to do when others hold these cores.
CoreChoice choose_cores(const CoreWish& wish, const std::vector<Cpu>& allowed, const std::vector<HeldCores>& others);

}  // namespace maniple::launch
