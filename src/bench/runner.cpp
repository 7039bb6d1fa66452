#include "bench/runner.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "bench/process_set.h"

namespace maniple::bench {
namespace {

struct Assignment {
  const System* system;
  Order order;
};

/// Systems without variants answer the same order to several wishes (a peer knows no registered memory): once is
/// enough.
bool already_there(const std::vector<Assignment>& list, const System& system, const Order& order) {
  return std::any_of(list.begin(), list.end(), [&](const Assignment& known) {
    return known.system == &system && to_json_text(known.order) == to_json_text(order);
  });
}

}  // namespace

Runner::Runner(const InterruptWatch& watch, std::function<void(const std::string&)> progress)
    : watch_(watch), progress_(std::move(progress)), site_(Site::here(scratch_)) {}

void Runner::complain(const std::string& text) {
  if (std::find(complaints_.begin(), complaints_.end(), text) == complaints_.end()) complaints_.push_back(text);
}

void Runner::use_hosts(int count, const std::string& link) {
  const int now = hosts_ ? hosts_->count() : 1;
  if (now == count && link_ == link) return;
  site_.hosts = nullptr;
  hosts_.reset();
  link_ = link;
  if (count < 2) return;
  hosts_.emplace(count, link, watch_);
  site_.hosts = &*hosts_;
}

std::vector<Row> Runner::carry_out(const System& system, const Order& order, const Block& block,
                                   const std::string& progress, const std::function<void(const Row&)>& on_row) {
  if (progress_) progress_(progress);
  std::vector<Row> rows;
  const auto take = [&](std::string_view line) {
    if (auto row = parse_row_line(line)) {
      row->hosts = block.hosts;
      row->link = block.link;
      if (on_row) on_row(*row);
      rows.push_back(std::move(*row));
    }
  };
  run_process_set(system.process_set(order, site_), take, Deadline::after(std::chrono::duration<double>(order.timeout_s)), watch_);
  return rows;
}

std::vector<Row> Runner::run(const Block& block, const std::function<void(const Row&)>& on_row) {
  use_hosts(block.hosts, block.link);
  std::vector<Assignment> turn;
  for (const std::string& name : block.systems) {
    const System& system = system_named(name);
    if (const std::string missing = system.missing(site_); !missing.empty()) {
      complain("not installed, so not measured: " + missing);
      continue;
    }
    for (const Order& wanted : block.wanted) {
      for (const Order& order : system.orders(wanted, site_)) {
        if (!already_there(turn, system, order)) turn.push_back({&system, order});
      }
    }
  }

  std::map<std::pair<std::uint64_t, std::size_t>, std::vector<Row>> results;  // by (bytes, place in the turn)
  for (int repetition = 0; repetition < block.repeat; ++repetition) {
    for (std::size_t place = 0; place < turn.size(); ++place) {
      const auto& [system, order] = turn[place];
      const std::string what = fmt::format("{}, {} ranks: {} ({} of {})", order.op, order.ranks, system->name(),
                                           repetition + 1, block.repeat);
      try {
        for (Row& row : carry_out(*system, order, block, what, on_row)) {
          const std::pair key(row.bytes, place);
          results[key].push_back(std::move(row));
        }
      } catch (const ProcessSetFailed& failure) {
        failed_ = failed_ || system->role() != Role::peer;
        complain(
            fmt::format("{} failed at {} with {} ranks: {}", system->name(), order.op, order.ranks, failure.what()));
      }
    }
  }
  std::vector<Row> rows;
  for (const auto& [key, repetitions] : results) rows.push_back(merge(repetitions));
  return rows;
}

std::vector<Row> Runner::core_limits(const std::vector<std::uint64_t>& sizes, double budget_s) {
  const System& limit = system_named("limit");
  if (const std::string missing = limit.missing(site_); !missing.empty()) {
    complain("not installed, so not measured: " + missing);
    return {};
  }
  Order order;
  order.op = "limit";
  order.ranks = 1;
  order.bytes = sizes;
  order.budget_s = budget_s;
  return carry_out(limit, order, Block{}, "one core: memcpy and add", {});
}

}  // namespace maniple::bench
