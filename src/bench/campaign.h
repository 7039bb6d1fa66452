// What one run of `maniple bench` is to measure, and in which order.
//
// A block is one (operation, ranks, dtype, hosts): its systems are measured in turn, the whole turn is repeated, and
// the median over repetitions counts, so that a slow minute of the machine does not fall on one system alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/order.h"

namespace maniple::bench {

struct Wishes {
  std::vector<std::string> operations;
  std::vector<int> ranks = {2};
  std::vector<std::uint64_t> sizes;
  std::vector<std::string> dtypes = {"float32"};
  std::string reduce = "sum";
  std::vector<std::string> buffers = {"registered", "ordinary"};
  std::vector<std::string> transports = {"auto"};
  std::vector<std::string> algorithms = {""};
  int iterations = 0;
  int warmup = -1;
  double budget_s = 0.25;
  double timeout_s = 300;
  int hosts = 1;
  std::string link;
  std::vector<std::string> systems = {"native", "limit"};  ///< names, in the order of a turn
  int repeat = 1;
};

struct Block {
  int hosts = 1;
  std::string link;
  int repeat = 1;
  std::vector<Order> wanted;         ///< one for each transport, buffer and algorithm
  std::vector<std::string> systems;  ///< in the order of the turn
};

/// Checks every name and number (InvalidArgument) and lays out the blocks.
std::vector<Block> plan(const Wishes& wishes);

}  // namespace maniple::bench
