#include "comm/rendezvous/round.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/codec.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/net/event_loop.h"
#include "comm/net/handshake_wire.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using Clock = Deadline::Clock;

constexpr const char* kRound = "maniple/round";  // the number of the open round
constexpr const char* kResult = "maniple/result";
constexpr std::size_t kMostAnnouncement = std::size_t{1} << 20;
constexpr std::size_t kMostResult = std::size_t{64} << 20;

std::string key_of(int rank) { return fmt::format("maniple/joined/{}", rank); }
std::string gave_up_key_of(int rank) { return fmt::format("maniple/gave-up/{}", rank); }
std::string slot_of(int rank) { return fmt::format("maniple/slot/{}", rank); }

double seconds_since(Clock::time_point when) { return std::chrono::duration<double>(Clock::now() - when).count(); }

Deadline after_seconds(double seconds) {
  return Deadline::after(std::chrono::duration_cast<Deadline::Duration>(std::chrono::duration<double>(seconds)));
}

/// Identifies this try uniquely.
std::uint64_t new_nonce() {
  std::array<std::uint8_t, 8> bytes;
  fill_random(bytes);
  std::uint64_t nonce = 0;
  for (const std::uint8_t byte : bytes) nonce = nonce << 8 | byte;
  return nonce;
}

std::shared_ptr<Store> view_of(const std::shared_ptr<Store>& store, std::int64_t round) {
  return make_prefix_store(fmt::format("maniple/round-{}", round), store);
}

/// One try in one round.
class Try {
 public:
  Try(Store& rounds, std::shared_ptr<Store> round, const MeetOptions& options)
      : rounds_(rounds), store_(std::move(round)), options_(options) {}

  /// Returns nullopt if the round was closed with an announcement of an earlier try.
  std::optional<std::string> run() {
    ByteWriter mine;
    mine.put(nonce_);
    mine.put_string(options_.announcement);
    store_->set(key_of(options_.rank), mine.bytes());
    try {
      if (options_.rank == 0) return collect();
      const std::string published = await([&](Deadline limit) { return store_->get(kResult, limit); });
      ByteReader reader(published);
      const auto ranks = reader.get<std::uint32_t>();
      if (ranks != static_cast<std::uint32_t>(options_.world_size)) {
        throw ProtocolError(fmt::format("rank 0 expects {} ranks, this rank expects {}", ranks, options_.world_size));
      }
      bool counted = false;
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const auto nonce = reader.get<std::uint64_t>();
        if (r == static_cast<std::uint32_t>(options_.rank)) counted = nonce == nonce_;
      }
      if (!counted) return std::nullopt;
      std::string result(reader.get_string(kMostResult));
      reader.expect_end();
      return result;
    } catch (...) {
      take_back();
      throw;
    }
  }

 private:
  // One rank collects and all others read one value, so the store serves 2n requests instead of n^2.
  std::string collect() {
    std::vector<std::string> keys;
    for (int r = 0; r < options_.world_size; ++r) keys.push_back(key_of(r));
    const auto all = await([&](Deadline limit) { return store_->multi_get(keys, limit); });
    ByteWriter published;
    published.put(static_cast<std::uint32_t>(options_.world_size));
    std::vector<std::string> announcements;
    for (const std::string& bytes : all) {
      ByteReader reader(bytes);
      published.put(reader.get<std::uint64_t>());
      announcements.emplace_back(reader.get_string(kMostAnnouncement));
      reader.expect_end();
    }
    std::string result = options_.combine(announcements);
    published.put_string(result);
    rounds_.add(kRound, 1);  // before any rank can read the result and return for the next round
    store_->set(kResult, published.bytes());
    return result;
  }

  void take_back() noexcept {
    try {
      store_->set(gave_up_key_of(options_.rank), "");
      store_->erase(key_of(options_.rank));
    } catch (const std::exception&) {
      // The store is gone, and with it the announcement.
    }
  }

  template <class Wait>
  auto await(const Wait& wait) -> decltype(wait(Deadline::never())) {
    const double after_s = knob_number(Knob::wait_report_s);
    for (double next_s = after_s;; next_s *= 2) {
      const Deadline limit = after_s > 0
                                 ? Deadline::sooner(options_.deadline, after_seconds(next_s - seconds_since(since_)))
                                 : options_.deadline;
      try {
        return wait(limit);
      } catch (const Timeout& timeout) {
        if (options_.deadline.expired()) throw_missing(timeout);
      } catch (const PeerLost& lost) {
        if (missing_.empty()) throw;
        throw PeerLost(fmt::format("{}; {:.0f} s before, {}", lost.what(), seconds_since(checked_), progress()), -1);
      }
      report();
    }
  }

  // Only the lowest rank that has joined logs.
  void report() {
    const std::string first[] = {key_of(0)};
    if (options_.rank != 0 && store_->check(first).front()) return;
    check();
    if (missing_.empty() || lowest_ != options_.rank) return;
    log_warning("init: {:.1f} s: {} ({})", seconds_since(since_), progress(), rounds_.describe());
  }

  void check() {
    missing_ = absent(all_ranks(), key_of);
    checked_ = Clock::now();
    for (lowest_ = 0; std::binary_search(missing_.begin(), missing_.end(), lowest_);) ++lowest_;
    // Ranks that joined and gave up may return; they are reported only if every missing rank has done so.
    std::vector<int> never = absent(missing_, gave_up_key_of);
    gave_up_ = never.empty();
    joined_ = options_.world_size - static_cast<int>(gave_up_ ? missing_.size() : never.size());
    if (!gave_up_) missing_ = std::move(never);
  }

  std::vector<int> all_ranks() const {
    std::vector<int> ranks(options_.world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  std::vector<int> absent(const std::vector<int>& ranks, std::string (*key)(int)) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(key(rank));
    const std::vector<bool> there = keys.empty() ? std::vector<bool>() : store_->check(keys);
    std::vector<int> result;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (!there[i]) result.push_back(ranks[i]);
    }
    return result;
  }

  std::string progress() const {
    return fmt::format("{} of {} ranks joined, waiting for rank{} {}{}", joined_, options_.world_size,
                       missing_.size() == 1 ? "" : "s", list_ranks(missing_),
                       !gave_up_              ? ""
                       : missing_.size() == 1 ? ", which has given up"
                                              : ", which have given up");
  }

  [[noreturn]] void throw_missing(const Timeout& original) {
    try {
      check();
    } catch (const Error&) {
      throw original;
    }
    const double waited = seconds_since(since_);
    if (missing_.empty()) {
      throw Timeout(
          fmt::format("timed out after {:.1f} s: all {} ranks joined, but rank 0 did not complete the list of "
                      "ranks in time",
                      waited, options_.world_size),
          {0}, waited);
    }
    throw Timeout(fmt::format("timed out after {:.1f} s: {}. Was every rank started, with the same address ({})?",
                              waited, progress(), rounds_.describe()),
                  missing_, waited);
  }

  Store& rounds_;
  std::shared_ptr<Store> store_;
  const MeetOptions& options_;
  std::uint64_t nonce_ = new_nonce();
  Clock::time_point since_ = Clock::now();
  std::vector<int> missing_;  // this and the next members: as of the last check
  bool gave_up_ = false;      // all missing ranks had joined before
  int joined_ = 0;
  int lowest_ = 0;  // the lowest rank that has joined
  Clock::time_point checked_{};
};

}  // namespace

Met meet(const std::shared_ptr<Store>& store, const MeetOptions& options) {
  for (;;) {
    Met met;
    met.store = view_of(store, store->add(kRound, 0));
    if (auto result = Try(*store, met.store, options).run()) {
      met.result = std::move(*result);
      return met;
    }
  }
}

TakenRank take_rank(const std::shared_ptr<Store>& store, int world_size, Deadline deadline) {
  const std::string mine = fmt::format("{:016x}", new_nonce());
  for (;;) {
    const auto view = view_of(store, store->add(kRound, 0));
    const std::int64_t arrivals = view->add("maniple/arrivals", 1);
    for (int i = 0; i < world_size; ++i) {
      const int rank = static_cast<int>((arrivals - 1 + i) % world_size);
      if (view->compare_set(slot_of(rank), "", mine) != mine) continue;
      return {rank, [view, rank] { view->erase(slot_of(rank)); }};
    }
    if (deadline.expired()) {
      throw Timeout(fmt::format("all {} ranks are taken ({}); if an earlier job left them there, remove the file",
                                world_size, store->describe()));
    }
    // sleep: until the full round has been closed
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

struct WaitNotice::State : std::enable_shared_from_this<WaitNotice::State> {
  EventLoop* loop = nullptr;  // not owned: the loop's thread must not release the last reference
  std::string text;
  Clock::time_point began = Clock::now();
  double next_s = 0;
  Mutex mutex;
  bool over MANIPLE_GUARDED_BY(mutex) = false;

  void schedule() {
    loop->call_at(after_seconds(next_s - seconds_since(began)), [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      const MutexLock lock(self->mutex);
      if (self->over) return;
      log_warning("init: {:.1f} s: {}", seconds_since(self->began), self->text);
      self->next_s *= 2;
      self->schedule();
    });
  }
};

WaitNotice::WaitNotice(std::string text) {
  const double after_s = knob_number(Knob::wait_report_s);
  if (after_s <= 0) return;
  loop_ = EventLoop::shared();
  state_ = std::make_shared<State>();
  state_->loop = loop_.get();
  state_->text = std::move(text);
  state_->next_s = after_s;
  state_->schedule();
}

WaitNotice::~WaitNotice() {
  if (!state_) return;
  const MutexLock lock(state_->mutex);
  state_->over = true;
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (!text.empty()) text += ", ";
    text += j > i + 1 ? fmt::format("{}-{}", ranks[i], ranks[j]) : fmt::format("{}", ranks[i]);
    if (j == i + 1) text += fmt::format(", {}", ranks[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace maniple
