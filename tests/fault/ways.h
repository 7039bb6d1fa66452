// The ways in which ranks that are processes talk to each other, as a test parameter.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "harness/run_ranks.h"

namespace maniple::harness {

class EveryTransport : public testing::TestWithParam<TransportKind> {};

inline auto process_transports() { return testing::Values(TransportKind::shm, TransportKind::tcp); }

inline std::string transport_name(const testing::TestParamInfo<TransportKind>& transport) {
  return std::string(to_string(transport.param));
}

}  // namespace maniple::harness
