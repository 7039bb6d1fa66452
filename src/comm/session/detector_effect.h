// What the failure detector's core wants done: see detector_core.h.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "comm/session/detector_message.h"
#include <maniple/comm/deadline.h>

namespace maniple::detector {

using Clock = Deadline::Clock;
using Time = Clock::time_point;

struct Send {
  int to = -1;
  Message message = {};
};
struct Close {
  int peer = -1;
};
/// Connect to a rank's control listener, with one try. The reply is Dialed or DialFailed. Replaces an earlier dial.
struct Dial {
  int to = -1;
  Clock::duration delay{};
  Clock::duration limit{};
};
/// Check whether a process still listens at a rank's address. Only a refusal is reported, with ProbeRefused.
struct Probe {
  int peer = -1;
};
/// Read the state of a rank's process on this host. The reply is ProcessState.
struct ReadProcessState {
  int peer = -1;
};
/// Look up this rank's call. The reply is CallFound.
struct LookUpCall {
  int asker = -1;
  QueryCall query = {};
};
struct ReportLost {
  int rank = -1;
  std::string text = {};
};
struct ReportGone {
  int rank = -1;
};
struct ReportAborted {
  Abort abort = {};
};
struct ReportDeparted {
  Departed departed = {};
};
// For survivors.h.
struct ReportSurvivors {
  Survivors decision = {};
};
struct ReportMissing {
  Missing missing = {};
};
// For wait_report.h.
struct ReportWaiting {
  Waiting waiting = {};
};
struct LookUpProgress {
  int asker = -1;
  QueryProgress query = {};
};
struct ReportProgress {
  ProgressReply reply = {};
};
/// Send the event Wake at this time. An earlier WakeAt stays in force.
struct WakeAt {
  Time when{};
};

using Effect =
    std::variant<Send, Close, Dial, Probe, ReadProcessState, LookUpCall, ReportLost, ReportGone, ReportAborted,
                 ReportDeparted, ReportSurvivors, ReportMissing, ReportWaiting, LookUpProgress, ReportProgress, WakeAt>;
using Effects = std::vector<Effect>;

}  // namespace maniple::detector
