// Ranks that called different things tell each other where, and all throw the same list.
//
// Every rank sees all posts, so every rank gets here; one more meeting carries the call sites. It has a short limit of its
// own: a rank that does not come (it died, or it does not compare) leaves only its call without the place.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "collective/shm/arena_call.h"
#include "call/signature.h"

namespace maniple {

void arena_mismatch(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  Arena& arena = call.arena;
  std::vector<Signature> calls;
  for (int r = 0; r < call.size(); ++r) {
    const auto& words = arena.post(r, epoch).words;
    calls.push_back({words[0], words[1], words[2], words[3]});
  }
  const std::uint32_t second = arena.next_epoch();
  Post& mine = arena.post(call.rank(), second);
  const std::string place = fmt::format("{}:{}", op.where.file_name(), op.where.line());
  mine.mode = static_cast<std::uint32_t>(std::min(place.size(), Post::kPayload));
  std::memcpy(mine.payload, place.data(), mine.mode);
  arena.publish(second);

  std::string text = "ranks called different things:";
  OperationContext short_patience(std::chrono::milliseconds(500));
  for (int r = 0; r < call.size(); ++r) {
    std::string where;
    try {
      if (r != call.rank()) arena.await(arena.post(r, second).stamp, second, r, short_patience);
      const Post& theirs = arena.post(r, second);
      where.assign(reinterpret_cast<const char*>(theirs.payload), std::min<std::size_t>(theirs.mode, Post::kPayload));
    } catch (const Error&) {
      where = "an unknown place";
    }
    text += fmt::format("{} rank {}: {} at {}", r == 0 ? "" : ";", r, calls[static_cast<std::size_t>(r)].describe(), where);
  }
  throw Mismatch(text);
}

}  // namespace maniple
