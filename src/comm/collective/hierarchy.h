// Collectives across several hosts: shared memory inside a host, messages between hosts.
//
// Words:
//   host leader   the rank of a host that exchanges with other hosts in an operation: the root on the root's host, the
//                 first rank elsewhere. (Unrelated to the failure detector's leader.)
//   rail          one rank of every host; they exchange one slice of the buffer with each other. The number of rails is
//                 the smallest number of ranks on a host, so that all ranks of that host drive its link
//
//   all_reduce      reduce_scatter inside each host, all_reduce of each slice along its rail, all_gather inside each
//                   host. With H hosts a host's link carries 2(H-1)/H of the buffer in each direction.
//   reduce          inside each host to its leader, then between host leaders
//   broadcast       between host leaders, then inside each host
//   all_gather      inside each host, between host leaders, then inside each host: a part is sent to each host once
//   reduce_scatter  inside each host to its leader, between host leaders, then scattered inside each host
//   barrier         inside, between host leaders, inside
//   others          directly between the ranks: every byte has only one reader
//
// float16 and bfloat16 are reduced as float32 throughout, so results are rounded once for any number of hosts.
#pragma once

#include <vector>

#include "comm/call/operation.h"
#include "comm/collective/shm/arena_call.h"
#include "comm/transport/mesh.h"
#include <maniple/comm/topology.h>

namespace maniple {

class Hierarchy {
 public:
  /// `arena` is null if this host has only one rank of the group.
  Hierarchy(const Topology& topology, Arena* arena, const RegisteredTable& registered, Mesh& mesh)
      : topology_(topology), arena_(arena), registered_(registered), mesh_(mesh) {}

  void run(const Operation& operation, OperationContext& context, bool compare, std::string_view forced);

 private:
  struct Run;
  const Topology& topology_;
  Arena* arena_;
  const RegisteredTable& registered_;
  Mesh& mesh_;
  std::vector<std::byte> scratch_;  // partial results of host leaders, reused between calls
  std::vector<float> wide_in_;      // 16-bit operands as float32
  std::vector<float> wide_out_;
};

}  // namespace maniple
