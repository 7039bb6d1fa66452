// The parts of an init method: "tcp://host:port?rank=1&world_size=4". Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace maniple {

struct InitMethod {
  std::string scheme;  ///< "env", "tcp", "file"
  std::string place;   ///< what stands between "://" and "?"
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Throws InvalidArgument naming the part that is wrong, what it holds and what was expected.
InitMethod parse_init_method(std::string_view text);

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// "host:port" or "[::1]:port"; `text` is only for the message.
HostPort parse_host_port(std::string_view place, std::string_view text);

/// The one value of two sources that may both be silent (nullopt). Throws InvalidArgument naming both if they differ.
struct Source {
  std::string_view name;
  std::optional<int> value;
};
std::optional<int> agreed(const Source& a, const Source& b);

/// Checks 0 <= rank < world_size; the names say where the two came from.
void require_rank_in_world(int rank, std::string_view rank_name, int world_size, std::string_view world_size_name);

inline constexpr int kMaxWorldSize = 1 << 20;

}  // namespace maniple
