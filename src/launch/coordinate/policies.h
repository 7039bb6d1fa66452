// When a node counts as lost, and when a failed group is started again. Pure.
#pragma once

#include <algorithm>
#include <chrono>

#include "launch/placement/rank_plan.h"

namespace maniple::launch {

/// How launchers notice that a peer is stopped or cut off although its connection stays open.
struct Heartbeat {
  std::chrono::duration<double> interval{1.0};        ///< between two heartbeats, in both directions
  std::chrono::duration<double> silence_limit{10.0};  ///< a peer that sends nothing for this long counts as lost
  friend bool operator==(const Heartbeat&, const Heartbeat&) = default;
};

/// A peer must miss at least this many heartbeats, so that a busy machine's late heartbeat does not count as silence.
inline constexpr double kLeastMissedBeats = 3;

/// A failed group is restarted at most `max_restarts` times, after a longer pause each time.
struct RestartPolicy {
  int max_restarts = 0;
  std::chrono::duration<double> first_delay{1.0};
  std::chrono::duration<double> longest_delay{30.0};

  bool allows(int failures_so_far) const noexcept { return failures_so_far <= max_restarts; }

  /// The delay before restart number `restart`, counted from 1: the first delay, doubled each time up to the longest.
  std::chrono::duration<double> delay_before(int restart) const noexcept {
    double seconds = first_delay.count();
    for (int i = 1; i < restart && seconds < longest_delay.count(); ++i) seconds *= 2;
    return std::chrono::duration<double>(std::min(seconds, longest_delay.count()));
  }
  friend bool operator==(const RestartPolicy&, const RestartPolicy&) = default;
};

/// `maniple run --elastic MIN:MAX`: how many workers the job may have while it runs.
struct ElasticRange {
  int min = 0;  ///< 0: the job is not elastic
  int max = 0;
  explicit operator bool() const noexcept { return min > 0; }
  friend bool operator==(const ElasticRange&, const ElasticRange&) = default;
};

/// How the nodes of a job come together, and how long each step may take.
struct CoordinatorOptions {
  NodeRange nodes = {};
  bool starts_agents = false;  ///< this launcher starts the nodes' agents, see effect::StartAgents
  RestartPolicy restarts = {};
  ElasticRange elastic = {};
  std::chrono::duration<double> join_timeout{300.0};
  std::chrono::duration<double> join_window{5.0};  ///< how long to wait for more nodes than the minimum
  std::chrono::duration<double> grace{0.8};        ///< between SIGTERM and SIGKILL
  std::chrono::duration<double> interrupt_grace{30.0};
  friend bool operator==(const CoordinatorOptions&, const CoordinatorOptions&) = default;
};

}  // namespace maniple::launch
