#include "harness/start_process.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/unique_fd.h"

extern char** environ;

namespace maniple::harness {
namespace {

// GoogleTest's own variables would make a rank write reports or run another shard.
bool is_inherited(std::string_view variable, const std::vector<std::pair<std::string, std::string>>& replaced) {
  const std::string_view name = variable.substr(0, variable.find('='));
  if (name.starts_with("GTEST_") || name == "XML_OUTPUT_FILE" || name.starts_with("TEST_")) return false;
  return std::none_of(replaced.begin(), replaced.end(), [&](const auto& pair) { return pair.first == name; });
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& text : strings) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

}  // namespace

std::vector<std::string> this_test_again() {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr) throw std::logic_error("run_ranks outside of a test");
  const std::string program = link_target("/proc/self/exe");
  return {program, fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name()),
          "--gtest_also_run_disabled_tests", "--gtest_repeat=1", "--gtest_output="};
}

pid_t start_this_test_again(const std::vector<std::pair<std::string, std::string>>& env, int channel) {
  return start_program(this_test_again(), env, channel);
}

pid_t start_program(std::vector<std::string> arguments, const std::vector<std::pair<std::string, std::string>>& env,
                    int channel) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (is_inherited(*variable, env)) variables.emplace_back(*variable);
  }
  for (const auto& [name, value] : env) variables.push_back(name + "=" + value);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (channel >= 0)
    posix_spawn_file_actions_adddup2(&actions, channel, channel);  // onto itself: clears close-on-exec in the child
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, arguments.front().c_str(), &actions, &attributes, pointers(arguments).data(),
                                   pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) throw std::system_error(error, std::generic_category(), "starting " + arguments.front());
  return pid;
}

void write_secret(const std::string& path) {
  std::random_device random;
  std::string digits;
  for (int i = 0; i < 8; ++i) digits += fmt::format("{:08x}", random());
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file || ::write(file.get(), digits.data(), digits.size()) != static_cast<ssize_t>(digits.size())) {
    throw std::system_error(errno, std::generic_category(), path);
  }
}

std::uint16_t free_loopback_port() {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto port = static_cast<std::uint16_t>(20000 + random() % 10000);
    address.sin_port = htons(port);
    const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::bind(probe.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return port;
  }
  throw std::runtime_error("no free port on loopback");
}

}  // namespace maniple::harness
