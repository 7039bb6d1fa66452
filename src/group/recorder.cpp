#include "group/recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace maniple {

Recorder::Recorder(std::size_t entries) {
  if (entries == 0) return;
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(entries, 2));
  entries_ = std::make_unique<Entry[]>(size);
  mask_ = size - 1;
}

RankCall Recorder::call_of(const Entry& entry, std::uint64_t seq) {
  const Signature signature{seq, entry.words[0].load(std::memory_order_relaxed),
                            entry.words[1].load(std::memory_order_relaxed),
                            entry.words[2].load(std::memory_order_relaxed)};
  const std::string_view file = entry.file.load(std::memory_order_relaxed);
  RankCall call{.call = signature.describe()};
  // Without one it is no call of the program: the barrier of init().
  if (!file.empty()) call.place = fmt::format("{}:{}", file, entry.line.load(std::memory_order_relaxed));
  return call;
}

std::string Recorder::describe(const Entry& entry, std::uint64_t seq) {
  const RankCall call = call_of(entry, seq);
  return call.place.empty() ? call.call : fmt::format("{} at {}", call.call, call.place);
}

RankCall Recorder::called(std::uint64_t seq) const {
  if (mask_ == 0 || seq == 0) return {};
  const Entry& entry = entries_[seq & mask_];
  if (entry.seq.load(std::memory_order_acquire) != seq) return {};
  RankCall call = call_of(entry, seq);
  std::atomic_thread_fence(std::memory_order_acquire);
  return entry.seq.load(std::memory_order_acquire) == seq ? call : RankCall();
}

CallProgress Recorder::last() const {
  const Entry* latest = nullptr;
  CallProgress last;
  for (std::uint64_t i = 0; mask_ != 0 && i <= mask_; ++i) {
    const std::uint64_t seq = entries_[i].seq.load(std::memory_order_acquire);
    if (seq <= last.seq) continue;
    last.seq = seq;
    latest = &entries_[i];
  }
  if (latest == nullptr) return last;
  const std::uint64_t now = ticks();
  const std::uint64_t ended = latest->ended.load(std::memory_order_acquire);
  const std::uint64_t when = ended != 0 ? ended : latest->began.load(std::memory_order_relaxed);
  last.running = ended == 0;
  last.seconds = static_cast<double>(now - std::min(now, when)) / ticks_per_second();
  last.call = describe(*latest, last.seq);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (latest->seq.load(std::memory_order_acquire) != last.seq) last.running = false;  // another has begun in its place
  return last;
}

std::vector<std::string> Recorder::lines() const {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  const std::uint64_t now = ticks();
  const double second = ticks_per_second();
  for (std::uint64_t i = 0; mask_ != 0 && i <= mask_; ++i) {
    const Entry& entry = entries_[i];
    const std::uint64_t seq = entry.seq.load(std::memory_order_acquire);
    if (seq == 0) continue;
    const std::uint64_t began = entry.began.load(std::memory_order_relaxed);
    const std::uint64_t ended = entry.ended.load(std::memory_order_acquire);
    std::string text = fmt::format("{}, began {:.3f} s ago, ", describe(entry, seq),
                                   static_cast<double>(now - std::min(now, began)) / second);
    if (ended == 0) {
      text += "still running";
    } else {
      text += fmt::format("{} {:.1f} us", entry.failed.load(std::memory_order_relaxed) ? "failed after" : "took",
                          static_cast<double>(ended - began) / second * 1e6);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.seq.load(std::memory_order_acquire) == seq) found.emplace_back(seq, std::move(text));
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> result;
  for (auto& [seq, text] : found) result.push_back(std::move(text));
  return result;
}

}  // namespace maniple
