#include "rendezvous/starter_process.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include <fmt/format.h>

namespace maniple {
namespace {

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

bool has_variable(pid_t pid, std::string_view name) {
  const std::string environment = '\0' + contents(fmt::format("/proc/{}/environ", pid));
  return environment.find(fmt::format("{}{}=", '\0', name)) != std::string::npos;
}

pid_t parent_of(pid_t pid) {
  // "PID (name) state PPID ...", and the name may hold anything.
  const std::string stat = contents(fmt::format("/proc/{}/stat", pid));
  const auto end = stat.rfind(") ");
  return end == std::string::npos || end + 4 > stat.size() ? 0 : std::atoi(stat.c_str() + end + 4);
}

}  // namespace

pid_t starter_process(std::string_view variable) {
  pid_t pid = ::getppid();
  while (pid > 1 && has_variable(pid, variable)) {
    const pid_t parent = parent_of(pid);
    if (parent <= 0) break;
    pid = parent;
  }
  return pid;
}

}  // namespace maniple
