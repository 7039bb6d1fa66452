// Makes the world's group from the result of a rendezvous.
#pragma once

#include <memory>
#include <string>

#include "comm/rendezvous/rendezvous.h"
#include <maniple/comm/process_group.h>

namespace maniple {

std::shared_ptr<ProcessGroup> make_world(RendezvousResult result, const InitOptions& options, Deadline deadline,
                                         const std::string& name = "world");

}  // namespace maniple
