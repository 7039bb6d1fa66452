// The figures Maniple wants to reach, as a preset: `maniple bench figures` measures them all and says which were
// reached.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/campaign.h"
#include "bench/row.h"

namespace maniple::bench {

struct Goal {
  enum class Kind {
    time_at_most,        ///< our median / the rival's <= factor
    bandwidth_at_least,  ///< our bandwidth / the rival's >= factor
    wire_at_least,       ///< what the shaped link allows / our median >= factor
    extra_at_most_us,    ///< our median - the rival's <= factor, in microseconds
  };
  std::string text;
  Kind kind = Kind::bandwidth_at_least;
  double factor = 1;
  std::string rival;   ///< backend; empty for wire_at_least
  std::string buffer;  ///< our rows' buffer; empty: all kinds, the worst counts
  std::vector<int> ranks = {2};
  std::uint64_t from = 0, to = 0;  ///< bytes, both included
  int hosts = 1;
  std::string link;
};

struct Verdict {
  std::string text;
  bool measured = false;
  bool reached = false;
  double worst = 0;         ///< ratio, or microseconds
  std::uint64_t bytes = 0;  ///< where it was worst
  int ranks = 0;
};

const std::vector<Goal>& goals();
Verdict judge(const Goal& goal, const std::vector<Row>& rows);

/// The blocks that give all rows the goals need, less the systems that are not among `systems` (empty: all).
std::vector<Block> figure_blocks(const std::vector<std::string>& systems, int repeat, double budget_s);

/// Bytes a second of payload that a link of this rate ("1gbit", "100mbit") carries in TCP segments of an MTU of 1500.
double payload_rate(const std::string& link);

std::string verdict_line(const Goal& goal, const Verdict& verdict);

}  // namespace maniple::bench
