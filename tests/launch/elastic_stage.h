// An elastic job without processes: the test plays the workers and the time, and collects what the job is told to do.
#pragma once

#include <csignal>
#include <string>
#include <variant>
#include <vector>

#include "comm/base/overloaded.h"
#include "launch/coordinate/elastic_members.h"

namespace maniple::launch {

struct ElasticStage {
  using Time = ElasticMembers::Time;

  explicit ElasticStage(int workers, ElasticRange range = {1, 8}, bool nodes_may_join = false)
      : members(range, {}, Time(300), nodes_may_join), count(workers) {
    members.begin();
    members.add_node(0, workers, now);
  }
  void take(const MemberActions& actions) {
    for (const MemberAction& action : actions) {
      std::visit(
          overloaded{[&](const members::Form& form) { formed.push_back(form.members); },
                     [&](const members::Replace& replace) { replaced.push_back(replace); },
                     [&](const members::Ask& ask) { asked.push_back(ask.worker); },
                     [&](const members::Kill& kill) { killed.push_back(kill.worker); },
                     [&](const members::Print& shown) { text += shown.text + "\n"; },
                     [&](const members::Finish&) { finished = true; }, [&](const members::End&) { ended = true; }},
          action);
    }
  }
  void ready(int worker) { take(members.on_ready(worker, now)); }
  void joined(int worker) { take(members.on_joined(worker, now)); }
  void all_join() {
    for (const int worker : std::vector<int>(members.ranks())) joined(worker);
  }
  void dies(int worker) { take(members.on_exit({.rank = worker, .pid = 100 + worker, .signal = SIGKILL}, now)); }
  void fails(int worker) { take(members.on_exit({.rank = worker, .pid = 100 + worker, .code = 1}, now)); }
  void ends(int worker) { take(members.on_exit({.rank = worker, .pid = 100 + worker}, now)); }
  void leaves(int worker) {
    take(members.on_leaving(worker, now));
    ends(worker);
  }
  void resize(int workers) { take(members.resize(workers, now)); }
  void wait(double seconds) {
    now += Time(seconds);
    take(members.on_time(now));
  }
  void start() {
    for (int worker = 0; worker < count; ++worker) ready(worker);
    all_join();
  }

  Time now{0};
  ElasticMembers members;
  int count;
  std::vector<std::vector<int>> formed;
  std::vector<members::Replace> replaced;
  std::vector<int> asked, killed;
  std::string text;
  bool ended = false, finished = false;
};

using Members = std::vector<int>;

}  // namespace maniple::launch
