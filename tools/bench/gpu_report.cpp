// Rows, table and goals of `maniple bench gpu`. Pure.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include "tools/bench/gpu_bench.h"

namespace maniple::bench {
namespace {

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;
constexpr const char* kGpuFormat = "{:<10} {:<11} {:>5} {:<3}  {:<10} {:>7} {:>8} {:>10} {:>9}\n";

nlohmann::ordered_json to_json(const GpuRow& row) {
  nlohmann::ordered_json json = {{"case", row.what},   {"system", row.system}, {"kind", row.kind},
                                 {"ranks", row.ranks}, {"mps", row.mps},       {"bytes", row.bytes}};
  if (!row.missing.empty()) {
    json["missing"] = row.missing;
    return json;
  }
  json["us"] = row.us;
  if (row.bytes > 0) {
    json["enqueue_us"] = row.enqueue_us;
    json["algbw_gbps"] = row.gigabytes_per_second();
  } else {
    json["items"] = row.items;
    json["items_per_second"] = row.items_per_second();
    json["note"] = row.note;
  }
  return json;
}

nlohmann::ordered_json to_json(const GpuGoal& goal) {
  return {{"case", goal.what},
          {"measured", goal.measured},
          {"goal", goal.goal},
          {"beside", goal.beside},
          {"reached", goal.reached}};
}

/// Identifies a row.
struct Key {
  std::string what, system, kind;
  int ranks = 1;
  bool mps = false;
  std::uint64_t bytes = 0;
};

const GpuRow* find(const std::vector<GpuRow>& rows, const Key& key) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const GpuRow& row) {
    return row.missing.empty() && row.what == key.what && row.system == key.system && row.kind == key.kind &&
           row.ranks == key.ranks && row.mps == key.mps && row.bytes == key.bytes;
  });
  return found == rows.end() ? nullptr : &*found;
}

double percent_over(const GpuRow& row, const GpuRow& plain) { return (row.us / plain.us - 1) * 100; }

std::string signed_percent(double percent) { return fmt::format("{:+.2f} %", percent); }

/// Derives the list of goals from the rows.
class Goals {
 public:
  explicit Goals(const std::vector<GpuRow>& rows) : rows_(rows) {}

  void overhead(const std::string& model, double limit) {
    const GpuRow* const plain = find(rows_, {model, "maniple", "plain"});
    const GpuRow* const ddp = find(rows_, {model, "maniple", "DDP"});
    GpuGoal& goal =
        add(fmt::format("{}: DDP of 1 rank over the plain step", model), fmt::format("at most {:g} %", limit));
    if (plain != nullptr && ddp != nullptr) {
      goal.measured = signed_percent(percent_over(*ddp, *plain));
      goal.reached = percent_over(*ddp, *plain) <= limit;
    }
    const GpuRow* const theirs = find(rows_, {model, "torch", "plain"});
    for (const auto& [kind, name] : {std::pair{"DDP", "PyTorch"}, {"DDP best", "best options"}}) {
      const GpuRow* const row = find(rows_, {model, "torch", kind});
      if (theirs == nullptr || row == nullptr) continue;
      goal.beside +=
          fmt::format("{}{} {}", goal.beside.empty() ? "" : ", ", name, signed_percent(percent_over(*row, *theirs)));
    }
  }

  void faster_step(const std::string& model) {
    const GpuRow* const ours = find(rows_, {model, "maniple", "DDP"});
    const GpuRow* const theirs = find(rows_, {model, "torch", "plain"});
    GpuGoal& goal = add(model + ": DDP step", "below PyTorch's plain step");
    if (ours == nullptr || theirs == nullptr) return;
    goal.measured = format_time(ours->us);
    goal.beside = "PyTorch " + format_time(theirs->us);
    goal.reached = ours->us < theirs->us;
  }

  void latency(int ranks, bool mps, double limit_us) {
    GpuGoal& goal = add(collective(ranks, mps, 4), fmt::format("at most {:g} us", limit_us));
    if (const GpuRow* const row = ours(ranks, mps, 4)) {
      goal.measured = format_time(row->us);
      goal.reached = row->us <= limit_us;
    }
    if (const GpuRow* const row = bare_nccl(ranks, mps, 4)) goal.beside = "NCCL " + format_time(row->us);
  }

  void bandwidth(int ranks, bool mps, double least) {
    const std::uint64_t bytes = 256 * kMib;
    GpuGoal& goal = add(collective(ranks, mps, bytes), fmt::format("at least {:g} GB/s", least));
    if (const GpuRow* const row = ours(ranks, mps, bytes)) {
      goal.measured = format_bandwidth(row->gigabytes_per_second());
      goal.reached = row->gigabytes_per_second() >= least;
    }
    if (const GpuRow* const row = bare_nccl(ranks, mps, bytes))
      goal.beside = "NCCL " + format_bandwidth(row->gigabytes_per_second());
  }

  void share_of_limit(int ranks, double least) {
    const std::uint64_t bytes = 256 * kMib;
    GpuGoal& goal = add(collective(ranks, true, bytes), fmt::format("at least {:g} of the limit", least));
    const GpuRow* const row = ours(ranks, true, bytes);
    const GpuRow* const limit = find(rows_, {"all_reduce", "limit", "registered", ranks, true, bytes});
    if (limit != nullptr) goal.beside = "limit " + format_bandwidth(limit->gigabytes_per_second());
    if (row == nullptr || limit == nullptr) return;
    const double share = limit->us / row->us;
    goal.measured = fmt::format("{} ({:.2f})", format_bandwidth(row->gigabytes_per_second()), share);
    goal.reached = share >= least;
  }

  void throughput(int ranks, double least) {
    GpuGoal& goal = add(fmt::format("resnet50: {} ranks on one GPU, MPS, images/s in total", ranks),
                        fmt::format("at least {:g} of one rank, plain", least));
    const GpuRow* const plain = find(rows_, {"resnet50", "maniple", "plain"});
    const GpuRow* const row = find(rows_, {"resnet50", "maniple", "DDP", ranks, true});
    if (plain != nullptr) goal.beside = fmt::format("one rank {:.0f}/s", plain->items_per_second());
    if (plain == nullptr || row == nullptr) return;
    const double share = row->items_per_second() / plain->items_per_second();
    goal.measured = fmt::format("{:.0f}/s ({:.3f})", row->items_per_second(), share);
    goal.reached = share >= least;
  }

  void beside_bare_nccl(int ranks, bool mps, double most) {
    const std::uint64_t bytes = 64 * kMib;
    GpuGoal& goal = add("nccl: " + collective(ranks, mps, bytes), fmt::format("at most {:g}x bare NCCL", most));
    const GpuRow* const row = find(rows_, {"all_reduce", "nccl", "ordinary", ranks, mps, bytes});
    const GpuRow* const bare = bare_nccl(ranks, mps, bytes);
    if (bare != nullptr) goal.beside = "NCCL " + format_time(bare->us);
    if (row == nullptr || bare == nullptr) return;
    goal.measured = fmt::format("{} ({:.3f}x)", format_time(row->us), row->us / bare->us);
    goal.reached = row->us <= most * bare->us;
  }

  std::vector<GpuGoal> take() { return std::move(goals_); }

 private:
  static std::string collective(int ranks, bool mps, std::uint64_t bytes) {
    return fmt::format("all_reduce, {} rank{}, {}, {}", ranks, ranks == 1 ? "" : "s", mps ? "MPS" : "no MPS",
                       format_bytes(bytes));
  }
  const GpuRow* ours(int ranks, bool mps, std::uint64_t bytes) const {
    return find(rows_, {"all_reduce", "cuda", "registered", ranks, mps, bytes});
  }
  const GpuRow* bare_nccl(int ranks, bool mps, std::uint64_t bytes) const {
    return find(rows_, {"all_reduce", "bare NCCL", "ordinary", ranks, mps, bytes});
  }
  GpuGoal& add(std::string what, std::string goal) {
    goals_.push_back({.what = std::move(what), .measured = {}, .goal = std::move(goal), .beside = {}});
    return goals_.back();
  }

  const std::vector<GpuRow>& rows_;
  std::vector<GpuGoal> goals_;
};

}  // namespace

GpuRow parse_gpu_row(std::string_view text) {
  try {
    const auto json = nlohmann::json::parse(text);
    GpuRow row;
    row.what = json.at("case");
    row.system = json.at("system");
    row.kind = json.at("kind");
    row.ranks = json.at("ranks");
    row.us = json.at("us");
    row.bytes = json.value("bytes", std::uint64_t{0});
    row.enqueue_us = json.value("enqueue_us", 0.0);
    row.items = json.value("items", 0.0);
    row.note = json.value("note", "");
    return row;
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(fmt::format("not a row of `maniple bench gpu`: {} ({})", text, error.what()));
  }
}

std::vector<GpuGoal> gpu_goals(const std::vector<GpuRow>& rows) {
  Goals goals(rows);
  goals.overhead("resnet50", 1);
  goals.overhead("gpt2", 0.3);
  goals.overhead("mlp", 5);
  goals.faster_step("mlp");
  goals.latency(2, true, 9);
  goals.bandwidth(2, true, 750);
  goals.latency(2, false, 450);
  goals.bandwidth(2, false, 330);
  for (const int ranks : {4, 8}) goals.share_of_limit(ranks, 0.85);
  for (const int ranks : {2, 4}) goals.throughput(ranks, 0.97);
  goals.beside_bare_nccl(1, false, 1.05);
  goals.beside_bare_nccl(2, true, 1.05);
  return goals.take();
}

std::string gpu_table_header() {
  return fmt::format(fmt::runtime(kGpuFormat), "case", "system", "ranks", "MPS", "kind", "bytes", "time", "rate",
                     "to plain");
}

std::string gpu_table_line(const GpuRow& row, const std::vector<GpuRow>& rows) {
  const char* const mps = row.mps ? "yes" : "no";
  if (!row.missing.empty()) {
    return fmt::format("{:<10} {:<11} {:>5} {:<3}  not measured: {}\n", row.what, row.system, row.ranks, mps,
                       row.missing);
  }
  std::string rate, ratio;
  if (row.bytes == 0) {
    rate = fmt::format("{:.0f}/s", row.items_per_second());
  } else if (row.ranks > 1 || row.system.ends_with("NCCL") || row.system == "nccl") {
    rate = format_bandwidth(row.gigabytes_per_second());  // not shown for one rank in place, which moves no data
  }
  const GpuRow* const plain = row.bytes == 0 ? find(rows, {row.what, row.system, "plain"}) : nullptr;
  if (plain != nullptr && row.kind != "plain") {
    ratio = row.ranks == 1 ? signed_percent(percent_over(row, *plain))
                           : fmt::format("{:.3f}x", row.items_per_second() / plain->items_per_second());
  }
  std::string line = fmt::format(fmt::runtime(kGpuFormat), row.what, row.system, row.ranks, mps, row.kind,
                                 row.bytes > 0 ? format_bytes(row.bytes) : "", format_time(row.us), rate, ratio);
  line.erase(line.find_last_not_of(" \n") + 1);
  return line + "\n";
}

std::string gpu_goals_table(const std::vector<GpuGoal>& goals) {
  std::string text = "\ngoals\n";
  for (const GpuGoal& goal : goals) {
    const char* const verdict = goal.measured.empty() ? "not measured" : goal.reached ? "reached" : "missed";
    text += fmt::format("  {:<12} {}: {}{}{}\n", verdict, goal.what,
                        goal.measured.empty() ? goal.goal : goal.measured + ", " + goal.goal,
                        goal.beside.empty() ? "" : "; ", goal.beside);
  }
  return text;
}

std::string gpu_report_text(const Machine& machine, const std::string& gpu, const std::vector<GpuRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array(), goals = nlohmann::ordered_json::array();
  for (const GpuRow& row : rows) list.push_back(to_json(row));
  for (const GpuGoal& goal : gpu_goals(rows)) goals.push_back(to_json(goal));
  auto report = nlohmann::ordered_json::parse(report_text(machine, list));
  report["machine"]["gpu"] = gpu;
  report["goals"] = goals;
  return report.dump(1) + "\n";
}

}  // namespace maniple::bench
