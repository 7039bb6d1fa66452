#include "bench/goals.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "base/check.h"
#include "bench/case.h"
#include "bench/sizes.h"

namespace maniple::bench {
namespace {

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;

bool is_ours(const Goal& goal, const Row& row) {
  return row.backend == "native" && row.op == "all_reduce" && row.error.empty() && row.hosts == goal.hosts &&
         row.link == goal.link && row.bytes >= goal.from && row.bytes <= goal.to &&
         (goal.buffer.empty() || row.buffer == goal.buffer) &&
         std::find(goal.ranks.begin(), goal.ranks.end(), row.ranks) != goal.ranks.end();
}

/// Limits and our own variants are compared buffer by buffer; peers have one kind only.
const Row* rival_of(const Goal& goal, const Row& ours, const std::vector<Row>& rows) {
  const bool same_buffer = goal.rival == "limit" || goal.rival == "bare";
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
    return row.backend == goal.rival && row.op == ours.op && row.error.empty() && row.ranks == ours.ranks &&
           row.bytes == ours.bytes && row.hosts == ours.hosts && row.link == ours.link &&
           (!same_buffer || row.buffer == ours.buffer);
  });
  return found == rows.end() ? nullptr : &*found;
}

double figure(const Goal& goal, const Row& ours, const Row* rival) {
  switch (goal.kind) {
    case Goal::Kind::time_at_most: return ours.median_us / rival->median_us;
    case Goal::Kind::bandwidth_at_least: return rival->median_us / ours.median_us;
    case Goal::Kind::extra_at_most_us: return ours.median_us - rival->median_us;
    case Goal::Kind::wire_at_least: break;
  }
  const double carried = static_cast<double>(ours.bytes) * bus_factor(Op::all_reduce, ours.hosts);
  return carried / payload_rate(goal.link) / (ours.median_us * 1e-6);
}

bool at_most(const Goal& goal) {
  return goal.kind == Goal::Kind::time_at_most || goal.kind == Goal::Kind::extra_at_most_us;
}

}  // namespace

double payload_rate(const std::string& link) {
  double value = 0;
  const char* const last = link.data() + link.size();
  const auto [end, error] = std::from_chars(link.data(), last, value);
  const std::string unit(end, last);
  const double bits = unit == "gbit" ? 1e9 : unit == "mbit" ? 1e6 : unit == "kbit" ? 1e3 : 0;
  MANIPLE_REQUIRE(error == std::errc() && bits > 0 && value > 0,
                  "\"{}\" is not a rate; expected for instance 1gbit or 100mbit", link);
  constexpr double kPayload = 1448, kFrame = 1514;  // of a full segment; the shaper counts the Ethernet header
  return value * bits / 8 * kPayload / kFrame;
}

const std::vector<Goal>& goals() {
  using Kind = Goal::Kind;
  static const std::vector<Goal> all = {
      {"2 ranks, 4 B to 1 KiB: time against Open MPI", Kind::time_at_most, 1.5, "openmpi", "", {2}, 4, KiB, 1, ""},
      {"2 ranks, 64 KiB to 256 MiB, registered: bandwidth against Open MPI",
       Kind::bandwidth_at_least,
       5,
       "openmpi",
       "registered",
       {2},
       64 * KiB,
       256 * MiB,
       1,
       ""},
      {"2 ranks, 64 KiB to 256 MiB, registered: bandwidth against the limit",
       Kind::bandwidth_at_least,
       0.7,
       "limit",
       "registered",
       {2},
       64 * KiB,
       256 * MiB,
       1,
       ""},
      {"2 ranks, 1 MiB to 256 MiB, ordinary: bandwidth against Open MPI",
       Kind::bandwidth_at_least,
       1.8,
       "openmpi",
       "ordinary",
       {2},
       MiB,
       256 * MiB,
       1,
       ""},
      {"4 ranks, 1 MiB to 256 MiB, registered: bandwidth against Open MPI",
       Kind::bandwidth_at_least,
       4,
       "openmpi",
       "registered",
       {4},
       MiB,
       256 * MiB,
       1,
       ""},
      {"4 and 8 ranks, 4 B: time against Open MPI", Kind::time_at_most, 2, "openmpi", "", {4, 8}, 4, 4, 1, ""},
      {"2 hosts, 1 MiB to 64 MiB: bandwidth against Open MPI over TCP",
       Kind::bandwidth_at_least,
       1,
       "openmpi",
       "",
       {2},
       MiB,
       64 * MiB,
       2,
       ""},
      {"2 hosts, 1 MiB to 64 MiB: bandwidth against Gloo",
       Kind::bandwidth_at_least,
       1.3,
       "gloo",
       "",
       {2},
       MiB,
       64 * MiB,
       2,
       ""},
      {"2 hosts, links of 1 Gbit/s, 64 MiB: part of what the wire allows",
       Kind::wire_at_least,
       0.93,
       "",
       "",
       {2},
       64 * MiB,
       64 * MiB,
       2,
       "1gbit"},
      {"checks, recorder and watchdog at 64 KiB: time against without",
       Kind::time_at_most,
       1.01,
       "bare",
       "registered",
       {2},
       64 * KiB,
       64 * KiB,
       1,
       ""},
      {"checks, recorder and watchdog at 4 B: time above without",
       Kind::extra_at_most_us,
       0.06,
       "bare",
       "registered",
       {2},
       4,
       4,
       1,
       ""},
  };
  return all;
}

Verdict judge(const Goal& goal, const std::vector<Row>& rows) {
  Verdict verdict;
  verdict.text = goal.text;
  for (const Row& row : rows) {
    if (!is_ours(goal, row)) continue;
    // The first row is of the block that measures just this, many times over.
    if (goal.rival == "bare" && verdict.measured && row.bytes == verdict.bytes) continue;
    const Row* rival = rival_of(goal, row, rows);
    if (rival == nullptr && goal.kind != Goal::Kind::wire_at_least) continue;
    const double value = figure(goal, row, rival);
    if (verdict.measured && (at_most(goal) ? value <= verdict.worst : value >= verdict.worst)) continue;
    verdict.measured = true;
    verdict.worst = value;
    verdict.bytes = row.bytes;
    verdict.ranks = row.ranks;
  }
  verdict.reached = verdict.measured && (at_most(goal) ? verdict.worst <= goal.factor : verdict.worst >= goal.factor);
  return verdict;
}

std::vector<Block> figure_blocks(const std::vector<std::string>& systems, int repeat, double budget_s) {
  std::vector<Block> blocks;
  const auto add = [&](Wishes wishes, const std::vector<std::string>& rivals, int times = 1) {
    wishes.operations = {"all_reduce"};
    wishes.budget_s = budget_s;
    wishes.repeat = std::max(repeat, times);
    wishes.systems.clear();
    for (const std::string& name : rivals) {
      if (systems.empty() || std::find(systems.begin(), systems.end(), name) != systems.end())
        wishes.systems.push_back(name);
    }
    for (Block& block : plan(wishes)) blocks.push_back(std::move(block));
  };
  const auto sizes = [](const char* text) { return parse_sizes(text); };
  Wishes wishes;
  // Where the pages of a run happen to lie moves a small operation by a tenth of a microsecond: many runs find the difference.
  wishes.sizes = sizes("4,64K");
  wishes.buffers = {"registered"};
  add(wishes, {"native", "bare"}, 21);
  wishes.buffers = Wishes().buffers;
  wishes.sizes = sizes("4,64,1K");
  add(wishes, {"native", "limit", "openmpi", "mpich", "gloo"});
  wishes.sizes = sizes("64K,256K,1M,16M,64M,256M");
  add(wishes, {"native", "limit", "openmpi", "mpich", "gloo"});
  wishes.ranks = {4};
  wishes.sizes = sizes("4,64K,1M,16M,64M,256M");
  add(wishes, {"native", "limit", "openmpi", "gloo"});
  wishes.ranks = {8};
  wishes.sizes = sizes("4,1M");
  add(wishes, {"native", "limit", "openmpi", "gloo"});
  wishes.ranks = {2};
  wishes.hosts = 2;
  wishes.sizes = sizes("4,1M,4M,16M,64M");
  add(wishes, {"native", "openmpi", "mpich", "gloo"});
  wishes.link = "1gbit";
  wishes.sizes = sizes("64M");
  add(wishes, {"native", "openmpi", "gloo"});
  return blocks;
}

std::string verdict_line(const Goal& goal, const Verdict& verdict) {
  const bool microseconds = goal.kind == Goal::Kind::extra_at_most_us;
  const std::string wanted =
      fmt::format("{} {:g}{}", at_most(goal) ? "at most" : "at least", goal.factor, microseconds ? " us" : "");
  if (!verdict.measured) return fmt::format("not measured  {:<70} {}", verdict.text, wanted);
  return fmt::format("{:<12}  {:<70} {:>6}{} ({}; worst: {}, {} ranks)", verdict.reached ? "reached" : "MISSED",
                     verdict.text, fmt::format("{:.2f}", verdict.worst), microseconds ? " us" : "", wanted,
                     format_bytes(verdict.bytes), verdict.ranks);
}

}  // namespace maniple::bench
