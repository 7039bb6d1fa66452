#include "net/port_holder.h"

#include <gtest/gtest.h>

namespace maniple {
namespace {

constexpr std::string_view kTable =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0000 100 0 0 10 "
    "0\n"
    "   1: 0100007F:733C 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4343 1 0000 100 0 0 10 "
    "0\n"
    "   2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4444 1 0000 100 0 0 10 "
    "0\n";

TEST(PortReservation, FindsListenersOfThePortOnly) {
  EXPECT_EQ(listening_inodes(kTable, 29500), (std::vector<std::uint64_t>{4242}));
  EXPECT_EQ(listening_inodes(kTable, 22), (std::vector<std::uint64_t>{4444}));
  EXPECT_TRUE(listening_inodes(kTable, 80).empty());
  EXPECT_TRUE(listening_inodes("nonsense\n\n", 80).empty());
}

}  // namespace
}  // namespace maniple
