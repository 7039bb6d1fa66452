#include "comm/session/detector_wire.h"
#include "comm/session/peer_table.h"
#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"

namespace maniple::fuzz {

// What was understood must say the same when said again.
void control(std::string_view bytes) {
  constexpr std::size_t kLengthBytes = 4;
  tolerate([&] { require(encode(decode_control_message(bytes)).substr(kLengthBytes) == bytes); });
}

void peer_table(std::string_view bytes) {
  tolerate([&] { require(encode(decode_peer_table(bytes)) == bytes); });
}

std::vector<std::string> control_seeds() {
  using Kind = DetectorMessage::Kind;
  std::vector<std::string> seeds = {""};
  for (const Kind kind :
       {Kind::heartbeat, Kind::leaving, Kind::lost, Kind::abort, Kind::query_call, Kind::call_reply}) {
    DetectorMessage message{.kind = kind, .error = {}, .rank = 3, .seq = 12, .group = "world/1.0"};
    if (kind != Kind::abort) message.text = "why";
    if (kind == Kind::call_reply) message.place = "a.cpp:1";
    if (kind == Kind::abort) message.error = {.kind = ErrorKind::mismatch, .ranks = {3}, .reason = "why"};
    seeds.push_back(encode(message).substr(4));
  }
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
