// Rounds: how the ranks that call init() at one time meet, however often each of them has tried before.
//
// The store numbers rounds. A rank joins the open round: it puts its announcement there and waits. Rank 0 collects the
// announcements of all ranks, closes the round and publishes the result. A rank that gives up takes its announcement
// back, so its next try joins the same round, or the next one if that has been closed. Who finds in the result an
// announcement of an earlier try of its own has missed that round, and joins the next.
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

/// Joins the open round of `store` with `announcement`. On rank 0 `combine` makes the result of all announcements, by
/// rank. Logs after MANIPLE_WAIT_REPORT seconds, and then ever more rarely, who is missing. Throws Timeout "timed out
/// after 60.0 s: 6 of 8 ranks joined, waiting for ranks 3, 5".
struct MeetOptions {
  int rank = 0;
  int world_size = 1;
  std::string announcement = {};
  std::function<std::string(const std::vector<std::string>& announcements)> combine = {};
  Deadline deadline = Deadline::never();
};
Met meet(const std::shared_ptr<Store>& store, const MeetOptions& options);

/// A rank for a process that has none: the first of the open round that is free.
struct TakenRank {
  int rank = 0;
  std::function<void()> give_back;  ///< for a process that leaves before the round is closed
};
TakenRank take_rank(const std::shared_ptr<Store>& store, int world_size, Deadline deadline);

/// Logs `text` while it exists: after MANIPLE_WAIT_REPORT seconds, and then ever more rarely.
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
