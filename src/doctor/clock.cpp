#include "doctor/clock.h"

#include <sys/timex.h>

#include <chrono>
#include <ctime>

#include <fmt/format.h>

#include "doctor/system_files.h"

namespace maniple::doctor {
namespace {

constexpr std::int64_t kStartOf2024 = 1'704'067'200;
constexpr double kSlowReadNs = 500;  // a system call instead of a read of a register

}  // namespace

Findings judge(const ClockFacts& facts) {
  Findings findings;
  if (!facts.goes_forward) {
    findings.push_back({Verdict::fail, "the monotonic clock went backwards",
                        "use another clock source: /sys/devices/system/clocksource"});
  }
  if (facts.now < kStartOf2024) {
    findings.push_back({Verdict::warn, "the date is long past: logs and certificates will be wrong",
                        "set it: timedatectl set-ntp true"});
  }
  if (facts.read_ns > kSlowReadNs) {
    findings.push_back({Verdict::warn,
                        fmt::format("reading the clock takes {:.0f} ns (source {})", facts.read_ns, facts.source),
                        "use tsc: echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"});
  }
  if (findings.empty()) {
    findings.push_back(
        {Verdict::ok,
         fmt::format("clock {}reads in {:.0f} ns{}", facts.source.empty() ? "" : facts.source + " ", facts.read_ns,
                     facts.synchronised ? ", synchronised" : "; not synchronised, which only logs notice")});
  }
  return findings;
}

ClockFacts look_at_clock() {
  ClockFacts facts;
  facts.now = std::time(nullptr);
  timex state{};
  facts.synchronised = ::adjtimex(&state) >= 0 && (state.status & STA_UNSYNC) == 0;
  facts.source = read_small_file("/sys/devices/system/clocksource/clocksource0/current_clocksource").value_or("");
  constexpr int kReads = 2000;
  // The best of a few rounds: others use the cores, too.
  facts.read_ns = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    auto last = begin;
    for (int i = 0; i < kReads; ++i) {
      const auto now = std::chrono::steady_clock::now();
      facts.goes_forward = facts.goes_forward && now >= last;
      last = now;
    }
    facts.read_ns = std::min(facts.read_ns, std::chrono::duration<double, std::nano>(last - begin).count() / kReads);
  }
  return facts;
}

}  // namespace maniple::doctor
