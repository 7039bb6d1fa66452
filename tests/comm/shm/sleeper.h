// A thread of which one can tell that it sleeps: so a test can wake it and know that it did.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <maniple/comm/deadline.h>

namespace maniple {

class Sleeper {
 public:
  explicit Sleeper(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          id_ = ::gettid();
          body();
        }) {}
  ~Sleeper() {
    if (thread_.joinable()) thread_.join();
  }
  void join() { thread_.join(); }

  /// Whether the kernel came to list the thread as sleeping.
  bool falls_asleep() const {
    const Deadline deadline = Deadline::after(std::chrono::seconds(30));
    while (!deadline.expired()) {
      if (id_ != 0 && state() == 'S') return true;
      std::this_thread::yield();
    }
    return false;
  }

 private:
  char state() const {
    std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/stat");
    std::string line;
    std::getline(file, line);
    const auto end = line.rfind(')');
    return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '\0';
  }
  std::atomic<int> id_{0};
  std::thread thread_;  // last: it uses the rest
};

}  // namespace maniple
