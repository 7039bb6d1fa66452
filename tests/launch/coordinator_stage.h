// A Coordinator without processes: the test plays the nodes and the time.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {

struct Stage {
  explicit Stage(CoordinatorOptions options) : coordinator(options) { happened(event::Begin()); }

  void happened(const Event& event) {
    for (const Effect& effect : coordinator.handle(event, now)) {
      std::visit(overloaded{[this](const effect::Send& send) { sent[send.node].push_back(send.message); },
                            [this](const effect::Print& print) { said += print.text + "\n"; },
                            [this](const effect::StartAgents&) { ++agents_started; },
                            [this](const effect::Answer& answer) { answered = answer; },
                            [this](const effect::Done& done) { result = done.code; }},
                 effect);
    }
  }
  void join(int node, int rank = -1, int processes = 2) {
    happened(event::Joined{node, {.node_rank = rank, .processes = processes, .host = "host" + std::to_string(node)}});
  }
  void receive(int node, AgentMessage message) { happened(event::Received{node, std::move(message)}); }
  void reserved(int generation, int node = 0) {
    receive(node, message::Reserved{.generation = generation, .host = "h", .port = 99});
  }
  void failed(int node, int generation, RankExit exit) { receive(node, message::Failed{generation, std::move(exit)}); }
  void finished(int node, int generation) { receive(node, message::Finished{generation}); }
  void stopped(int node, int generation) { receive(node, message::Stopped{generation}); }
  void lost(int node, const std::string& reason) { happened(event::Lost{node, reason}); }
  void interrupt(int signal) { happened(event::Interrupted{signal}); }

  /// How long until the next timer is due.
  double delay() const { return coordinator.next_timer() ? (*coordinator.next_timer() - now).count() : -1; }
  /// Time passes until the timer that is due first, or until `seconds` have passed.
  void wait() {
    ASSERT_GE(delay(), 0) << "no timer is set";
    wait(delay());
  }
  void wait(double seconds) {
    const Coordinator::Time end = now + Coordinator::Time(seconds);
    while (coordinator.next_timer() && *coordinator.next_timer() <= end) {
      now = *coordinator.next_timer();
      happened(event::Tick());
    }
    now = end;
  }

  /// The last message to a node, which is of that kind.
  template <class Message>
  Message last(int node) {
    const bool fits = !sent[node].empty() && std::holds_alternative<Message>(sent[node].back());
    EXPECT_TRUE(fits) << "node " << node << " was sent something else";
    return fits ? std::get<Message>(sent[node].back()) : Message();
  }
  message::Start started(int node) { return last<message::Start>(node); }

  Coordinator coordinator;
  Coordinator::Time now{1000};
  std::map<int, std::vector<AgentMessage>> sent;
  std::string said;
  int agents_started = 0;
  std::optional<int> result;
  std::optional<effect::Answer> answered;
};

}  // namespace maniple::launch
