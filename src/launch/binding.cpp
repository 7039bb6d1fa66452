#include "launch/binding.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "base/unique_fd.h"
#include "topology/rank_arithmetic.h"

namespace maniple::launch {
namespace {

using Core = std::vector<int>;  // the hardware threads of one physical core

int number_in(const std::string& path, int otherwise) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[32];
  const ssize_t got = file ? ::read(file.get(), text, sizeof text) : -1;
  int value = otherwise;
  if (got > 0) std::from_chars(text, text + got, value);
  return value;
}

// Each CPU's folder holds a link called nodeN.
int numa_of(const std::string& folder) {
  int numa = 0;
  if (DIR* entries = ::opendir(folder.c_str())) {
    while (const dirent* entry = ::readdir(entries)) {
      const char* digits = entry->d_name + 4;
      if (std::strncmp(entry->d_name, "node", 4) != 0 || *digits < '0' || *digits > '9') continue;
      numa = std::atoi(digits);
    }
    ::closedir(entries);
  }
  return numa;
}

std::vector<int> allowed_ids() {
  // The kernel refuses a set that is smaller than its own.
  for (std::size_t size = CPU_SETSIZE; size <= (std::size_t{1} << 20); size *= 4) {
    std::vector<cpu_set_t> set(size / CPU_SETSIZE);
    const std::size_t bytes = set.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, set.data()) != 0) continue;
    std::vector<int> ids;
    for (std::size_t id = 0; id < size; ++id) {
      if (CPU_ISSET_S(id, bytes, set.data())) ids.push_back(static_cast<int>(id));
    }
    return ids;
  }
  return {};
}

void append(std::vector<int>& cpus, const std::vector<Core>& cores, std::size_t first, std::size_t count) {
  for (std::size_t i = first; i < first + count; ++i) cpus.insert(cpus.end(), cores[i].begin(), cores[i].end());
  std::sort(cpus.begin(), cpus.end());
}

}  // namespace

std::vector<std::vector<int>> bind_ranks(std::vector<Cpu> cpus, int ranks) {
  const auto order = [](const Cpu& cpu) { return std::tuple(cpu.package, cpu.numa, cpu.core, cpu.id); };
  std::sort(cpus.begin(), cpus.end(), [&](const Cpu& a, const Cpu& b) { return order(a) < order(b); });
  std::vector<Core> cores;
  std::map<std::pair<int, int>, std::vector<Core>> by_numa;
  const Cpu* previous = nullptr;
  for (const Cpu& cpu : cpus) {
    const bool same = previous != nullptr && previous->package == cpu.package && previous->numa == cpu.numa &&
                      previous->core == cpu.core;
    std::vector<Core>& of_numa = by_numa[{cpu.package, cpu.numa}];
    if (!same) {
      cores.emplace_back();
      of_numa.emplace_back();
    }
    cores.back().push_back(cpu.id);
    of_numa.back().push_back(cpu.id);
    previous = &cpu;
  }
  if (ranks < 1 || cores.size() < static_cast<std::size_t>(ranks)) return {};

  std::vector<std::vector<int>> bound(static_cast<std::size_t>(ranks));
  const int nodes = static_cast<int>(by_numa.size());
  const int per_node = ranks / nodes;
  const bool even = ranks % nodes == 0 && std::all_of(by_numa.begin(), by_numa.end(), [&](const auto& entry) {
                      return entry.second.size() >= static_cast<std::size_t>(per_node);
                    });
  if (even) {
    std::size_t rank = 0;
    for (const auto& [place, own] : by_numa) {
      for (int i = 0; i < per_node; ++i) {
        const Slice slice = slice_of(own.size(), per_node, i);
        append(bound[rank++], own, slice.offset, slice.count);
      }
    }
    return bound;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const Slice slice = slice_of(cores.size(), ranks, rank);
    append(bound[static_cast<std::size_t>(rank)], cores, slice.offset, slice.count);
  }
  return bound;
}

std::vector<Cpu> allowed_cpus() {
  std::vector<Cpu> cpus;
  for (const int id : allowed_ids()) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu{}", id);
    // Where /sys says nothing every hardware thread counts as a core.
    cpus.push_back({.id = id,
                    .package = number_in(folder + "/topology/physical_package_id", 0),
                    .numa = numa_of(folder),
                    .core = number_in(folder + "/topology/core_id", id)});
  }
  return cpus;
}

int allowed_cpu_count() { return std::max(1, static_cast<int>(allowed_ids().size())); }

std::string describe_cpus(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (last > i) text += fmt::format("-{}", cpus[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace maniple::launch
