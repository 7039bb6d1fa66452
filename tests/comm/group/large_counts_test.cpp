// More elements than an int can count. MPI counts in int, so calls are cut into pieces: here with a small limit, which
// costs nothing, and with more than 2^31 elements and bytes, which needs memory and time.
#include <dlfcn.h>

#include <cstdint>

#include "harness/run_ranks.h"
#include <maniple/comm/error.h>

namespace {

int calls = 0;
int largest = 0;

}  // namespace

// The program's own function comes before MPI's, which is called by its other name. Handles are pointers in Open MPI
// and ints in MPICH; a register holds either.
extern "C" __attribute__((visibility("default"))) int MPI_Iallreduce(const void* in, void* out, int count,
                                                                     std::intptr_t type, std::intptr_t op,
                                                                     std::intptr_t comm, void* request) {
  ++calls;
  largest = std::max(largest, count);
  void* library = ::dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = ::dlopen("libmpich.so.12", RTLD_LAZY | RTLD_NOLOAD);
  using Call = int (*)(const void*, void*, int, std::intptr_t, std::intptr_t, std::intptr_t, void*);
  return reinterpret_cast<Call>(::dlsym(library, "PMPI_Iallreduce"))(in, out, count, type, op, comm, request);
}

namespace maniple::harness {
namespace {

constexpr std::size_t kPiece = 1000;

TEST(Pieces, EveryLengthAroundALimit) {
  run_ranks(
      {.n = 3, .as = As::processes, .backend = "mpi", .env = {{"MANIPLE_MPI_PIECE", std::to_string(kPiece)}}},
      [](Rank& r) {
        for (const std::size_t count : {std::size_t{1}, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece, 5 * kPiece + 7}) {
          SCOPED_TRACE(count);
          calls = largest = 0;
          std::vector<std::int32_t> whole(count);
          for (std::size_t i = 0; i < count; ++i) whole[i] = static_cast<std::int32_t>(i) + r.rank;
          r.world->all_reduce(buffer_of(whole));
          EXPECT_EQ(calls, static_cast<int>((count + kPiece - 1) / kPiece));
          EXPECT_LE(largest, static_cast<int>(kPiece));
          std::vector<double> mean(count, 3.0 * r.rank), own(count, 1.0 + r.rank), rooted(count);
          r.world->all_reduce(buffer_of(mean), ReduceOp::avg);
          r.world->reduce(buffer_of(own), buffer_of(rooted), 1);
          std::vector<double> spread(count, -1);
          for (std::size_t i = 0; i < count && r.rank == 2; ++i) spread[i] = static_cast<double>(i);
          r.world->broadcast(buffer_of(spread), 2);  // in bytes: a limit may fall inside an element
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_EQ(whole[i], 3 * static_cast<std::int32_t>(i) + 3) << i;
            ASSERT_EQ(mean[i], 3.0) << i;
            ASSERT_EQ(spread[i], static_cast<double>(i)) << i;
            if (r.rank == 1) {
              ASSERT_EQ(rooted[i], 6.0) << i;
            }
          }
        }
      });
}

TEST(Pieces, ImpossibleLimitIsRefused) {
  run_ranks({.n = 2, .as = As::processes, .backend = "mpi", .init = false, .env = {{"MANIPLE_MPI_PIECE", "0"}}},
            [](Rank& r) {
              try {
                r.init();
                ADD_FAILURE() << "a limit of nothing was accepted";
              } catch (const InvalidArgument& error) {
                EXPECT_NE(std::string(error.what()).find("MANIPLE_MPI_PIECE"), std::string::npos) << error.what();
              }
              r.phase("refused on both");
            });
}

// ---- Two ranks with a little more than 2 GiB each -------------------------------------------------------------------

constexpr std::size_t kMany = (std::size_t{1} << 31) + 5;

RunOptions large() {
  RunOptions run;
  run.n = 2;
  run.as = As::processes;
  run.timeout = Seconds(280);
  run.limit = Seconds(290);
  return run;
}

std::int8_t value_at(std::size_t i) { return static_cast<std::int8_t>(i % 61); }

// Everywhere would take long: both ends, and around each multiple of 2^28.
std::vector<std::size_t> places_to_look() {
  std::vector<std::size_t> places = {0, kMany - 1};
  for (std::size_t at = std::size_t{1} << 28; at < kMany; at += std::size_t{1} << 28)
    places.insert(places.end(), {at - 1, at, at + 1});
  return places;
}

void fill(std::vector<std::int8_t>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_at(i);
}

TEST(Large, AllReduceOfMoreThanTwoToThe31) {
  run_ranks(large(), [](Rank& r) {
    std::vector<std::int8_t> values(kMany);
    fill(values);
    r.world->all_reduce(buffer_of(values), ReduceOp::sum);
    for (const std::size_t i : places_to_look()) EXPECT_EQ(values[i], 2 * value_at(i)) << i;
    fill(values);
    values.back() = static_cast<std::int8_t>(r.rank);
    r.world->all_reduce(buffer_of(values), ReduceOp::max);
    EXPECT_EQ(values.back(), 1);
    EXPECT_EQ(values.front(), value_at(0));
  });
}

TEST(Large, BroadcastOfMoreThanTwoGiB) {
  run_ranks(large(), [](Rank& r) {
    std::vector<std::int8_t> values(kMany);
    if (r.rank == 1) fill(values);
    r.world->broadcast(buffer_of(values), 1);
    for (const std::size_t i : places_to_look()) EXPECT_EQ(values[i], value_at(i)) << i;
  });
}

TEST(Large, SendOfMoreThanTwoGiB) {
  run_ranks(large(), [](Rank& r) {
    std::vector<std::int8_t> values(kMany);
    if (r.rank == 0) {
      fill(values);
      r.world->send(buffer_of(values), 1);
    } else {
      r.world->recv(buffer_of(values), 0);
      for (const std::size_t i : places_to_look()) EXPECT_EQ(values[i], value_at(i)) << i;
    }
    r.world->barrier();
  });
}

}  // namespace
}  // namespace maniple::harness
