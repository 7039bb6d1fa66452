#include "bench/machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace maniple::bench {
namespace {

/// The first value of each key in /proc/cpuinfo.
std::map<std::string, std::string> cpu_info() {
  std::map<std::string, std::string> info;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    info.emplace(key, colon + 2 <= line.size() ? line.substr(colon + 2) : "");
  }
  return info;
}

/// Arm cores have numbers instead of names.
std::string arm_core(const std::string& part) {
  static const std::map<std::string, std::string> names = {
      {"0xd03", "Cortex-A53"},  {"0xd08", "Cortex-A72"},  {"0xd0b", "Cortex-A76"},
      {"0xd0c", "Neoverse-N1"}, {"0xd40", "Neoverse-V1"}, {"0xd49", "Neoverse-N2"},
      {"0xd4f", "Neoverse-V2"}, {"0xd83", "Neoverse-V3"}, {"0xd8e", "Neoverse-N3"}};
  const auto found = names.find(part);
  return found != names.end() ? found->second : "Arm core " + part;
}

std::string widest_vectors(const std::string& flags) {
  for (const char* name : {"avx512f", "avx2", "avx", "sse4_2", "sve2", "sve", "asimd"}) {
    std::istringstream words(flags);
    for (std::string word; words >> word;) {
      if (word == name) return word == "asimd" ? "neon" : word;
    }
  }
  return "";
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                     : static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

Machine this_machine() {
  Machine machine;
  auto info = cpu_info();
  machine.cpu = !info["model name"].empty() ? info["model name"] : arm_core(info["CPU part"]);
  machine.instruction_set = widest_vectors(info["flags"] + " " + info["Features"]);
  machine.cores = usable_cores();
  utsname names{};
  uname(&names);
  machine.arch = names.machine;
  machine.kernel = names.release;
  return machine;
}

}  // namespace maniple::bench
