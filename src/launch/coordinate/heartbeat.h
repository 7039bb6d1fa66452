// How launchers of a job notice that one of them is stopped or cut off although its connection stands.
#pragma once

#include <chrono>

namespace maniple::launch {

struct Heartbeat {
  std::chrono::duration<double> interval{1.0};        ///< between two signs of life, in both directions
  std::chrono::duration<double> silence_limit{10.0};  ///< without any word for so long, the other counts as lost
};

/// The least number of heartbeats that must be missed: one that is late by a busy machine is no silence.
inline constexpr double kLeastMissedBeats = 3;

}  // namespace maniple::launch
