// Topology: which ranks of a group share a host.
//
//   const maniple::Topology& topology = world->topology();
//   const bool first_on_host = topology.local_rank() == 0;
//   std::cout << topology.size() << " ranks on " << topology.node_count() << " hosts" << std::endl;
//
// Maniple detects hosts: two ranks share a host if they see the same kernel boot id and live in the same network, IPC
// and user namespaces, so that they can share memory. It does not use variables such as LOCAL_RANK.
#pragma once

#include <string>
#include <vector>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct Topology {
  struct Member {
    int global_rank = 0;  ///< rank in the world
    int node_rank = 0;    ///< index of its host; hosts are numbered in the order of their first rank
    int local_rank = 0;   ///< index among the group's ranks on that host
    std::string host;     ///< host name, for messages
    int pid = 0;
  };
  int rank = 0;                         ///< group rank of the calling process
  std::vector<Member> members;          ///< by group rank
  std::vector<std::vector<int>> nodes;  ///< the group's ranks on each host, ascending

  int size() const noexcept { return static_cast<int>(members.size()); }
  int node_count() const noexcept { return static_cast<int>(nodes.size()); }
  int node_rank() const { return members.at(rank).node_rank; }
  int local_rank() const { return members.at(rank).local_rank; }
  int local_size() const { return static_cast<int>(nodes.at(node_rank()).size()); }
};

}  // namespace maniple
