// Whether an authentic peer belongs here: job, generation, world size, rank. Pure.
#pragma once

#include <string>
#include <string_view>

#include "net/handshake_wire.h"

namespace maniple {

struct Admission {
  std::string_view kind;  ///< for counting and throttling: one of a fixed set
  std::string reason;     ///< empty: it belongs here
};

Admission judge(const Identity& here, const Address& here_address, const WireHello& there,
                const Address& there_address);

}  // namespace maniple
