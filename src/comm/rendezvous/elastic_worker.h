// What a worker of an elastic job knows: its place in the launcher's page of members.
#pragma once

#include <cstdint>

#include "comm/rendezvous/membership_page.h"

namespace maniple {

inline constexpr const char* kMembersVariable = "MANIPLE_MEMBERS_FD";

/// The variable's value for worker number `worker` of the node.
std::string members_value(int fd, int worker, bool replaces);

struct ElasticWorker {
  MembershipPage page;
  int worker = 0;
  bool replaces = false;         ///< started while the job ran: it joins when its program asks for the next generation
  std::uint32_t generation = 0;  ///< of its current group; 0: none yet
};

/// Null unless the launcher started this process as a worker of an elastic job (`maniple run --elastic`). Removes the
/// variable from the environment. A child of fork() is not a worker. Throws ProtocolError for a damaged page.
ElasticWorker* elastic_worker();

}  // namespace maniple
