#include "launch/option_values.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"
#include "launch/placement/rank_plan.h"

namespace maniple::launch {
namespace {

constexpr std::string_view kBlanks = " \t\r\v\f";
constexpr std::size_t kMaxHostBytes = 255;
constexpr off_t kMaxHostfileBytes = 4 << 20;

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::optional<int> number(std::string_view text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) return std::nullopt;
  return value;
}

// ssh would read a host that starts with a dash as an option.
bool is_host(std::string_view text) {
  if (text.empty() || text.size() > kMaxHostBytes || text.front() == '-') return false;
  return std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
           c == '_' || c == ':' || c == '%' || c == '@';
  });
}

/// The parts of "host:rest" or "[v6]:rest".
struct Parts {
  std::string_view host;
  std::string_view rest;
  bool has_rest = false;
};
std::optional<Parts> split_host(std::string_view text) {
  Parts parts;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    if (close == std::string_view::npos) return std::nullopt;
    parts.host = text.substr(1, close - 1);
    const std::string_view after = text.substr(close + 1);
    if (!after.empty() && after.front() != ':') return std::nullopt;
    parts.has_rest = !after.empty();
    if (parts.has_rest) parts.rest = after.substr(1);
  } else if (text.find(':') != text.rfind(':')) {
    parts.host = text;  // an IPv6 address without a number, which would need brackets
  } else {
    const auto colon = text.find(':');
    parts.host = text.substr(0, colon);
    parts.has_rest = colon != std::string_view::npos;
    if (parts.has_rest) parts.rest = text.substr(colon + 1);
  }
  if (!is_host(parts.host)) return std::nullopt;
  return parts;
}

std::optional<HostSlots> host_of(std::string_view text) {
  const auto parts = split_host(text);
  if (!parts) return std::nullopt;
  HostSlots host{.host = std::string(parts->host)};
  if (parts->has_rest) {
    const auto slots = number(parts->rest, 1, kMaxProcessesPerNode);
    if (!slots) return std::nullopt;
    host.slots = *slots;
  }
  return host;
}

void add_host(std::vector<HostSlots>& hosts, HostSlots host, std::string_view where) {
  for (const HostSlots& other : hosts) {
    MANIPLE_REQUIRE(other.host != host.host, "{} names host {} twice; give the number of its processes once: {}:N",
                    where, host.host, host.host);
  }
  MANIPLE_REQUIRE(hosts.size() < std::size_t{kMaxNodes}, "{} names more than {} hosts", where, kMaxNodes);
  hosts.push_back(std::move(host));
}

}  // namespace

std::vector<HostSlots> parse_hosts(std::string_view text) {
  std::vector<HostSlots> hosts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const std::string_view word = trimmed(text.substr(begin, end - begin));
    auto host = host_of(word);
    MANIPLE_REQUIRE(host.has_value(),
                    "--hosts: \"{}\" is not a host; expected NAME or NAME:PROCESSES, separated by commas", word);
    add_host(hosts, std::move(*host), "--hosts");
    begin = end + 1;
  }
  return hosts;
}

std::vector<HostSlots> parse_hostfile(std::string_view text, std::string_view name) {
  std::vector<HostSlots> hosts;
  int line_number = 0;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    const auto blank = std::min(line.find_first_of(kBlanks), line.size());
    std::string_view count = trimmed(line.substr(blank));
    auto host = host_of(line.substr(0, blank));
    if (host && !count.empty()) {
      if (count.starts_with("slots=")) count.remove_prefix(6);
      const auto slots = number(count, 1, kMaxProcessesPerNode);
      if (!slots || host->slots != 0) host.reset();
      if (host) host->slots = *slots;
    }
    MANIPLE_REQUIRE(host.has_value(), "{}:{}: \"{}\" is not a host; expected NAME, NAME:4, NAME 4 or NAME slots=4",
                    name, line_number, line);
    add_host(hosts, std::move(*host), name);
  }
  MANIPLE_REQUIRE(!hosts.empty(), "{} names no host", name);
  return hosts;
}

std::vector<HostSlots> read_hostfile(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  MANIPLE_REQUIRE(static_cast<bool>(file), "--hostfile {}: {}", path, errno_text(errno));
  struct stat status{};
  MANIPLE_REQUIRE(::fstat(file.get(), &status) == 0 && !S_ISDIR(status.st_mode), "--hostfile {} is not a file", path);
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t got = ::read(file.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    MANIPLE_REQUIRE(got >= 0, "--hostfile {}: {}", path, errno_text(errno));
    if (got == 0) break;
    text.append(buffer, static_cast<std::size_t>(got));
    MANIPLE_REQUIRE(text.size() <= std::size_t{kMaxHostfileBytes}, "--hostfile {} is larger than {} bytes", path,
                    static_cast<long>(kMaxHostfileBytes));
  }
  return parse_hostfile(text, path);
}

MasterAddress parse_master(std::string_view text, std::string_view option) {
  const auto parts = split_host(text);
  MANIPLE_REQUIRE(!parts || text.starts_with('[') || parts->host.find(':') == std::string_view::npos,
                  "{} is \"{}\"; an IPv6 address stands in brackets, as in [fd00::1]:29500", option, text);
  const auto port = parts && parts->has_rest ? number(parts->rest, 0, 65535) : std::optional<int>(kDefaultMasterPort);
  MANIPLE_REQUIRE(parts && port, "{} is \"{}\"; expected HOST:PORT, as in 10.0.0.1:29500", option, text);
  return {.host = std::string(parts->host), .port = static_cast<std::uint16_t>(*port)};
}

std::string to_string(const MasterAddress& place) {
  const bool bare_v6 = place.host.find(':') != std::string::npos;
  return bare_v6 ? fmt::format("[{}]:{}", place.host, place.port) : fmt::format("{}:{}", place.host, place.port);
}

int parse_process_count(std::string_view text, int gpus, int cores, std::string_view option) {
  if (text == "gpu") {
    MANIPLE_REQUIRE(gpus > 0, "{} is \"gpu\"; there is no GPU on this host", option);
    return gpus;
  }
  if (text == "cpu") return cores;
  if (text == "auto") return gpus > 0 ? gpus : cores;
  const auto count = number(text, 1, kMaxProcessesPerNode);
  // `maniple run -n ./train`: the program was parsed as the number.
  const bool word = !text.empty() && text.find_first_of("0123456789-=") != 0;
  MANIPLE_REQUIRE(count.has_value(), "{} is \"{}\"; expected a number of processes from 1 to {}, auto, gpu or cpu{}",
                  option, text, kMaxProcessesPerNode,
                  word ? fmt::format("; if that is the program, the number is missing: {} 2 {}", option, text) : "");
  return *count;
}

Assignment parse_assignment(std::string_view text) {
  const auto equals = text.find('=');
  Assignment result{
      .name = std::string(text.substr(0, equals)), .value = {}, .inherit = equals == std::string_view::npos};
  if (!result.inherit) result.value = text.substr(equals + 1);
  MANIPLE_REQUIRE(!result.name.empty() && text.find('\0') == std::string_view::npos,
                  "--env \"{}\": expected NAME=VALUE or NAME", text);
  return result;
}

}  // namespace maniple::launch
