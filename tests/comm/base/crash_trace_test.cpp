// The stack of a crash, and what it must leave as it is. Signals that no sanitizer takes for itself.
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>

#include "comm/base/crash_trace.h"

namespace maniple {
namespace {

[[noreturn]] void crash(int signal) {
  install_crash_trace();
  ::raise(signal);
  ::_exit(0);
}

[[noreturn]] void fail() { throw std::runtime_error("the text"); }

TEST(CrashTraceDeathTest, PrintsTheStackAndLeavesTheSignal) {
  EXPECT_EXIT(crash(SIGILL), ::testing::KilledBySignal(SIGILL), "SIGILL; the stack of its thread.*\n.*\\[0x");
  EXPECT_EXIT(
      {
        install_crash_trace();
        std::abort();
      },
      ::testing::KilledBySignal(SIGABRT), "SIGABRT; the stack of its thread");
}

TEST(CrashTraceDeathTest, UncaughtExceptionsPrintTheirText) {
  const auto uncaught = []() noexcept {
    install_crash_trace();
    fail();
  };
  EXPECT_EXIT(uncaught(), ::testing::KilledBySignal(SIGABRT), "the text\n$");
}

TEST(CrashTraceDeathTest, TheProgramsHandlerStays) {
  EXPECT_EXIT(
      {
        std::signal(SIGILL, [](int) { ::_exit(7); });
        crash(SIGILL);
      },
      ::testing::ExitedWithCode(7), "^$");
}

TEST(CrashTraceDeathTest, CanBeTurnedOff) {
  EXPECT_EXIT(
      {
        ::setenv("MANIPLE_CRASH_TRACE", "0", 1);
        crash(SIGILL);
      },
      ::testing::KilledBySignal(SIGILL), "^$");
}

}  // namespace
}  // namespace maniple
