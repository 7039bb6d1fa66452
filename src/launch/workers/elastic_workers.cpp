// A host's workers in an elastic job: one is ended or started again while the others go on.
#include <algorithm>
#include <csignal>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "launch/process/process_table.h"
#include "launch/workers/worker_group.h"

namespace maniple::launch {

WorkerGroup::Member* WorkerGroup::member_of(int rank) {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&](const auto& member) { return member->assignment.rank == rank; });
  return found == members_.end() ? nullptr : found->get();
}

void WorkerGroup::replace(int rank, bool joins_late) {
  Member* const old = member_of(rank);
  if (state_ != State::working) return;
  if (old == nullptr) {
    const int place = static_cast<int>(members_.size());
    MANIPLE_REQUIRE(place < page_->workers(), "this node has had {} workers; it has no place for another", place);
    WorkerAssignment assignment = members_.empty() ? WorkerAssignment{} : members_.front()->assignment;
    assignment.rank = rank;
    assignment.local_rank = place;
    return start_member(assignment, joins_late);
  }
  if (old->running) return;
  for (Output* output : {&old->out, &old->err}) {
    read_from(*output, true);
    if (!output->fd) continue;  // a process that it left behind may hold the other end
    output->pump->finish();
    poller_.remove(output->fd.get());
    output->fd.reset();
  }
  messages_.forget(rank);
  const WorkerAssignment assignment = old->assignment;
  start_member(assignment, joins_late);
  if (settings_.verbose) console_.say(fmt::format("maniple: rank {} is pid {}", rank, member_of(rank)->pid));
}

void WorkerGroup::signal(int rank, int signal) {
  const Member* const member = member_of(rank);
  if (member == nullptr || !member->running) return;
  if (signal == SIGKILL) {
    ::kill(-member->pid, signal);
  } else {
    ask_to_end(-member->pid, signal);
  }
}

void WorkerGroup::announce_end() {
  if (page_) page_->announce_end();
}

void WorkerGroup::finish() {
  if (state_ != State::working || running_ > 0) return;
  wait_for_descendants();
  check_finished();
}

void WorkerGroup::publish(std::uint32_t generation, const std::vector<int>& members, const std::string& host,
                          int port) {
  if (!page_) return;
  std::vector<int> ranks(static_cast<std::size_t>(page_->workers()), -1);
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const Member* const member = member_of(members[rank]);
    if (member != nullptr) ranks.at(static_cast<std::size_t>(member->assignment.local_rank)) = static_cast<int>(rank);
  }
  page_->publish(generation, static_cast<int>(members.size()), host, port, ranks);
}

}  // namespace maniple::launch
