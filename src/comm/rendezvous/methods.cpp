#include "comm/rendezvous/methods.h"

#include <charconv>

#include <fmt/format.h>

#include "comm/base/check.h"

namespace maniple {
namespace {

constexpr std::string_view kForms = "env://, tcp://host:port or file:///path";

int parse_number(std::string_view digits, int low, int high, std::string_view name, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  MANIPLE_REQUIRE(error == std::errc() && end == digits.data() + digits.size() && value >= low && value <= high,
                  "init method \"{}\": {} is \"{}\"; expected a whole number from {} to {}", text, name, digits, low,
                  high);
  return value;
}

void parse_parameter(std::string_view parameter, std::string_view text, InitMethod& method) {
  const auto equals = parameter.find('=');
  const std::string_view name = parameter.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? "" : parameter.substr(equals + 1);
  if (name == "rank") {
    method.rank = parse_number(value, 0, kMaxWorldSize - 1, name, text);
  } else if (name == "world_size") {
    method.world_size = parse_number(value, 1, kMaxWorldSize, name, text);
  } else {
    throw InvalidArgument(
        fmt::format("init method \"{}\": unknown parameter \"{}\"; expected rank or world_size", text, name));
  }
}

}  // namespace

InitMethod parse_init_method(std::string_view text) {
  const auto colon = text.find("://");
  MANIPLE_REQUIRE(colon != std::string_view::npos, "init method \"{}\" has no scheme; expected {}", text, kForms);
  InitMethod method;
  method.scheme = text.substr(0, colon);
  MANIPLE_REQUIRE(method.scheme == "env" || method.scheme == "tcp" || method.scheme == "file",
                  "init method \"{}\": unknown scheme \"{}\"; expected {}", text, method.scheme, kForms);
  std::string_view rest = text.substr(colon + 3);
  const auto question = rest.find('?');
  method.place = rest.substr(0, question);
  if (question == std::string_view::npos) return method;
  rest.remove_prefix(question + 1);
  while (!rest.empty()) {
    const auto end = rest.find('&');
    parse_parameter(rest.substr(0, end), text, method);
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
  }
  return method;
}

HostPort parse_host_port(std::string_view place, std::string_view text) {
  const auto colon = place.rfind(':');
  MANIPLE_REQUIRE(colon != std::string_view::npos && colon > 0, "init method \"{}\": \"{}\" is not host:port", text,
                  place);
  std::string_view host = place.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else {
    MANIPLE_REQUIRE(host.find(':') == std::string_view::npos,
                    "init method \"{}\": an IPv6 address needs brackets, as in [::1]:29500", text);
  }
  const int port = parse_number(place.substr(colon + 1), 1, 65535, "the port", text);
  return {std::string(host), static_cast<std::uint16_t>(port)};
}

std::optional<int> agreed(const Source& a, const Source& b) {
  if (!a.value) return b.value;
  if (!b.value) return a.value;
  MANIPLE_REQUIRE(*a.value == *b.value, "{} is {} but {} is {}; give one of them, or the same twice", a.name, *a.value,
                  b.name, *b.value);
  return a.value;
}

void require_rank_in_world(int rank, std::string_view rank_name, int world_size, std::string_view world_size_name) {
  MANIPLE_REQUIRE(world_size >= 1 && world_size <= kMaxWorldSize, "{} is {}; expected 1 to {}", world_size_name,
                  world_size, kMaxWorldSize);
  MANIPLE_REQUIRE(rank >= 0 && rank < world_size, "{} is {} but {} is {}; expected a rank from 0 to {}", rank_name,
                  rank, world_size_name, world_size, world_size - 1);
}

}  // namespace maniple
