// Rounds: let ranks that call init() at the same time meet, however often each of them has tried before.
//
// The store numbers rounds. A rank joins the open round: it stores its announcement there and waits. Rank 0 collects
// the announcements of all ranks, closes the round and publishes the result. A rank that gives up withdraws its
// announcement, so its next try joins the same round, or the next round if this one has been closed. A rank that finds
// an announcement of its own earlier try in the result has missed that round, and joins the next one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <maniple/comm/deadline.h>
#include <maniple/comm/store.h>

namespace maniple {

class EventLoop;

struct Met {
  std::shared_ptr<Store> store;  ///< the keys of this round
  std::string result;
};

/// Options of meet(), which joins the open round of `store` with `announcement`. On rank 0, `combine` turns all
/// announcements, ordered by rank, into the result. meet() logs the missing ranks after MANIPLE_WAIT_REPORT seconds,
/// and then at growing intervals. Throws Timeout "timed out after 60.0 s: 6 of 8 ranks joined, waiting for ranks 3, 5".
struct MeetOptions {
  int rank = 0;
  int world_size = 1;
  std::string announcement = {};
  std::function<std::string(const std::vector<std::string>& announcements)> combine = {};
  Deadline deadline = Deadline::never();
};
Met meet(const std::shared_ptr<Store>& store, const MeetOptions& options);

/// A rank for a process without one: the first free rank of the open round.
struct TakenRank {
  int rank = 0;
  std::function<void()> give_back;  ///< for a process that leaves before the round is closed
};
TakenRank take_rank(const std::shared_ptr<Store>& store, int world_size, Deadline deadline);

/// Logs `text` while this object exists: after MANIPLE_WAIT_REPORT seconds, and then at growing intervals.
class WaitNotice {
 public:
  explicit WaitNotice(std::string text);
  ~WaitNotice();
  WaitNotice(const WaitNotice&) = delete;
  WaitNotice& operator=(const WaitNotice&) = delete;

 private:
  struct State;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<State> state_;
};

/// "3, 5-7, 9"
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace maniple
