// Shares memory between the ranks of one host: one rank creates a segment and offers it, the others fetch it. Device
// memory is shared in the same way, as a descriptor that is not mapped here.
//
// Ranks of the same process find the offer in a process-wide table. Others connect to the maker's Unix socket
// (authenticated, same user) and receive the descriptor.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/mutex.h"
#include "comm/base/unique_fd.h"
#include "comm/shm/segment.h"
#include <maniple/comm/deadline.h>

namespace maniple {

/// An open file that one rank made and passes to others.
struct SharedFile {
  std::shared_ptr<Segment> segment;  ///< null for device memory
  std::shared_ptr<UniqueFd> file;    ///< the descriptor of device memory; null for a segment
  int fd() const noexcept { return segment ? segment->fd() : file->get(); }
  std::uint64_t about() const noexcept { return segment ? segment->size() : 0; }
};

class SegmentBroker {
 public:
  /// `world` distinguishes worlds in one process.
  explicit SegmentBroker(std::uint64_t world) : world_(world) {}
  ~SegmentBroker();  ///< the owner must have removed this object's callbacks from the loop

  /// Offers `file` to `processes` other processes and `threads` other threads of this process. The offer ends when all
  /// have fetched it, or with this object.
  void offer(const std::string& topic, SharedFile file, int processes, int threads);
  /// Serves a request from another process, now or once `topic` is offered. The acceptor calls this in the loop's
  /// thread.
  void serve(const std::string& topic, UniqueFd connection);

  /// Takes what another thread of this process offered under `world` and `topic`. Throws Timeout.
  static SharedFile take_here(std::uint64_t world, const std::string& topic, Deadline deadline);

 private:
  struct Offer {
    std::optional<SharedFile> file;  // none: requested but not offered yet
    int takers = 0;                  // takers that have not fetched it
    std::vector<UniqueFd> waiting;
  };
  void hand_over(const std::string& topic) MANIPLE_EXCLUDES(mutex_);

  std::uint64_t world_;
  Mutex mutex_;
  std::map<std::string, Offer> offers_ MANIPLE_GUARDED_BY(mutex_);
  std::vector<std::string> offered_here_;  // guarded by the mutex of the process's table
};

}  // namespace maniple
