// How the ranks of one host map the same memory: one creates the segment and offers it, the others fetch it. Memory of
// a device is shared in the same way, as a descriptor that is not mapped here.
//
// Ranks of one process find it in a table of the process. Others connect to the maker's Unix socket (authenticated,
// same user) and are handed the descriptor.
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

/// An open file that one rank has made and others are handed.
struct SharedFile {
  std::shared_ptr<Segment> segment;  ///< null for memory of a device
  std::shared_ptr<UniqueFd> file;    ///< of memory of a device
  int fd() const noexcept { return segment ? segment->fd() : file->get(); }
  std::uint64_t about() const noexcept { return segment ? segment->size() : 0; }
};

class SegmentBroker {
 public:
  /// `world` keeps worlds of one process apart.
  explicit SegmentBroker(std::uint64_t world) : world_(world) {}
  ~SegmentBroker();  ///< the owner has seen to it that nothing of ours is left in the loop

  /// Offers it to `processes` other processes and to `threads` other threads of this one. It is forgotten when all
  /// have fetched it, or with this object.
  void offer(const std::string& topic, SharedFile file, int processes, int threads);
  /// A process asks for it (called by the acceptor, in the loop's thread); served now or when it is offered.
  void serve(const std::string& topic, UniqueFd connection);

  /// What a thread of this process has offered under the same world and topic. Throws Timeout.
  static SharedFile take_here(std::uint64_t world, const std::string& topic, Deadline deadline);

 private:
  struct Offer {
    std::optional<SharedFile> file;  // none while only a taker has come
    int takers = 0;                  // that have not fetched it
    std::vector<UniqueFd> waiting;
  };
  void hand_over(const std::string& topic) MANIPLE_EXCLUDES(mutex_);

  std::uint64_t world_;
  Mutex mutex_;
  std::map<std::string, Offer> offers_ MANIPLE_GUARDED_BY(mutex_);
  std::vector<std::string> offered_here_;  // guarded by the mutex of the process's table
};

}  // namespace maniple
