// How the ranks of one host map the same memory: one creates the segment and offers it, the others fetch it.
//
// Ranks of one process find it in a table of the process. Others connect to the maker's Unix socket (authenticated, same user)
// and are handed the descriptor.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "shm/segment.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class SegmentBroker {
 public:
  /// `world` keeps worlds of one process apart.
  explicit SegmentBroker(std::uint64_t world) : world_(world) {}
  ~SegmentBroker();  ///< the owner has seen to it that nothing of ours is left in the loop

  /// Offers a segment to `processes` other processes and to `threads` other threads of this one. It is forgotten when all
  /// have fetched it, or with this object.
  void offer(const std::string& topic, std::shared_ptr<Segment> segment, int processes, int threads);
  /// A process asks for it (called by the acceptor, in the loop's thread); served now or when it is offered.
  void serve(const std::string& topic, UniqueFd connection);

  /// What a thread of this process has offered under the same world and topic. Throws Timeout.
  static std::shared_ptr<Segment> take_here(std::uint64_t world, const std::string& topic, Deadline deadline);

 private:
  struct Offer {
    std::shared_ptr<Segment> segment;
    int takers = 0;  // that have not fetched it
    std::vector<UniqueFd> waiting;
  };
  void hand_over(const std::string& topic);

  std::uint64_t world_;
  std::mutex mutex_;
  std::map<std::string, Offer> offers_;
  std::vector<std::string> offered_here_;
};

}  // namespace maniple
