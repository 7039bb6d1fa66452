#include "comm/session/detector_message.h"
#include "comm/session/peer_table.h"
#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"

namespace maniple::fuzz {

// What was understood must say the same when said again.
void control(std::string_view bytes) {
  constexpr std::size_t kLengthBytes = 4;
  tolerate([&] { require(detector::encode(detector::decode(bytes)).substr(kLengthBytes) == bytes); });
}

void peer_table(std::string_view bytes) {
  tolerate([&] { require(encode(decode_peer_table(bytes)) == bytes); });
}

std::vector<std::string> control_seeds() {
  using namespace detector;
  const std::vector<Message> messages = {
      Heartbeat{},
      Leaving{},
      Lost{.rank = 3, .text = "why"},
      Abort{.rank = 3,
            .seq = 12,
            .group = "world/1.0",
            .error = {.kind = ErrorKind::mismatch, .ranks = {3}, .reason = "why"}},
      QueryCall{.seq = 12, .group = "world"},
      CallReply{.rank = 3, .seq = 12, .group = "world", .call = "barrier #12", .place = "a.cpp:1"},
      Left{3},
      Gone{3},
      Waiting{.rank = 3, .seq = 12, .group = "world", .call = "barrier #12", .waited_ms = 10'000, .members = {0, 3}},
      QueryProgress{.group = "world"},
      ProgressReply{.rank = 3, .seq = 12, .group = "world", .text = "it is in barrier #12"},
      Departed{.rank = 3, .seq = 12, .group = "world"},
      Compare{.rank = 3, .seq = 12, .group = "world"},
      CallPending{.rank = 3, .seq = 12, .group = "world"},
      QueryAlive{},
      Alive{},
      Shrink{.rank = 3, .seq = 1, .group = "world", .made = true, .members = {0, 3}},
      Survivors{.seq = 1, .group = "world", .confirmed = true, .members = {0, 3}},
      CancelShrink{.rank = 3, .group = "world"},
      Missing{.group = "world", .members = {0, 3}}};
  std::vector<std::string> seeds = {""};
  for (const Message& message : messages) seeds.push_back(detector::encode(message).substr(4));
  return seeds;
}

std::vector<std::string> peer_table_seeds() {
  const PeerInfo peer{.host_key = "boot+net",
                      .host_name = "node7",
                      .pid = 4711,
                      .process = 42,
                      .unix_address = "unix:@m",
                      .tcp_address = "10.0.0.1:80",
                      .cores = CoreSet::of({0, 1, 70})};
  return {encode(PeerTable{.world_id = 1, .peers = {}}), encode(PeerTable{.world_id = 2, .peers = {peer}}),
          encode(PeerTable{.world_id = 3, .peers = {peer, {}, peer}})};
}

}  // namespace maniple::fuzz
