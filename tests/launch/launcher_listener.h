// Launchers on loopback that meet: the nodes of one job.
#pragma once

#include <memory>

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

}  // namespace maniple::launched
