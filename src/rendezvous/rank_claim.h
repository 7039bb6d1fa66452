// A rank belongs to one process in one generation, and its joins are numbered.
//
// The n-th join of each rank goes with the n-th join of the others: so a group can be destroyed and made again on the
// same store, at any pace, without meeting keys of the time before.
#pragma once

#include <memory>
#include <string>

#include "net/handshake.h"
#include <maniple/comm/store.h>

namespace maniple {

/// A view of the store for this join. Throws InvalidArgument naming both processes if the rank is another one's.
std::shared_ptr<Store> claim_rank(std::shared_ptr<Store> store, const Identity& identity);

/// The view of the n-th join, for those who count by other means.
std::shared_ptr<Store> store_for_init(std::shared_ptr<Store> store, const Identity& identity, std::int64_t join);

/// "host worker3, pid 4711".
std::string describe_this_process();

}  // namespace maniple
