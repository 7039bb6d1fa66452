#include "bench/campaign.h"

#include <algorithm>

#include "base/check.h"
#include "collective/selection.h"
#include <maniple/comm/options.h>

namespace maniple::bench {
namespace {

constexpr int kMostRanks = 256;

void check(const Wishes& wishes) {
  std::vector<std::string_view> known;
  for (const Op op : measured_operations()) known.push_back(to_string(op));
  for (const std::string& name : wishes.operations) {
    MANIPLE_REQUIRE(name != "recv" && name != "allocate", "{} is not measured by itself", name);
    MANIPLE_REQUIRE(std::find(known.begin(), known.end(), name) != known.end(),
                    "unknown operation \"{}\"; expected some of {}; or all, figures or ddp alone", name,
                    joined(known));
  }
  MANIPLE_REQUIRE(wishes.hosts >= 1, "--hosts is {}; expected 1 or more", wishes.hosts);
  for (const std::string& name : wishes.transports) {
    const TransportKind kind = parse_transport(name);
    const bool inside = kind == TransportKind::shm || kind == TransportKind::loopback;
    MANIPLE_REQUIRE(!inside || wishes.hosts == 1, "transport {} does not leave a host, but there are {}; use auto or tcp",
                    name, wishes.hosts);
  }
  for (const int ranks : wishes.ranks) {
    MANIPLE_REQUIRE(ranks >= 1 && ranks <= kMostRanks, "--ranks holds {}; expected 1 to {}", ranks, kMostRanks);
    MANIPLE_REQUIRE(ranks >= wishes.hosts, "{} ranks cannot be spread over {} hosts", ranks, wishes.hosts);
  }
  for (const std::string& name : wishes.dtypes) parse_dtype(name);
  for (const std::string& name : wishes.algorithms) require_algorithm(name);
  for (const std::string& name : wishes.buffers) {
    MANIPLE_REQUIRE(name == "registered" || name == "ordinary",
                    "--buffer is \"{}\"; expected registered, ordinary or both", name);
  }
  parse_reduce_op(wishes.reduce);
  MANIPLE_REQUIRE(wishes.link.empty() || wishes.hosts > 1,
                  "--link shapes the links between hosts; give --hosts as well");
}

std::vector<Order> orders_of(const Wishes& wishes, const std::string& op, int ranks, const std::string& dtype) {
  Order base;
  base.op = op;
  base.dtype = dtype;
  base.reduce = wishes.reduce;
  base.ranks = ranks;
  base.bytes = wishes.sizes;
  if (op == "barrier") base.bytes = {1};
  base.iterations = wishes.iterations;
  base.warmup = wishes.warmup;
  base.budget_s = wishes.budget_s;
  base.timeout_s = wishes.timeout_s;
  std::vector<Order> result;
  for (const std::string& transport : wishes.transports) {
    for (const std::string& buffer : wishes.buffers) {
      if (op == "barrier" && buffer != wishes.buffers.front()) continue;
      for (const std::string& algorithm : wishes.algorithms) {
        Order order = base;
        order.transport = transport;
        order.buffer = op == "barrier" ? "ordinary" : buffer;
        order.algorithm = algorithm;
        result.push_back(order);
      }
    }
  }
  return result;
}

}  // namespace

std::vector<Block> plan(const Wishes& wishes) {
  check(wishes);
  std::vector<Block> blocks;
  for (const std::string& op : wishes.operations) {
    std::vector<int> rank_counts = wishes.ranks;
    if (op == "send") rank_counts = {2};  // a ping-pong; others would only watch
    for (const int ranks : rank_counts) {
      for (const std::string& dtype : wishes.dtypes) {
        blocks.push_back(
            {wishes.hosts, wishes.link, wishes.repeat, orders_of(wishes, op, ranks, dtype), wishes.systems});
      }
    }
  }
  return blocks;
}

}  // namespace maniple::bench
