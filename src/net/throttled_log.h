// Warnings that unauthenticated peers can cause at will: one line for each kind every few seconds, with the number left out.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace maniple {

class ThrottledLog {
 public:
  explicit ThrottledLog(std::chrono::steady_clock::duration pause = std::chrono::seconds(5)) : pause_(pause) {}

  /// `kind` must come from a fixed set: each is remembered. Not thread-safe.
  void warn(std::string_view kind, const std::string& line);

 private:
  struct Last {
    std::chrono::steady_clock::time_point when;
    std::uint64_t left_out = 0;
  };
  std::chrono::steady_clock::duration pause_;
  std::map<std::string, Last, std::less<>> last_;
};

}  // namespace maniple
