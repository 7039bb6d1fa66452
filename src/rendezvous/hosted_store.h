// The store's server inside rank 0.
//
// It outlives rank 0's group: others may still be reading, or may have come back already for the next one. So when rank
// 0 lets go the server stays until its last client has gone; if rank 0 joins again before that it gets the same server
// back.
#pragma once

#include <memory>

#include "store/tcp_store.h"

namespace maniple {

std::shared_ptr<TcpStoreServer> host_store(const Address& address, const Identity& identity, Deadline deadline);

}  // namespace maniple
