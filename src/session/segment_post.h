// How ranks of one host come to map the same memory: one makes it and posts it, the others fetch it.
//
// Ranks of one process find it in a table of the process. Others connect to the maker's Unix socket (authenticated, same user)
// and are handed the descriptor.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "shm/segment.h"

namespace maniple {

class SegmentPost {
 public:
  /// `world` keeps worlds of one process apart.
  SegmentPost(std::shared_ptr<EventLoop> loop, std::uint64_t world) : loop_(std::move(loop)), world_(world) {}
  ~SegmentPost();  ///< the owner has seen to it that nothing of ours is left in the loop

  /// Offers a segment to `takers` other processes and to threads of this one.
  void offer(const std::string& topic, std::shared_ptr<Segment> segment, int takers);
  /// Ends the offer to threads of this process (they have it, or will not come).
  void withdraw(const std::string& topic);
  /// A process has come for it (called by the acceptor, in the loop's thread); served now or when it is offered.
  void serve(const std::string& topic, UniqueFd connection);

  /// What a thread of this process has offered under the same world and topic. Throws Timeout.
  static std::shared_ptr<Segment> take_here(std::uint64_t world, const std::string& topic, Deadline deadline);

 private:
  struct Offer {
    std::shared_ptr<Segment> segment;
    int takers = 0;
    std::vector<UniqueFd> waiting;
  };
  void hand_over(const std::string& topic);

  std::shared_ptr<EventLoop> loop_;
  std::uint64_t world_;
  std::mutex mutex_;
  std::map<std::string, Offer> offers_;
};

}  // namespace maniple
