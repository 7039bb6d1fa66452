#include "launch/process/rank_environment.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "comm/base/launcher_socket.h"
#include "comm/rendezvous/elastic_worker.h"

namespace maniple::launch {
namespace {

bool is_assignment_of(const std::string& entry, const std::string& name) {
  return entry.size() > name.size() && entry[name.size()] == '=' && entry.compare(0, name.size(), name) == 0;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < list.size();) {
    const auto end = std::min(list.find(',', begin), list.size());
    if (end > begin) words.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::string devices_of(const NodeEnvironment& node, const WorkerAssignment& assignment) {
  std::string list;
  for (int i = 0; i < assignment.device_count; ++i) {
    const auto index = static_cast<std::size_t>(assignment.first_device + i);
    const std::string name = index < node.devices.size() ? node.devices[index] : std::to_string(index);
    list += (i == 0 ? "" : ",") + name;
  }
  return list;
}

}  // namespace

void unset_variable(Environment& environment, const std::string& name) {
  std::erase_if(environment, [&](const std::string& entry) { return is_assignment_of(entry, name); });
}

void set_variable(Environment& environment, const std::string& name, const std::string& value) {
  unset_variable(environment, name);
  environment.push_back(name + "=" + value);
}

const std::string* find_variable(const Environment& environment, const std::string& name) {
  const auto found = std::find_if(environment.begin(), environment.end(),
                                  [&](const std::string& entry) { return is_assignment_of(entry, name); });
  return found == environment.end() ? nullptr : &*found;
}

Environment own_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

Environment rank_environment(const Environment& own, const NodeEnvironment& node, const WorkerAssignment& assignment) {
  Environment result = own;
  result.reserve(own.size() + 24);
  // Variables left over from an outer launcher would contradict the ones set below.
  for (const char* name : {"MANIPLE_GENERATION", "MANIPLE_SECRET_FD", "MANIPLE_SECRET_FILE", "MANIPLE_INIT_FD",
                           "MANIPLE_REPORT_FD", kMembersVariable, "MANIPLE_SPAWNED", "MANIPLE_STORE_HOSTED",
                           "MANIPLE_DEVICES_PER_PROCESS", "TORCHELASTIC_USE_AGENT_STORE"}) {
    unset_variable(result, name);
  }
  const auto set = [&](const char* name, const auto& value) { set_variable(result, name, fmt::format("{}", value)); };
  set("RANK", assignment.rank);
  set("WORLD_SIZE", assignment.world_size);
  set("LOCAL_RANK", assignment.local_rank);
  set("LOCAL_WORLD_SIZE", assignment.local_size);
  set("NODE_RANK", assignment.node_rank);
  set("MASTER_ADDR", node.master_addr);
  set("MASTER_PORT", node.master_port);
  if (node.job.empty()) {
    set("MANIPLE_SPAWNED", 1);
  } else {
    set("GROUP_RANK", assignment.node_rank);
    set("GROUP_WORLD_SIZE", node.node_count);
    set("ROLE_RANK", assignment.rank);
    set("ROLE_WORLD_SIZE", assignment.world_size);
    set("MANIPLE_JOB", node.job);
    set("MANIPLE_GENERATION", node.generation);
    set("MANIPLE_RESTART_COUNT", node.restarts);
    set("TORCHELASTIC_RESTART_COUNT", node.restarts);
    set("TORCHELASTIC_MAX_RESTARTS", node.max_restarts);
    set("TORCHELASTIC_RUN_ID", node.job);
  }
  if (node.secret_fd >= 0) set("MANIPLE_SECRET_FD", node.secret_fd);
  if (node.init_fd >= 0) set(kInitSocket, launcher_socket_value(node.init_fd));
  if (node.report_fd >= 0) set(kReportSocket, launcher_socket_value(node.report_fd));
  if (node.members_fd >= 0)
    set(kMembersVariable, members_value(node.members_fd, assignment.local_rank, node.joins_late));
  if (node.gpu_queues > 0 && find_variable(result, "CUDA_DEVICE_MAX_CONNECTIONS") == nullptr) {
    set("CUDA_DEVICE_MAX_CONNECTIONS", node.gpu_queues);
  }
  if (find_variable(result, "OMP_NUM_THREADS") == nullptr) {
    set("OMP_NUM_THREADS", std::max(1, node.cores / std::max(1, assignment.local_size)));
  }
  if (assignment.device_count > 0) {
    set("CUDA_VISIBLE_DEVICES", devices_of(node, assignment));
    set("MANIPLE_DEVICES_PER_PROCESS", assignment.device_count);
  }
  return result;
}

std::vector<std::string> visible_devices(const Environment& own) {
  if (const std::string* chosen = find_variable(own, "CUDA_VISIBLE_DEVICES")) {
    return split(chosen->substr(std::strlen("CUDA_VISIBLE_DEVICES=")));
  }
  std::vector<int> numbers;
  if (DIR* folder = ::opendir("/dev")) {
    constexpr std::size_t kPrefix = 6;
    while (const dirent* entry = ::readdir(folder)) {
      const char* digits = entry->d_name + kPrefix;
      if (std::strncmp(entry->d_name, "nvidia", kPrefix) != 0 || *digits == '\0') continue;
      if (std::strspn(digits, "0123456789") == std::strlen(digits)) numbers.push_back(std::atoi(digits));
    }
    ::closedir(folder);
  }
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> names;
  for (const int number : numbers) names.push_back(std::to_string(number));
  return names;
}

}  // namespace maniple::launch
