// The session's groups: their members, their ends, and connections and aborts that arrived before a group was made.
#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "comm/base/error_codec.h"
#include "comm/session/session.h"

namespace maniple {

void Session::add_group(const std::string& name, GroupLink link) {
  const MutexLock lock(mutex_);
  for (const int member : link.members) {
    if (const auto it = lost_.find(member); it != lost_.end()) {
      link.abort->raise(std::make_exception_ptr(PeerLost(it->second, member, LossKind::failed)));
    }
  }
  past_groups_.add(name);
  if (const auto it = early_aborts_.find(name); it != early_aborts_.end()) {
    link.abort->raise(it->second);
    early_aborts_.erase(it);
  }
  forget_past_groups();
  groups_[name] = std::move(link);
}

void Session::skip_group(const std::string& name) {
  const MutexLock lock(mutex_);
  past_groups_.skip(name);
  forget_past_groups();
}

// "world/0" of "world/0:c" and "world/0:c/1".
std::string Session::group_of(const std::string& topic) { return topic.substr(0, topic.rfind(':')); }

void Session::forget_past_groups() {
  std::erase_if(waiting_, [this](const auto& entry)
                              MANIPLE_REQUIRES(mutex_) { return past_groups_.contains(group_of(entry.first.second)); });
  std::erase_if(early_aborts_,
                [this](const auto& entry) MANIPLE_REQUIRES(mutex_) { return past_groups_.contains(entry.first); });
}

void Session::open_group(const std::string& name, std::function<void(int)> gone, std::function<MessageWait()> message) {
  const MutexLock lock(mutex_);
  const auto it = groups_.find(name);
  if (it == groups_.end()) return;
  it->second.gone = std::move(gone);
  it->second.message = std::move(message);
  for (const int member : it->second.members) {
    if (gone_.count(member) != 0) it->second.gone(member);
  }
}

void Session::remove_group(const std::string& name) {
  const MutexLock lock(mutex_);
  groups_.erase(name);
  past_groups_.remove(name);
  forget_past_groups();
}

void Session::on_lost(int rank, const std::string& text) {
  std::vector<std::shared_ptr<AbortSignal>> affected;
  {
    const MutexLock lock(mutex_);
    lost_[rank] = text;
    survivors_changed_.notify_all();
    for (const auto& [name, group] : groups_) {
      for (const int member : group.members) {
        if (member == rank) affected.push_back(group.abort);
      }
    }
  }
  for (const auto& abort : affected) abort->raise(std::make_exception_ptr(PeerLost(text, rank, LossKind::failed)));
}

void Session::on_gone(int rank) {
  const MutexLock lock(mutex_);
  gone_.insert(rank);
  for (const auto& [name, group] : groups_) {
    if (group.gone && std::count(group.members.begin(), group.members.end(), rank) != 0) group.gone(rank);
  }
}

void Session::on_aborted(const detector::Abort& message) {
  std::shared_ptr<AbortSignal> abort;
  {
    const MutexLock lock(mutex_);
    const auto it = groups_.find(message.group);
    if (it == groups_.end()) {
      if (past_groups_.contains(message.group)) return;
      early_aborts_.emplace(message.group, make_error(from_another_rank(message.error)));
      return;
    }
    abort = it->second.abort;
  }
  abort->raise(make_error(from_another_rank(message.error)));
}

void Session::on_departed(const detector::Departed& message) {
  const MutexLock lock(mutex_);
  const auto it = groups_.find(message.group);
  if (it != groups_.end() && it->second.departed) it->second.departed(message.rank, message.seq);
}

// ---- Survivors

void Session::on_survivors(const detector::Survivors& decision) {
  const MutexLock lock(mutex_);
  survivors_[decision.group] = decision;
  survivors_changed_.notify_all();
}

void Session::on_missing(const detector::Missing& missing) {
  const MutexLock lock(mutex_);
  missing_[missing.group] = missing;
  survivors_changed_.notify_all();
}

detector::Survivors Session::survivors_of(const detector::Shrink& request, Deadline deadline) {
  const auto since = Deadline::Clock::now();
  MutexLock lock(mutex_);
  survivors_.erase(request.group);
  missing_.erase(request.group);
  detector_->shrink(request);
  const auto is_decided = [&]() MANIPLE_REQUIRES(mutex_) {
    return survivors_.count(request.group) != 0 || lost_.count(rank()) != 0;
  };
  if (!survivors_changed_.wait_until(lock, deadline.when(), is_decided)) {
    detector_->cancel_shrink(request.group);
    survivors_changed_.wait_until(
        lock, Deadline::Clock::now() + detector::kVerdictLimit,
        [&]() MANIPLE_REQUIRES(mutex_) { return is_decided() || missing_.count(request.group) != 0; });
  }
  if (const auto it = lost_.find(rank()); it != lost_.end()) throw PeerLost(it->second, rank(), LossKind::failed);
  if (const auto it = survivors_.find(request.group); it != survivors_.end()) return it->second;
  const double waited_s = std::chrono::duration<double>(Deadline::Clock::now() - since).count();
  std::vector<int> awaited;
  std::string names;
  if (const auto it = missing_.find(request.group); it != missing_.end()) {
    awaited.assign(it->second.members.begin(), it->second.members.end());
    for (const int member : awaited) names += (names.empty() ? "" : ", ") + peer(member).describe(member);
  }
  throw Timeout(
      fmt::format("{:.1f} s have passed, and {} not called shrink(): each survivor of group {} has to, or leave",
                  waited_s, names.empty() ? "some survivors have" : names + (awaited.size() > 1 ? " have" : " has"),
                  request.group),
      std::move(awaited), waited_s);
}

void Session::announce_departure(const std::string& group, std::uint64_t seq) {
  if (detector_) detector_->announce(detector::Departed{.rank = rank(), .seq = seq, .group = group});
}

void Session::compare_calls(const std::string& group, std::uint64_t seq) {
  if (!detector_) return;
  detector::Compare compare{.rank = rank(), .seq = seq, .group = group};
  {
    const MutexLock lock(mutex_);
    const auto it = groups_.find(group);
    if (it == groups_.end()) return;
    compare.arguments = it->second.compares_arguments;
    const std::vector<int>& members = it->second.members;
    if (static_cast<int>(members.size()) < world_size() && members.size() <= detector::kMaxMembers)
      compare.members.assign(members.begin(), members.end());
  }
  detector_->announce(compare);
}

RankCall Session::call_of(const std::string& group, std::uint64_t seq) {
  std::function<RankCall(std::uint64_t)> called;
  {
    const MutexLock lock(mutex_);
    const auto it = groups_.find(group);
    if (it == groups_.end()) return {};
    called = it->second.called;
  }
  RankCall call = called(seq);
  call.rank = rank();
  return call;
}

void Session::spread_abort(const std::string& group, std::uint64_t seq, const std::exception_ptr& cause) {
  if (!detector_) return;
  detector::Abort abort{.rank = rank(), .seq = seq, .group = group, .error = info_of(cause)};
  if (abort.error.origin < 0) abort.error.origin = rank();
  detector_->report_abort(abort);
}

}  // namespace maniple
