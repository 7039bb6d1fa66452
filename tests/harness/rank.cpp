#include "harness/rank.h"

#include <unistd.h>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace maniple::harness {

namespace {

/// Makes NCCL accept ranks that share a GPU: it refuses them unless they seem to be on different hosts.
void seem_alone(const InitOptions& options, int rank) {
  if (options.backend.find("nccl") != std::string::npos) ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
}

}  // namespace

Rank::Rank(Setup setup, ControlChannel& channel)
    : rank(setup.rank), size(setup.size), host(setup.host), setup_(std::move(setup)), channel_(channel) {
  seem_alone(setup_.init, rank);
}

void Rank::init(const InitOptions& options) {
  seem_alone(options, rank);
  world = setup_.store ? maniple::init(setup_.store, options) : maniple::init(options);
  channel_.initialised(world);
}

void Rank::report(const std::string& key, double value) { report(key, fmt::format("{:.17g}", value)); }

void Rank::step() {
  ++steps_;
  const Fault& fault = setup_.fault;
  if (fault.rank != rank || fault.step != steps_) return;
  switch (fault.kind) {
    case Fault::Kind::none: return;
    case Fault::Kind::kill: kill_self();
    case Fault::Kind::stop: stop_self(); return;
    case Fault::Kind::exit: std::_Exit(7);
    case Fault::Kind::raise: throw InjectedFault(fmt::format("scripted fault of rank {} at step {}", rank, steps_));
    case Fault::Kind::delay: std::this_thread::sleep_for(fault.duration); return;  // sleep: the slow rank is the fault
  }
}

void Rank::lose_packets(double fraction, Seconds duration) {
  channel_.set_link(0, fmt::format("{} {} {}", kLossState, fraction, duration.count()));
}

void Rank::kill_self() {
  report("fault_at", now_s());
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();  // until the signal arrives
}

void Rank::stop_self() {
  report("fault_at", now_s());
  ::kill(::getpid(), SIGSTOP);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace maniple::harness
