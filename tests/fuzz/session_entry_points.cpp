#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "session/detector_wire.h"
#include "session/peer_table.h"

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
  for (const Kind kind : {Kind::heartbeat, Kind::bye, Kind::lost, Kind::abort, Kind::question, Kind::answer}) {
    seeds.push_back(
        encode({.kind = kind, .error = ErrorKind::mismatch, .rank = 3, .seq = 12, .group = "world/1.0", .text = "why"})
            .substr(4));
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
