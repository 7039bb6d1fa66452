#include <time.h>

#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/system_error.h"
#include <maniple/dist.h>
#include <maniple/train/stop.h>

namespace maniple {
namespace {

constexpr std::int64_t kSettleMs = 200;

// What the handler touches: lock-free atomics only, so that it is safe wherever it interrupts.
std::atomic<bool> taken = false;
std::atomic<int> first_signal = 0;
std::atomic<std::int64_t> first_ms = 0;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now_ms() noexcept {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000 + 1;
}

extern "C" void maniple_note_signal(int number) {
  const int saved_errno = errno;
  int none = 0;
  if (first_signal.compare_exchange_strong(none, number)) {
    first_ms.store(now_ms());
  } else if (const std::int64_t first = first_ms.load(); first != 0 && now_ms() - first >= kSettleMs) {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(number, &standard, nullptr);
    ::raise(number);  // held back until this handler returns
  }
  errno = saved_errno;
}

}  // namespace

GracefulStop::GracefulStop(GracefulStopOptions options) : every_(options.every) {
  MANIPLE_REQUIRE(options.every >= 1, "GracefulStop: compares notes every {} calls; expected at least 1",
                  options.every);
  MANIPLE_REQUIRE(!taken.exchange(true), "GracefulStop: there is one already in this process; use that one");
  first_ms.store(0);
  first_signal.store(0);
  struct sigaction ours = {};
  ours.sa_handler = maniple_note_signal;
  ours.sa_flags = SA_RESTART;  // what is waiting in a system call need not know
  ::sigemptyset(&ours.sa_mask);
  for (const int number : options.signals) ::sigaddset(&ours.sa_mask, number);
  for (const int number : options.signals) {
    Previous previous = {number, {}};
    const bool done = ::sigaction(number, nullptr, &previous.action) == 0 &&
                      (previous.action.sa_handler == SIG_IGN || ::sigaction(number, &ours, nullptr) == 0);
    if (!done) {
      restore();
      throw InvalidArgument(format_text("GracefulStop: signal {} cannot be caught: {}", number, errno_text(errno)));
    }
    if (previous.action.sa_handler != SIG_IGN) previous_.push_back(previous);
  }
}

GracefulStop::~GracefulStop() { restore(); }

void GracefulStop::restore() noexcept {
  for (const Previous& previous : previous_) {
    struct sigaction current = {};
    // Somebody else's handler, put there after ours, is left alone.
    if (::sigaction(previous.number, nullptr, &current) != 0 || current.sa_handler != maniple_note_signal) continue;
    ::sigaction(previous.number, &previous.action, nullptr);
  }
  taken.store(false);
}

bool GracefulStop::requested() const noexcept { return agreed_ || asked_.load() || first_signal.load() != 0; }

int GracefulStop::signal() const noexcept {
  const int own = first_signal.load();
  return own != 0 ? own : agreed_signal_;
}

bool GracefulStop::requested_anywhere(const std::shared_ptr<ProcessGroup>& group) {
  if (group) group->require_member("GracefulStop");
  if (agreed_) return true;
  if (calls_++ % static_cast<std::uint64_t>(every_) != static_cast<std::uint64_t>(every_ - 1)) return false;
  // 0: nobody, 1: request(), otherwise a signal and 1.
  std::int32_t answer = first_signal.load() != 0 ? first_signal.load() + 1 : asked_.load() ? 1 : 0;
  const auto ranks = group ? group : is_initialized() ? get_default_group() : nullptr;
  if (ranks && ranks->size() > 1) ranks->all_reduce(buffer_of(answer), ReduceOp::max);
  agreed_ = answer != 0;
  agreed_signal_ = answer > 1 ? answer - 1 : 0;
  return agreed_;
}

}  // namespace maniple
