#include "net/stranger.h"

namespace maniple {
namespace {

struct Known {
  std::string_view prefix;
  std::string_view what;
};

constexpr std::string_view kHttp = "HTTP client on training port";
constexpr std::string_view kRedis = "Redis client on training port";

constexpr Known kKnown[] = {
    {"GET ", kHttp},
    {"POST ", kHttp},
    {"HEAD ", kHttp},
    {"PUT ", kHttp},
    {"DELETE ", kHttp},
    {"OPTIONS ", kHttp},
    {"CONNECT ", kHttp},
    {"PRI * HTTP", kHttp},
    {"HTTP/", "HTTP server's answer on training port"},
    {"\x16\x03", "TLS client on a training port that does not speak TLS"},
    {"SSH-", "SSH client on training port"},
    {"*1\r\n$", kRedis},
    {"*2\r\n$", kRedis},
    {"*3\r\n$", kRedis},
    {"PING", kRedis},
    {"AUTH ", kRedis},
    {"INFO", kRedis},
};

}  // namespace

std::string_view describe_stranger(std::string_view first_bytes) noexcept {
  for (const Known& known : kKnown) {
    if (first_bytes.starts_with(known.prefix)) return known.what;
  }
  return "not a Maniple peer (wrong magic)";
}

}  // namespace maniple
