// What a measuring process is told: one operation at several sizes. It travels as one JSON argument, so that our own
// workers, the peers' programs and the limit programs all read it the same way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/case.h"

namespace maniple::bench {

struct Order {
  std::string op = "all_reduce";
  std::string dtype = "float32";
  std::string reduce = "sum";
  int ranks = 2;
  std::vector<std::uint64_t> bytes;

  std::string backend = "native";   ///< name of the measured system, copied into the rows
  std::string transport = "auto";   ///< asked for; rows hold what was used
  std::string buffer = "ordinary";  ///< or "registered"
  std::string algorithm;            ///< empty: the system's own choice

  int iterations = 0;      ///< 0: as many as fit into the budget
  int warmup = -1;         ///< -1: by time
  double budget_s = 0.25;  ///< timed calls of one row
  double timeout_s = 300;  ///< for the whole order

  Case case_of(std::uint64_t size) const;
  std::vector<Case> cases() const;  ///< without sizes that round to the same buffer
};

std::string to_json_text(const Order& order);
Order parse_order(const std::string& json_text);  ///< throws InvalidArgument

}  // namespace maniple::bench
