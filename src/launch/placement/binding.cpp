#include "launch/placement/binding.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/rank_arithmetic.h"
#include "comm/base/unique_fd.h"

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
  // The kernel rejects a set that is smaller than its own.
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

using Cores = std::vector<Core>;

/// Gives each rank `cores_per_rank` whole cores; fills NUMA nodes one after the other if all ranks fit that way.
std::vector<std::vector<int>> pack(const Cores& cores, const std::vector<Cores>& by_numa, int ranks,
                                   int cores_per_rank) {
  const auto each = static_cast<std::size_t>(cores_per_rank);
  const auto wanted = static_cast<std::size_t>(ranks);
  std::vector<std::vector<int>> bound;
  const auto fill = [&](const Cores& from) {
    for (std::size_t first = 0; first + each <= from.size() && bound.size() < wanted; first += each) {
      append(bound.emplace_back(), from, first, each);
    }
  };
  for (const Cores& own : by_numa) fill(own);
  if (bound.size() < wanted) {
    bound.clear();
    fill(cores);
  }
  if (bound.size() < wanted) bound.clear();
  return bound;
}

std::vector<std::vector<int>> slices(const Cores& cores, int ranks) {
  std::vector<std::vector<int>> bound(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const Slice slice = slice_of(cores.size(), ranks, rank);
    append(bound[static_cast<std::size_t>(rank)], cores, slice.offset, slice.count);
  }
  return bound;
}

}  // namespace

std::vector<std::vector<int>> bind_ranks(std::vector<Cpu> cpus, int ranks, int cores_per_rank) {
  const auto order = [](const Cpu& cpu) { return std::tuple(cpu.package, cpu.numa, cpu.core, cpu.id); };
  std::sort(cpus.begin(), cpus.end(), [&](const Cpu& a, const Cpu& b) { return order(a) < order(b); });
  Cores cores, threads;
  std::vector<Cores> by_numa;
  const Cpu* previous = nullptr;
  for (const Cpu& cpu : cpus) {
    const bool same_numa = previous != nullptr && previous->package == cpu.package && previous->numa == cpu.numa;
    if (!same_numa) by_numa.emplace_back();
    if (!same_numa || previous->core != cpu.core) {
      cores.emplace_back();
      by_numa.back().emplace_back();
    }
    cores.back().push_back(cpu.id);
    by_numa.back().back().push_back(cpu.id);
    threads.push_back({cpu.id});
    previous = &cpu;
  }
  if (ranks < 1) return {};
  const auto count = static_cast<std::size_t>(ranks);
  if (cores_per_rank > 0) return pack(cores, by_numa, ranks, cores_per_rank);
  if (cores.size() < count) return threads.size() < count ? std::vector<std::vector<int>>() : slices(threads, ranks);

  const std::size_t per_node = count / by_numa.size();
  const bool even = count % by_numa.size() == 0 && std::all_of(by_numa.begin(), by_numa.end(), [&](const Cores& own) {
                      return own.size() >= per_node;
                    });
  if (!even) return slices(cores, ranks);
  std::vector<std::vector<int>> bound;
  for (const Cores& own : by_numa) {
    for (std::vector<int>& block : slices(own, static_cast<int>(per_node))) bound.push_back(std::move(block));
  }
  return bound;
}

CoreBinding bind_part(const CoreRequest& request, const std::vector<Cpu>& allowed) {
  const auto count_cores = [&](const auto& counts) {
    std::set<std::tuple<int, int, int>> cores;
    for (const Cpu& cpu : allowed) {
      if (counts(cpu)) cores.emplace(cpu.package, cpu.numa, cpu.core);
    }
    return static_cast<int>(cores.size());
  };
  const int cores = count_cores([](const Cpu&) { return true; });
  CoreBinding binding;
  binding.threads =
      request.cores_per_rank > 0 ? request.cores_per_rank : std::max(1, cores / std::max(1, request.total));
  auto bound = bind_ranks(allowed, request.total, request.cores_per_rank);
  if (bound.empty()) {
    binding.why_not = fmt::format(
        "{} rank{}{} on {} cores", request.total, request.total == 1 ? "" : "s",
        request.cores_per_rank > 0 ? fmt::format(" with {} cores each", request.cores_per_rank) : "", cores);
    return binding;
  }
  const auto first = bound.begin() + request.first;
  binding.cpus.assign(std::make_move_iterator(first), std::make_move_iterator(first + request.count));
  const std::vector<int>& own = binding.cpus.front();
  binding.threads = count_cores([&](const Cpu& cpu) { return std::find(own.begin(), own.end(), cpu.id) != own.end(); });
  return binding;
}

std::vector<Cpu> describe_ids(const std::vector<int>& ids, const std::string& folder) {
  std::vector<Cpu> cpus;
  for (const int id : ids) {
    const std::string own = fmt::format("{}/cpu{}", folder, id);
    // Without information in /sys, each hardware thread counts as a core.
    cpus.push_back({.id = id,
                    .package = number_in(own + "/topology/physical_package_id", 0),
                    .numa = numa_of(own),
                    .core = number_in(own + "/topology/core_id", id)});
  }
  return cpus;
}

std::vector<Cpu> allowed_cpus() { return describe_ids(allowed_ids(), "/sys/devices/system/cpu"); }

std::string core_set_id() {
  std::string boot = file_text("/proc/sys/kernel/random/boot_id");
  while (!boot.empty() && boot.back() == '\n') boot.pop_back();
  return boot + " " + describe_cpus(allowed_ids());
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
