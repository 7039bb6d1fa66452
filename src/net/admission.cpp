#include "net/admission.h"

#include <fmt/format.h>

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

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address) {
  if (there.job != here.job) {
    return {"another job", fmt::format("this is job \"{}\", not \"{}\"", here.job, there.job)};
  }
  if (there.generation < here.generation) {
    return {"stale generation",
            fmt::format("generation {} is superseded by generation {}", there.generation, here.generation)};
  }
  if (there.generation > here.generation) {
    return {"newer generation", fmt::format("generation {} is over, as generation {} is there: {} is a leftover of it",
                                            here.generation, there.generation, here_address.to_string())};
  }
  if (here.world_size >= 0 && there.world_size >= 0 && here.world_size != there.world_size) {
    return {"world size",
            fmt::format("world size is {} at {} but {} at {} (rank {})", here.world_size, here_address.to_string(),
                        there.world_size, there_address.to_string(), there.rank)};
  }
  const std::int32_t world_size = here.world_size >= 0 ? here.world_size : there.world_size;
  if (there.rank < -1 || (world_size >= 0 && there.rank >= world_size)) {
    return {"rank", fmt::format("rank {} of {} does not exist: expected 0 to {}", there.rank, there_address.to_string(),
                                world_size - 1)};
  }
  if (there.to >= 0 && here.rank >= 0 && there.to != here.rank) {
    return {"another rank",
            fmt::format("this is rank {}, not rank {}: something between the two processes leads to the wrong one",
                        here.rank, there.to)};
  }
  return {};
}

std::string_view describe_foreign_client(std::string_view first_bytes) noexcept {
  for (const Known& known : kKnown) {
    if (first_bytes.starts_with(known.prefix)) return known.what;
  }
  return "not a Maniple peer (wrong magic)";
}

}  // namespace maniple
