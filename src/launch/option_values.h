// Parses the values of the launcher's options: hosts, addresses, assignments, numbers. Pure. Every function throws
// InvalidArgument with one line that names the option (`option`: as typed), its value and what was expected.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace maniple::launch {

/// A host and how many processes it takes.
struct HostSlots {
  std::string host;
  int slots = 0;  ///< 0: not given
  friend bool operator==(const HostSlots&, const HostSlots&) = default;
};

/// "a:4,b:4" or "a,b". An IPv6 address with a number needs brackets: "[fd00::1]:4".
std::vector<HostSlots> parse_hosts(std::string_view text);

/// One line per host: "a:4", "a 4", "a slots=4" or "a"; # starts a comment. `name` is used in messages.
std::vector<HostSlots> parse_hostfile(std::string_view text, std::string_view name);

/// Reads and parses the file.
std::vector<HostSlots> read_hostfile(const std::string& path);

struct MasterAddress {
  std::string host;
  std::uint16_t port = 0;
  friend bool operator==(const MasterAddress&, const MasterAddress&) = default;
};
/// "host:port" or "host" (port 29500, PyTorch's default).
MasterAddress parse_master(std::string_view text, std::string_view option = "--master");
/// "10.0.0.1:29500", "[::1]:29500"
std::string to_string(const MasterAddress& place);

/// Processes per node: a number, "gpu", "cpu", or "auto" (the number of GPUs, or of cores if there are no GPUs).
int parse_process_count(std::string_view text, int gpus, int cores, std::string_view option = "-n");

/// "NAME=VALUE", or "NAME" for the value in the launcher's own environment; ignored if it is not set there.
struct Assignment {
  std::string name;
  std::string value;
  bool inherit = false;
  friend bool operator==(const Assignment&, const Assignment&) = default;
};
Assignment parse_assignment(std::string_view text);

inline constexpr std::uint16_t kDefaultMasterPort = 29500;

}  // namespace maniple::launch
