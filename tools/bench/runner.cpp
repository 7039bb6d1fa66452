#include "tools/bench/runner.h"

#include <unistd.h>

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/collective/algorithms.h"
#include <maniple/comm/options.h>

namespace maniple::bench {
namespace {

void check(const BenchRequest& request) {
  std::vector<std::string_view> known;
  for (const Op op : measured_operations()) known.push_back(to_string(op));
  for (const std::string& name : request.operations) {
    MANIPLE_REQUIRE(name != "recv" && name != "allocate", "{} is not measured by itself", name);
    MANIPLE_REQUIRE(std::find(known.begin(), known.end(), name) != known.end(),
                    "unknown operation \"{}\"; expected some of {}; or all, or ddp or gpu alone", name, joined(known));
  }
  MANIPLE_REQUIRE(request.busy >= 0 && request.busy <= kMaxRanks, "--busy is {}; expected 0 to {}", request.busy,
                  kMaxRanks);
  MANIPLE_REQUIRE(request.hosts >= 1, "--hosts is {}; expected 1 or more", request.hosts);
  for (const std::string& name : request.transports) {
    const TransportKind kind = parse_transport(name);
    const bool inside = kind == TransportKind::shm || kind == TransportKind::loopback;
    MANIPLE_REQUIRE(!inside || request.hosts == 1,
                    "transport {} does not leave a host, but there are {}; use auto or tcp", name, request.hosts);
  }
  for (const int ranks : request.ranks) {
    MANIPLE_REQUIRE(ranks >= 1 && ranks <= kMaxRanks, "--ranks holds {}; expected 1 to {}", ranks, kMaxRanks);
    MANIPLE_REQUIRE(ranks >= request.hosts, "{} ranks cannot be spread over {} hosts", ranks, request.hosts);
  }
  for (const std::string& name : request.dtypes) parse_dtype(name);
  for (const std::string& name : request.algorithms) require_algorithm(name);
  for (const std::string& name : request.buffers) {
    MANIPLE_REQUIRE(name == "registered" || name == "ordinary",
                    "--buffer is \"{}\"; expected registered, ordinary or both", name);
  }
  parse_reduce_op(request.reduce);
  MANIPLE_REQUIRE(request.link.empty() || request.hosts > 1,
                  "--link shapes the links between hosts; give --hosts as well");
}

std::vector<WorkItem> work_items_of(const BenchRequest& request, const std::string& op, int ranks,
                                    const std::string& dtype) {
  WorkItem base;
  base.op = op;
  base.dtype = dtype;
  base.reduce = request.reduce;
  base.ranks = ranks;
  base.bytes = request.sizes;
  if (op == "barrier") base.bytes = {1};
  base.iterations = request.iterations;
  base.warmup = request.warmup;
  base.budget_s = request.budget_s;
  base.rewrite = request.rewrite;
  base.timeout_s = request.timeout_s;
  std::vector<WorkItem> result;
  for (const std::string& transport : request.transports) {
    for (const std::string& buffer : request.buffers) {
      if (op == "barrier" && buffer != request.buffers.front()) continue;
      for (const std::string& algorithm : request.algorithms) {
        WorkItem item = base;
        item.transport = transport;
        item.buffer = op == "barrier" ? "ordinary" : buffer;
        item.algorithm = algorithm;
        result.push_back(item);
      }
    }
  }
  return result;
}

/// One entry of a turn.
struct Step {
  const System* system;
  WorkItem item;
};

/// A system without variants maps several requests to the same item (a peer lacks registered memory); measure it once.
bool contains(const std::vector<Step>& list, const System& system, const WorkItem& item) {
  return std::any_of(list.begin(), list.end(), [&](const Step& known) {
    return known.system == &system && to_json_text(known.item) == to_json_text(item);
  });
}

}  // namespace

std::vector<Block> plan_blocks(const BenchRequest& request) {
  check(request);
  std::vector<Block> blocks;
  for (const std::string& op : request.operations) {
    std::vector<int> rank_counts = request.ranks;
    if (op == "send") rank_counts = {2};  // a ping-pong between two ranks
    for (const int ranks : rank_counts) {
      for (const std::string& dtype : request.dtypes) {
        blocks.push_back({request.hosts, request.link, request.busy, request.repeat,
                          work_items_of(request, op, ranks, dtype), request.systems});
      }
    }
  }
  return blocks;
}

Runner::Runner(const SignalWatch& watch, std::function<void(const std::string&)> progress)
    : watch_(watch), progress_(std::move(progress)), testbed_(Testbed::here(scratch_)) {}

void Runner::add_warning(const std::string& text) {
  if (std::find(warnings_.begin(), warnings_.end(), text) == warnings_.end()) warnings_.push_back(text);
}

void Runner::use_hosts(int count, const std::string& rate) {
  const int now = network_ ? network_->hosts() : 1;
  if (now == count && rate_ == rate) return;
  testbed_.network = nullptr;
  network_.reset();
  rate_ = rate;
  if (count < 2) return;
  MANIPLE_REQUIRE(geteuid() == 0, "--hosts makes network namespaces, which needs root");
  network_.emplace(count, rate);
  testbed_.network = &*network_;
}

std::vector<Row> Runner::run_item(const System& system, const WorkItem& item, const Block& block,
                                  const std::string& progress, const std::function<void(const Row&)>& on_row) {
  if (progress_) progress_(progress);
  std::vector<Row> rows;
  const auto take = [&](std::string_view line) {
    if (auto row = parse_row_line(line)) {
      row->hosts = block.hosts;
      row->link = block.link;
      row->busy = block.busy;
      if (on_row) on_row(*row);
      rows.push_back(std::move(*row));
    }
  };
  // Simulate other load: processes that spin on any core.
  std::vector<Child> spinning;
  for (int i = 0; i < block.busy; ++i) {
    ChildSpec spec;
    spec.name = fmt::format("busy process {}", i);
    spec.argv = {testbed_.program, "bench-worker", "--spin"};
    spinning.emplace_back(spec);
  }
  run_process_set(system.processes(item, testbed_), take,
                  Deadline::after(std::chrono::duration<double>(item.timeout_s)), watch_);
  return rows;
}

std::vector<Row> Runner::run(const Block& block, const std::function<void(const Row&)>& on_row) {
  use_hosts(block.hosts, block.link);
  std::vector<Step> turn;
  for (const std::string& name : block.systems) {
    const System& system = system_named(name);
    if (const std::string missing = system.missing(testbed_); !missing.empty()) {
      add_warning("not installed, so not measured: " + missing);
      continue;
    }
    for (const WorkItem& requested : block.items) {
      for (const WorkItem& item : system.work_items(requested, testbed_)) {
        if (!contains(turn, system, item)) turn.push_back({&system, item});
      }
    }
  }

  std::map<std::pair<std::uint64_t, std::size_t>, std::vector<Row>> results;  // by (bytes, index in the turn)
  for (int repetition = 0; repetition < block.repeat; ++repetition) {
    for (std::size_t index = 0; index < turn.size(); ++index) {
      const auto& [system, item] = turn[index];
      const std::string what =
          fmt::format("{}, {} ranks: {} ({} of {})", item.op, item.ranks, system->name(), repetition + 1, block.repeat);
      try {
        for (Row& row : run_item(*system, item, block, what, on_row)) {
          const std::pair key(row.bytes, index);
          results[key].push_back(std::move(row));
        }
      } catch (const ProcessSetFailed& failure) {
        failed_ = failed_ || system->role() != Role::peer;
        add_warning(
            fmt::format("{} failed at {} with {} ranks: {}", system->name(), item.op, item.ranks, failure.what()));
      }
    }
  }
  std::vector<Row> rows;
  for (const auto& [key, repetitions] : results) rows.push_back(merge(repetitions));
  return rows;
}

std::vector<Row> Runner::core_limits(const std::vector<std::uint64_t>& sizes, double budget_s) {
  const System& limit = system_named("limit");
  if (const std::string missing = limit.missing(testbed_); !missing.empty()) {
    add_warning("not installed, so not measured: " + missing);
    return {};
  }
  WorkItem item;
  item.op = "limit";
  item.ranks = 1;
  item.bytes = sizes;
  item.budget_s = budget_s;
  return run_item(limit, item, Block{}, "one core: memcpy and add", {});
}

}  // namespace maniple::bench
