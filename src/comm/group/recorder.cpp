#include "comm/group/recorder.h"

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

std::optional<Recorder::Read> Recorder::read(const Entry& entry) noexcept {
  const auto get = [](const auto& word) { return word.load(std::memory_order_relaxed); };
  const std::uint64_t line_and_sum = get(entry.line_and_sum);
  const Contents contents{{get(entry.seq), get(entry.words[0]), get(entry.words[1]), get(entry.words[2])},
                          get(entry.file),
                          static_cast<std::uint32_t>(line_and_sum >> 32),
                          get(entry.began)};
  const std::uint64_t ended = get(entry.ended);
  if (contents.signature.seq == 0 || contents.sum() != static_cast<std::uint32_t>(line_and_sum)) return std::nullopt;
  return Read{contents, ended >> 1 >= contents.began ? ended : 0};
}

RankCall Recorder::call_of(const Contents& contents) {
  // A call without a place is internal: the barrier of init().
  return {.call = contents.signature.describe(), .place = place_text(contents.file, contents.line)};
}

std::string Recorder::describe(const Contents& contents) {
  const RankCall call = call_of(contents);
  return call_at(call.call, call.place);
}

RankCall Recorder::called(std::uint64_t seq) const {
  if (mask_ == 0 || seq == 0) return {};
  const auto found = read(entries_[seq & mask_]);
  return found && found->contents.signature.seq == seq ? call_of(found->contents) : RankCall();
}

CallProgress Recorder::last() const {
  std::optional<Read> latest;
  for (std::uint64_t i = 0; mask_ != 0 && i <= mask_; ++i) {
    const auto found = read(entries_[i]);
    if (found && (!latest || found->contents.signature.seq > latest->contents.signature.seq)) latest = found;
  }
  CallProgress last;
  if (!latest) return last;
  const std::uint64_t now = ticks();
  const std::uint64_t when = latest->ended != 0 ? latest->ended >> 1 : latest->contents.began;
  last.seq = latest->contents.signature.seq;
  last.running = latest->ended == 0;
  last.seconds = static_cast<double>(now - std::min(now, when)) / ticks_per_second();
  last.call = describe(latest->contents);
  return last;
}

std::vector<std::string> Recorder::lines() const {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  const std::uint64_t now = ticks();
  const double second = ticks_per_second();
  for (std::uint64_t i = 0; mask_ != 0 && i <= mask_; ++i) {
    const auto entry = read(entries_[i]);
    if (!entry) continue;
    const std::uint64_t began = entry->contents.began;
    std::string text = fmt::format("{}, began {:.3f} s ago, ", describe(entry->contents),
                                   static_cast<double>(now - std::min(now, began)) / second);
    if (entry->ended == 0) {
      text += "still running";
    } else {
      text += fmt::format("{} {:.1f} us", (entry->ended & 1) != 0 ? "failed after" : "took",
                          static_cast<double>((entry->ended >> 1) - began) / second * 1e6);
    }
    found.emplace_back(entry->contents.signature.seq, std::move(text));
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> result;
  for (auto& [seq, text] : found) result.push_back(std::move(text));
  return result;
}

}  // namespace maniple
