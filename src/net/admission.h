// Who may connect: whether an authenticated peer belongs here (job, generation, world size, rank), and which program an
// unauthenticated one probably is, for the log. Pure.
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

/// "HTTP client on training port", ...; "not a Maniple peer (wrong magic)" when it is none of the known ones.
std::string_view describe_foreign_client(std::string_view first_bytes) noexcept;

}  // namespace maniple
