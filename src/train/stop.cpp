#include <maniple/train/stop.h>

#include <time.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/system_error.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>

namespace maniple {

// ---- GracefulStop ---------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kSameKeystrokeMs = 200;

// The state that the handler uses: lock-free atomics only, so that it is safe wherever the handler interrupts.
std::atomic<bool> taken = false;
std::atomic<int> first_signal = 0;
std::atomic<std::int64_t> first_ms = 0;
ForkGuard installed_by;  // the process whose GracefulStop waits for the signals
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now_ms() noexcept {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000 + 1;
}

extern "C" void maniple_note_signal(int number) {
  const int saved_errno = errno;
  const auto end_by = [](int signal) {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(signal, &standard, nullptr);
    ::raise(signal);  // delivered when this handler returns
  };
  int none = 0;
  if (!installed_by.owned()) {
    end_by(number);  // in a child of fork() nothing polls requested()
  } else if (first_signal.compare_exchange_strong(none, number)) {
    first_ms.store(now_ms());
  } else if (const std::int64_t first = first_ms.load(); first != 0 && now_ms() - first >= kSameKeystrokeMs) {
    end_by(number);
  }
  errno = saved_errno;
}

}  // namespace

GracefulStop::GracefulStop(GracefulStopOptions options) : every_(options.every) {
  MANIPLE_REQUIRE(options.every >= 1, "GracefulStop: every is {}; expected at least 1", options.every);
  if (!installed_by.owned()) taken.store(false);  // inherited from the parent of fork()
  MANIPLE_REQUIRE(!taken.exchange(true), "GracefulStop: there is one already in this process; use that one");
  installed_by = ForkGuard();
  first_ms.store(0);
  first_signal.store(0);
  struct sigaction ours = {};
  ours.sa_handler = maniple_note_signal;
  ours.sa_flags = SA_RESTART;  // interrupted system calls are restarted
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
    // Leaves a handler alone that other code installed after ours.
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

bool GracefulStop::requested_anywhere(const std::shared_ptr<ProcessGroup>& group, const SourceLocation& where) {
  const PublicCall call("GracefulStop::requested_anywhere, which all ranks call", where);
  if (group) group->require_member("GracefulStop");
  if (agreed_) return true;
  if (calls_++ % static_cast<std::uint64_t>(every_) != static_cast<std::uint64_t>(every_ - 1)) return false;
  // 0: no request, 1: request(), otherwise the signal number plus 1.
  std::int32_t answer = first_signal.load() != 0 ? first_signal.load() + 1 : asked_.load() ? 1 : 0;
  const auto ranks = group ? group : is_initialized() ? get_default_group() : nullptr;
  if (ranks && ranks->size() > 1) ranks->all_reduce(buffer_of(answer), ReduceOp::max, {}, public_place());
  agreed_ = answer != 0;
  agreed_signal_ = answer > 1 ? answer - 1 : 0;
  return agreed_;
}

// ---- EarlyStopping --------------------------------------------------------------------------------------------------

EarlyStopping::EarlyStopping(EarlyStoppingOptions options)
    : options_(std::move(options)), best_(std::numeric_limits<double>::quiet_NaN()) {
  MANIPLE_REQUIRE(options_.patience >= 1, "EarlyStopping: a patience of {}; expected at least 1", options_.patience);
  MANIPLE_REQUIRE(options_.min_delta >= 0 && std::isfinite(options_.min_delta),
                  "EarlyStopping: a min_delta of {}; expected a number that is not negative", options_.min_delta);
  if (options_.group) options_.group->require_member("EarlyStopping");
}

bool EarlyStopping::update(double value, const SourceLocation& where) {
  const PublicCall call("EarlyStopping::update, which all ranks call", where);
  if (should_stop()) return true;
  const auto group = options_.group ? options_.group : is_initialized() ? get_default_group() : nullptr;
  if (group && group->size() > 1) group->broadcast(buffer_of(value), 0, {}, public_place());
  ++updates_;
  const double gain = options_.mode == StopMode::min ? best_ - value : value - best_;
  // The difference of two equal infinities is NaN, which is not a gain.
  if (!std::isnan(value) && (std::isnan(best_) || gain > options_.min_delta)) {
    best_ = value;
    best_update_ = updates_;
    waited_ = 0;
  } else {
    ++waited_;
  }
  return should_stop();
}

std::string EarlyStopping::state_dict() const {
  return format_text("best {:.17g} updates {} best_update {} waited {}", best_, updates_, best_update_, waited_);
}

void EarlyStopping::load_state_dict(const std::string& text) {
  double best = 0;
  long long updates = 0, best_update = 0;
  int waited = 0, read = -1;
  const int fields = std::sscanf(text.c_str(), "best %lf updates %lld best_update %lld waited %d%n", &best, &updates,
                                 &best_update, &waited, &read);
  MANIPLE_REQUIRE(fields == 4 && read == static_cast<int>(text.size()) && best_update >= 0 && best_update <= updates &&
                      waited >= 0 && waited <= updates,
                  "EarlyStopping: \"{}\" is not what state() returns", text);
  best_ = best;
  updates_ = updates;
  best_update_ = best_update;
  waited_ = waited;
}

}  // namespace maniple
