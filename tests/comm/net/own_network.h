// Network and mounts of a test's own, without processes.
#pragma once

#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

namespace maniple {

/// Runs `body` in a thread that has a network (and mounts) of its own. Skips the test where this is not permitted.
inline void in_own_network(const std::function<void()>& body) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  std::thread([&] {
    ASSERT_EQ(::unshare(CLONE_FS | CLONE_NEWNET | CLONE_NEWNS), 0) << errno;
    ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0) << errno;
    body();
  }).join();
}

/// Runs a command of the shell in the caller's network.
inline void run(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

}  // namespace maniple
