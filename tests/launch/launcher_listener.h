// Launchers on loopback that meet: the nodes of one job; and the agents of --hosts.
#pragma once

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {

struct RendezvousSpot {
  std::string place = fmt::format("127.0.0.1:{}", harness::free_loopback_port());
  harness::TemporaryDirectory folder;
  std::string secret = folder.path() + "/secret";
  RendezvousSpot() { harness::write_secret(secret); }

  std::unique_ptr<Launched> node(const std::string& nodes, int rank, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"run",           "--nnodes", nodes, "--master", place,
                                          "--secret-file", secret,     "-n",  "2"};
    if (rank >= 0) arguments.insert(arguments.end(), {"--node-rank", std::to_string(rank)});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return std::make_unique<Launched>(arguments);
  }
};

/// The supervisor of the agent that a launcher with the mark in its environment has started for a host of --hosts; 0:
/// none.
inline pid_t agent_of(const std::string& mark, const std::string& host) {
  for (const pid_t pid : processes_with(mark)) {
    std::ifstream file(fmt::format("/proc/{}/cmdline", pid), std::ios::binary);
    std::vector<std::string> words;
    for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
    if (words.size() == 4 && words[1] == "run-agent" && words[3] == host) return pid;  // its children come after it
  }
  return 0;
}

}  // namespace maniple::launched
