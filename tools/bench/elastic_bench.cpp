#include "tools/bench/elastic_bench.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"

namespace maniple::bench {
namespace {

using Kind = ElasticEvent::Kind;

constexpr int kRanks = 4;  // of trainings with faults
constexpr int kFaults = 8;
constexpr int kPairs = 5;  // of trainings with and without --elastic

/// A step is committed when the first rank has committed it.
std::map<std::int64_t, ElasticEvent> steps_of(const std::vector<ElasticEvent>& events) {
  std::map<std::int64_t, ElasticEvent> steps;
  for (const ElasticEvent& event : events) {
    if (event.kind != Kind::step) continue;
    const auto [place, is_new] = steps.emplace(event.step, event);
    if (!is_new && event.at < place->second.at) place->second = event;
  }
  return steps;
}

double usual_step(const std::vector<ElasticEvent>& events, int ranks) {
  const std::vector<double> times = step_times(events, ranks);
  return times.empty() ? 0 : Spread(times).median;
}

/// CPU time of a step on all ranks.
double cpu_of_step(const std::vector<ElasticEvent>& events) {
  std::map<int, std::pair<ElasticEvent, ElasticEvent>> ends;  // the first and the last step of each process
  for (const ElasticEvent& event : events) {
    if (event.kind == Kind::step) ends.emplace(event.pid, std::pair(event, event)).first->second.second = event;
  }
  double sum = 0;
  for (const auto& [pid, end] : ends)
    sum += (end.second.cpu - end.first.cpu) /
           static_cast<double>(std::max<std::int64_t>(1, end.second.step - end.first.step));
  return sum;
}

std::vector<double> in_ms(std::vector<double> seconds) {
  for (double& value : seconds) value *= 1e3;
  return seconds;
}

}  // namespace

Spread::Spread(std::vector<double> values) : count(static_cast<int>(values.size())) {
  MANIPLE_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  min = values.front();
  max = values.back();
  const std::size_t half = values.size() / 2;
  median = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::vector<double> step_times(const std::vector<ElasticEvent>& events, int ranks) {
  std::vector<double> times;
  const auto steps = steps_of(events);
  for (auto next = steps.begin(), before = next; next != steps.end(); before = next++) {
    if (before->first + 1 == next->first && before->second.ranks == ranks && next->second.ranks == ranks)
      times.push_back(next->second.at - before->second.at);
  }
  return times;
}

std::vector<double> times_to_go_on(const std::vector<ElasticEvent>& events) {
  std::vector<double> times;
  const auto steps = steps_of(events);
  for (const ElasticEvent& killed : events) {
    if (killed.kind != Kind::killed) continue;
    const auto next = steps.upper_bound(killed.step);
    if (next != steps.end()) times.push_back(next->second.at - killed.at - usual_step(events, next->second.ranks));
  }
  return times;
}

std::vector<double> times_to_join(const std::vector<ElasticEvent>& events) {
  std::vector<double> times;
  std::map<int, double> ready;  // by process
  std::set<int> joined;
  bool fault = false;
  for (const ElasticEvent& event : events) {
    fault = fault || event.kind == Kind::killed;
    if (event.kind == Kind::ready && fault) ready[event.pid] = event.at;
    if (event.kind != Kind::step || !ready.contains(event.pid) || !joined.insert(event.pid).second) continue;
    times.push_back(event.at - ready[event.pid] - usual_step(events, event.ranks));
  }
  return times;
}

std::vector<ElasticEvent> ElasticBench::events_of(const std::string& model, int ranks, bool elastic, int faults,
                                                  double seconds) {
  const std::string path = testbed_.scratch->new_path("elastic");
  ChildSpec spec;
  spec.name = fmt::format("{} with {} ranks", model, ranks);
  spec.argv = {testbed_.program, "run", "-n", std::to_string(ranks)};
  if (elastic) spec.argv.insert(spec.argv.end(), {"--elastic", fmt::format("1:{}", ranks)});
  for (const std::string& word : {testbed_.libexec + "/elastic_faults_worker", path, model, std::to_string(ranks),
                                  std::to_string(faults), std::to_string(seconds)})
    spec.argv.push_back(word);
  spec.environment = {{"OMP_NUM_THREADS", "1"}};
  spec.death_signal = SIGTERM;  // so that it ends its workers
  run_process_set({spec}, [](std::string_view) {}, Deadline::after(Seconds(timeout_s_)), watch_);
  std::vector<ElasticEvent> events;
  std::ifstream file(path, std::ios::binary);
  for (ElasticEvent event; file.read(reinterpret_cast<char*>(&event), sizeof event);) events.push_back(event);
  return events;
}

void ElasticBench::run(int ranks, double seconds) {
  for (const char* model : {"cnn", "mlp"}) {
    measure_faults(model);
    measure_overhead(model, ranks, seconds);
  }
}

void ElasticBench::measure_faults(const std::string& model) {
  const std::vector<ElasticEvent> events = events_of(model, kRanks, true, kFaults, 0);
  const auto show = [&](const char* name, const std::vector<double>& seconds, int ranks) {
    MANIPLE_REQUIRE(!seconds.empty(), "bench elastic: {} recorded no {}", model, name);
    const Spread ms(in_ms(seconds));
    const double step = usual_step(events, ranks) * 1e3;
    on_row_(fmt::format("{:<6} {:<18} {:>9.2f} ms more than a step of {:.2f} ms; {:.2f} to {:.2f} in {} faults", model,
                        name, ms.median, step, ms.min, ms.max, ms.count),
            {{"kind", "elastic"},
             {"model", model},
             {"name", name},
             {"ranks", kRanks},
             {"faults", ms.count},
             {"ms", ms.median},
             {"min_ms", ms.min},
             {"max_ms", ms.max},
             {"step_ms", step}});
  };
  show("rank killed", times_to_go_on(events), kRanks - 1);
  show("rank joins", times_to_join(events), kRanks);
}

void ElasticBench::measure_overhead(const std::string& model, int ranks, double seconds) {
  std::vector<double> ratios, cpu_ratios, step_ms;
  for (int i = 0; i < kPairs; ++i) {
    const auto plain = events_of(model, ranks, false, 0, seconds);
    const auto elastic = events_of(model, ranks, true, 0, seconds);
    const double step = usual_step(elastic, ranks), plain_step = usual_step(plain, ranks);
    MANIPLE_REQUIRE(step > 0 && plain_step > 0, "bench elastic: {} recorded no two steps in {} s", model, seconds);
    ratios.push_back(step / plain_step);
    cpu_ratios.push_back(cpu_of_step(elastic) / cpu_of_step(plain));
    step_ms.push_back(step * 1e3);
  }
  const Spread ratio(ratios), cpu(cpu_ratios), step(step_ms);
  on_row_(fmt::format("{:<6} {:<18} {:>9.2f} ms a step {:>8.4f}; {:.4f} to {:.4f} in {} pairs   CPU {:.4f}", model,
                      "--elastic", step.median, ratio.median, ratio.min, ratio.max, ratio.count, cpu.median),
          {{"kind", "elastic"},
           {"model", model},
           {"name", "--elastic"},
           {"ranks", ranks},
           {"step_ms", step.median},
           {"ratio", ratio.median},
           {"min_ratio", ratio.min},
           {"max_ratio", ratio.max},
           {"cpu_ratio", cpu.median},
           {"min_cpu_ratio", cpu.min},
           {"max_cpu_ratio", cpu.max}});
}

}  // namespace maniple::bench
