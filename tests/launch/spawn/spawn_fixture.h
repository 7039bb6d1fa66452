// What every test of spawn checks besides: no process, no descriptor, no thread is left.
#pragma once

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "harness/leaks.h"
#include "harness/temporary_directory.h"
#include <maniple/launch/spawn.h>

namespace maniple {

class SpawnTest : public testing::Test {
 protected:
  void TearDown() override {
    int status = 0;
    EXPECT_EQ(::waitpid(-1, &status, WNOHANG), -1) << "a process is left";
    EXPECT_EQ(errno, ECHILD);
    for (const std::string& leak : harness::ProcessResources::leaked_since(before_))
      ADD_FAILURE() << "leaked: " << leak;
  }

  std::string file(const std::string& name) const { return scratch_.path() + "/" + name; }

  harness::TemporaryDirectory scratch_;
  harness::ProcessResources before_ = harness::ProcessResources::now();
};

/// In a spawned process there is no test to fail; what it throws arrives in the test.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error("not so: " + what);
}

/// In a spawned process, until a signal ends it.
[[noreturn]] inline void wait_for_the_end() {
  for (;;) ::pause();
}

/// Looks until it is so.
inline bool eventually(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: between two polls
  }
  return true;
}

inline std::string contents(const std::string& path) {
  std::ifstream in(path);
  return (std::ostringstream() << in.rdbuf()).str();
}

/// One line at a time, also from several processes.
inline void append_line(const std::string& path, const std::string& line) {
  std::ofstream(path, std::ios::app) << line + "\n" << std::flush;
}

inline std::size_t count_lines(const std::string& path) {
  const std::string text = contents(path);
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

template <class... Args>
SpawnError spawn_error(Args&&... args) {
  try {
    spawn(std::forward<Args>(args)...);
  } catch (const SpawnError& error) {
    return error;
  }
  throw std::logic_error("nothing went wrong");
}

}  // namespace maniple
