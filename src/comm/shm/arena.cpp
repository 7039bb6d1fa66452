#include "comm/shm/arena.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/error_codec.h"
#include "comm/base/interrupt.h"
#include "comm/base/ticks.h"

namespace maniple {

struct Arena::Header {
  std::atomic<std::uint32_t> abort_state;  // 0: none, 1: being written, 2: complete
  std::uint32_t abort_epoch;               // first epoch that the raising rank has not finished
  std::int32_t abort_kind;                 // ErrorKind, readable without decoding abort_error
  std::int32_t abort_rank;                 // the lost rank, or -1; for the same purpose
  std::uint32_t abort_length;
  char abort_error[ArenaLayout::kHeaderBytes - 20];  // encode_error
};

Arena::Arena(std::shared_ptr<Segment> segment, const ArenaOptions& options)
    : options_(options),
      peer_memory_(options.size),
      segment_(std::move(segment)),
      layout_(ArenaLayout::within(options.size, segment_->size())),
      waiter_(WaitPolicy::for_memory(options.size, options.cores, options.spin_us)),
      crowded_(options.size > options.cores) {
  static_assert(sizeof(Header) == ArenaLayout::kHeaderBytes && sizeof Header::abort_error >= kMaxReportBytes);
  static_assert(sizeof(RankBlock) == ArenaLayout::kBlockBytes);
  static_assert(sizeof(Contribution) == ArenaLayout::kContributionBytes);
  blocks_ = reinterpret_cast<RankBlock*>(segment_->data() + sizeof(Header));
  contributions_ = reinterpret_cast<Contribution*>(segment_->data() + layout_.contributions);
  payloads_ = segment_->data() + layout_.payloads;
  // Allocates the pages that every operation touches now, so that a lack of memory is an error here instead of a
  // SIGBUS. Of the stages, each rank allocates only its own: other ranks read only what this rank has written. (With
  // 256 ranks, touching all stages takes each rank 0.5 ms.)
  segment_->populate(0, layout_.stages);
  segment_->populate(layout_.stage_slot(options.rank, 0), layout_.stage_bytes);
  of(options.rank).identity = peer_memory_.identify();
  abort_state_ = &header().abort_state;
}

Arena::~Arena() {
  if (!guard_.owned()) return;
  of(rank()).left.value.store(1, std::memory_order_seq_cst);
  wake_all_for(rank());
}

void Arena::mark_gone(int rank) noexcept {
  std::uint32_t none = 0;
  if (of(rank).left.value.compare_exchange_strong(none, 2, std::memory_order_seq_cst)) wake_all_for(rank);
}

// Wakes ranks that wait for a word of `rank`. A rank that becomes a sleeper only now checks for a reason to stop before
// it sleeps.
void Arena::wake_sleepers_on(int rank) noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (of(rank).sleepers.value.load(std::memory_order_seq_cst) == 0) return;
  for (std::uint32_t i = 0; i < kContributions; ++i) futex_wake_all(contribution(rank, i).stamp);
  for (auto& counter : of(rank).counters) futex_wake_all(counter.value);
}

// Also wakes ranks that wait for a notification.
void Arena::wake_all_for(int rank) noexcept {
  wake_sleepers_on(rank);
  for (int r = 0; r < size(); ++r) notify(r);
}

Arena::Header& Arena::header() const noexcept { return *reinterpret_cast<Header*>(segment_->data()); }

void Arena::await_contributions(std::uint32_t epoch, OperationContext& context) {
  try {
    for (int i = 1; i < size(); ++i) {
      const int peer = rank() + i < size() ? rank() + i : rank() + i - size();
      await_contribution(peer, epoch, context);
    }
    all_published_ = epoch;
  } catch (const Timeout&) {
    std::vector<int> missing, names;
    for (int r = 0; r < size(); ++r) {
      if (r == rank() || has_published(r, epoch)) continue;
      missing.push_back(global_rank(r));
      names.push_back(name_of(r));
    }
    if (missing.empty()) throw;
    const double waited = context.waited();
    throw Timeout(fmt::format("timed out after {:.1f} s: {} of {} ranks arrived, waiting for rank{} {}", waited,
                              size() - static_cast<int>(names.size()), size(), names.size() == 1 ? "" : "s",
                              fmt::join(names, ", ")),
                  std::move(missing), waited);
  }
}

void Arena::await_all(Counter counter, std::uint32_t value, OperationContext& context) {
  for (int i = 1; i < size(); ++i) {
    await(counter, rank() + i < size() ? rank() + i : rank() + i - size(), value, context);
  }
}

void Arena::notify(int rank) {
  RankBlock& theirs = of(rank);
  theirs.notifications.value.fetch_add(1, std::memory_order_acq_rel);
  if (theirs.notification_sleepers.value.load(std::memory_order_relaxed) != 0)  // as in wake_if_asleep
    futex_wake_all(theirs.notifications.value);
}

std::uint32_t Arena::notifications() const noexcept {
  return of(rank()).notifications.value.load(std::memory_order_acquire);
}

void Arena::await_notification(std::uint32_t seen, Deadline deadline) {
  RankBlock& mine = of(rank());
  const auto changed = [&] { return mine.notifications.value.load(std::memory_order_acquire) != seen; };
  if (changed()) return;
  Waiter::Wait wait(waiter_);
  while (wait.may_spin()) {
    if (wait.spin(changed)) return;
  }
  while (wait.may_yield()) {
    if (changed()) return;
    wait.yield();
  }
  mine.notification_sleepers.value.fetch_add(1, std::memory_order_seq_cst);
  while (!changed() && !deadline.expired()) wait.sleep_while(mine.notifications.value, seen, deadline);
  mine.notification_sleepers.value.fetch_sub(1, std::memory_order_seq_cst);
}

void Arena::await_slowly(const std::atomic<std::uint32_t>& word, std::uint32_t target, int rank,
                         OperationContext& context) {
  const std::uint64_t start = context.take_start();
  Waiter::Wait wait(waiter_, start != 0 ? start : ticks());
  for (bool first = true; wait.may_spin(); first = false) {
    if (wait.spin([&] { return reached(word, target); })) return context.set_end(wait.now());
    if (first && is_on_this_core(rank) && !leave_core_of(rank, wait.now()))
      break;  // it cannot run while this rank spins
  }
  context.forget_ticks();
  const auto since = Deadline::Clock::now();
  const Deadline deadline = context.deadline();
  const auto must_stop = [&] {
    return header().abort_state.load(std::memory_order_acquire) != 0 || has_left(rank) || options_.abort->raised() ||
           deadline.expired();
  };
  // A reached target wins over a reason to stop: a rank that finished and left has left its data.
  while (wait.may_yield() && !is_on_this_core(rank)) {
    for (int i = 0; i < 8; ++i) {
      if (reached(word, target)) return;
      wait.yield();
    }
    if (must_stop()) break;
  }
  for (;;) {
    const bool stop = must_stop();
    if (reached(word, target)) return;
    if (stop) fail_waiting(rank, since);
    Interrupt::check();
    auto& sleepers = of(rank).sleepers.value;
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = word.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(seen - target) < 0 && !must_stop()) {
      show_core();
      wait.sleep_while(word, seen, deadline);
      show_core();
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Arena::wake(const std::atomic<std::uint32_t>& word) {
  show_core();
  futex_wake_all(word);
}

void Arena::show_core() noexcept {
  of(rank()).core.value.store(static_cast<std::uint32_t>(::sched_getcpu() + 1), std::memory_order_relaxed);
}

bool Arena::is_on_this_core(int rank) const noexcept {
  if (crowded_) return false;
  const std::uint32_t theirs = of(rank).core.value.load(std::memory_order_relaxed);
  return theirs != 0 && theirs == static_cast<std::uint32_t>(::sched_getcpu() + 1);
}

// Moves this thread off a core that it shares with a rank working on the same operation, to another core it may use.
// Unbound ranks can meet on a core while others are idle, and the kernel takes milliseconds to separate them: the rest
// of the operation would take twice as long. Done only if the other rank's core is known from this operation, once per
// millisecond, and if other processes do not compete for the cores.
bool Arena::leave_core_of(int rank, std::uint64_t now) noexcept {
  if (of(rank).core.epoch.load(std::memory_order_relaxed) != epoch_ || waiter_.has_competition(now)) return false;
  if (now - left_core_ < waiter_.yield_ticks()) return false;
  left_core_ = now;
  cpu_set_t allowed, others;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return false;
  others = allowed;
  const int here = ::sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE) return false;
  CPU_CLR(here, &others);
  if (::sched_setaffinity(0, sizeof others, &others) != 0) return false;
  ::sched_setaffinity(0, sizeof allowed, &allowed);
  return true;
}

// The cause may be half written. Its writer needs microseconds, unless it died while writing.
void Arena::await_written_cause() const {
  const Deadline limit = Deadline::after(std::chrono::milliseconds(100));
  while (header().abort_state.load(std::memory_order_acquire) != 2 && !limit.expired()) ::sched_yield();
}

void Arena::check_raised_slowly(std::uint32_t epoch) const {
  await_written_cause();
  // A lost rank may have done its part of this epoch before it died; waiting for it decides. The exception is this rank
  // itself, if it was stopped for so long that the others declared it lost.
  const bool lost = header().abort_kind == static_cast<std::int32_t>(ErrorKind::peer_lost);
  if (lost && header().abort_rank != global_rank(rank())) return;
  if (static_cast<std::int32_t>(epoch - header().abort_epoch) >= 0) throw_raised();
}

void Arena::throw_raised() const {
  await_written_cause();
  options_.abort->check();
  if (auto cause = raised()) std::rethrow_exception(cause);
  throw Aborted("the group was aborted by another rank");
}

void Arena::await_raised() const {
  const Deadline limit = Deadline::after(std::chrono::seconds(3));
  while (abort_state_->load(std::memory_order_acquire) == 0 && !options_.abort->raised() && !limit.expired()) {
    futex_wait(*abort_state_, 0, Deadline::after(std::chrono::milliseconds(1)));
  }
  throw_raised();
}

void Arena::fail_waiting(int rank, Deadline::Clock::time_point since) {
  const double waited = std::chrono::duration<double>(Deadline::Clock::now() - since).count();
  options_.abort->check();
  if (abort_state_->load(std::memory_order_acquire) != 0) throw_raised();
  if (const LossKind loss = departure_of(rank); loss != LossKind::unknown) {
    ErrorInfo info;
    info.ranks = {global_rank(rank)};
    info.origin = global_rank(rank);
    info.waited_s = waited;
    info.loss = loss;
    info.reason = fmt::format(
        "rank {} has left the group ({}) before this operation, waited {:.1f} s", name_of(rank),
        loss == LossKind::left ? "it was destroyed there" : "or its process ended; its address refuses connections",
        waited);
    throw PeerLost(std::move(info));
  }
  throw Timeout(fmt::format("timed out after {:.1f} s: waiting for rank {}", waited, name_of(rank)),
                {global_rank(rank)}, waited);
}

LossKind Arena::departure_of(int rank) const noexcept {
  const std::uint32_t left = of(rank).left.value.load(std::memory_order_acquire);
  return left == 0 ? LossKind::unknown : left == 1 ? LossKind::left : LossKind::left_or_ended;
}

void Arena::raise(const std::exception_ptr& cause) noexcept {
  Header& head = header();
  std::uint32_t none = 0;
  if (head.abort_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    head.abort_epoch = finished_epoch_.load(std::memory_order_relaxed) + 1;
    head.abort_kind = static_cast<std::int32_t>(ErrorKind::aborted);
    head.abort_rank = -1;
    head.abort_length = 0;
    try {
      ErrorInfo info = info_of(cause);
      if (info.origin < 0) info.origin = global_rank(rank());
      head.abort_kind = static_cast<std::int32_t>(info.kind);
      if (!info.ranks.empty()) head.abort_rank = info.ranks.front();
      const std::string bytes = encode_error(info, sizeof head.abort_error);
      std::memcpy(head.abort_error, bytes.data(), bytes.size());
      head.abort_length = static_cast<std::uint32_t>(bytes.size());
    } catch (...) {  // out of memory: the others still learn of the failure
    }
    head.abort_state.store(2, std::memory_order_release);
  }
  for (int r = 0; r < size(); ++r) {
    wake_sleepers_on(r);
    notify(r);
  }
}

std::exception_ptr Arena::raised() const {
  const Header& head = header();
  if (head.abort_state.load(std::memory_order_acquire) != 2) return nullptr;
  try {
    const std::size_t length = std::min<std::size_t>(head.abort_length, sizeof head.abort_error);
    return make_error(from_another_rank(decode_error({head.abort_error, length})));
  } catch (const ProtocolError&) {  // the failed rank had no memory to encode its error
    return std::make_exception_ptr(Aborted("the group was aborted by another rank"));
  }
}

}  // namespace maniple
