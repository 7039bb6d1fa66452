// Every mesh algorithm against a naive reference: world sizes 1 to 9, counts that divide and that do not, nothing,
// in place and not, even and uneven parts, over TCP and over rings.
#include <gtest/gtest.h>

#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "harness/sanitizers.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "comm/base/files.h"
#include "comm/transport/mesh_world.h"

namespace maniple::test {
namespace {

// Small whole numbers: sums are exact in float32, so that every order of additions gives the same.
template <class T>
T value_at(int rank, std::size_t index) {
  return static_cast<T>(static_cast<int>((index * 7 + static_cast<std::size_t>(rank) * 13) % 61) - 20);
}

enum class Place { apart, own_part };  // of the input relative to the output

struct Case {
  const MeshEntry* entry;
  int size;
  std::size_t count;
  ReduceOp reduce = ReduceOp::sum;
  Place place = Place::apart;
  bool uneven = false;
  int root = 0;
};

Parts parts_of(const Case& test) {
  if (!test.uneven) return Parts(test.count, test.size);
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < test.size; ++rank) counts.push_back(test.count * static_cast<std::size_t>((rank + 1) % 3));
  return Parts(counts);
}

template <class T>
T reduced(const Case& test, std::size_t index) {
  T result = value_at<T>(0, index);
  const auto factor = static_cast<T>(test.reduce.factor());
  if (test.reduce.kind() == ReduceOp::premul_sum) result = static_cast<T>(result * factor);
  for (int rank = 1; rank < test.size; ++rank) {
    const T next = value_at<T>(rank, index);
    switch (test.reduce.kind()) {
      case ReduceOp::max: result = std::max(result, next); break;
      case ReduceOp::premul_sum: result = static_cast<T>(result + next * factor); break;
      default: result = static_cast<T>(result + next);
    }
  }
  return test.reduce.kind() == ReduceOp::avg ? static_cast<T>(result / static_cast<T>(test.size)) : result;
}

template <class T>
class Call {
 public:
  Call(const Case& test, int rank) : test_(test), rank_(rank), parts_(parts_of(test)) {}

  void run(MeshWorld& world, std::uint64_t seq) {
    Operation operation;
    operation.op = test_.entry->op;
    operation.dtype = dtype_of<T>();
    operation.reduce = test_.reduce;
    operation.root = test_.root;
    operation.count = test_.uneven ? 0 : test_.count;
    operation.seq = seq;
    prepare(operation);
    world.call(rank_, test_.entry->run, operation);
    check(operation);
  }

 private:
  bool is_root() const { return rank_ == test_.root; }

  // Gives the operation memory with this rank's input in it. A count of 0: the operation has none.
  void lay_out(Operation& operation, std::size_t in_count, std::size_t out_count, std::size_t own_offset,
               bool in_is_own) {
    Place place = test_.place;
    if (in_count == 0 || out_count == 0) place = Place::apart;
    memory_.assign(in_count + out_count, T{99});
    T* in = memory_.data();
    T* out = memory_.data() + in_count;
    if (place != Place::apart) {
      memory_.assign(std::max(in_count, out_count), T{99});
      in = out = memory_.data();
      (in_is_own ? in : out) += own_offset;
    }
    input_ = in;
    output_ = out;
    operation.in = reinterpret_cast<const std::byte*>(in);
    operation.out = reinterpret_cast<std::byte*>(out);
    for (std::size_t i = 0; i < in_count; ++i) in[i] = value_at<T>(rank_, i);
  }

  void prepare(Operation& operation) {
    const std::size_t own = parts_.count(rank_);
    const std::size_t offset = parts_.offset(rank_);
    const std::size_t all = parts_.total();
    const std::size_t one = test_.count;
    switch (operation.op) {
      case Op::broadcast:
        lay_out(operation, 0, one, 0, true);
        for (std::size_t i = 0; i < one && is_root(); ++i) output_[i] = value_at<T>(rank_, i);
        break;
      case Op::reduce: lay_out(operation, one, is_root() ? one : 0, 0, true); break;
      case Op::all_reduce: lay_out(operation, one, one, 0, true); break;
      case Op::gather:
        lay_out(operation, own, is_root() ? all : 0, offset, true);
        operation.parts = parts_;
        break;
      case Op::all_gather:
        lay_out(operation, own, all, offset, true);
        operation.parts = parts_;
        break;
      case Op::scatter:
        lay_out(operation, is_root() ? all : 0, own, offset, false);
        operation.parts = parts_;
        break;
      case Op::reduce_scatter:
        lay_out(operation, all, own, offset, false);
        operation.parts = parts_;
        break;
      case Op::all_to_all: prepare_all_to_all(operation); break;
      default: break;
    }
  }

  // Rank i sends rank j `count * ((i + 2 j) % 3)` elements when uneven.
  std::size_t pair_count(int from, int to) const {
    return test_.uneven ? test_.count * static_cast<std::size_t>((from + 2 * to) % 3) : test_.count;
  }
  void prepare_all_to_all(Operation& operation) {
    std::vector<std::size_t> to;
    std::vector<std::size_t> from;
    for (int peer = 0; peer < test_.size; ++peer) {
      to.push_back(pair_count(rank_, peer));
      from.push_back(pair_count(peer, rank_));
    }
    operation.in_parts = Parts(to);
    operation.out_parts = Parts(from);
    lay_out(operation, operation.in_parts.total(), operation.out_parts.total(), 0, true);
  }

  void expect(std::size_t at, T wanted) {
    if (output_[at] != wanted && ++wrong_ == 1) {
      ADD_FAILURE() << to_string(test_.entry->op) << " " << test_.entry->name << ", " << test_.size << " ranks, count "
                    << test_.count << ", rank " << rank_ << ", root " << test_.root << ", uneven " << test_.uneven
                    << ", place " << static_cast<int>(test_.place) << ": element " << at << " is " << +output_[at]
                    << ", expected " << +wanted;
    }
  }

  void check(const Operation& operation) {
    const std::size_t offset = parts_.offset(rank_);
    switch (operation.op) {
      case Op::broadcast:
        for (std::size_t i = 0; i < test_.count; ++i) expect(i, value_at<T>(test_.root, i));
        break;
      case Op::reduce:
        for (std::size_t i = 0; i < test_.count && is_root(); ++i) expect(i, reduced<T>(test_, i));
        break;
      case Op::all_reduce:
        for (std::size_t i = 0; i < test_.count; ++i) expect(i, reduced<T>(test_, i));
        break;
      case Op::gather:
      case Op::all_gather:
        if (operation.op == Op::gather && !is_root()) break;
        for (int peer = 0; peer < test_.size; ++peer) {
          for (std::size_t i = 0; i < parts_.count(peer); ++i) expect(parts_.offset(peer) + i, value_at<T>(peer, i));
        }
        break;
      case Op::scatter:
        for (std::size_t i = 0; i < parts_.count(rank_); ++i) expect(i, value_at<T>(test_.root, offset + i));
        break;
      case Op::reduce_scatter:
        for (std::size_t i = 0; i < parts_.count(rank_); ++i) expect(i, reduced<T>(test_, offset + i));
        break;
      case Op::all_to_all:
        for (int peer = 0; peer < test_.size; ++peer) {
          std::size_t begin = 0;
          for (int before = 0; before < rank_; ++before) begin += pair_count(peer, before);
          for (std::size_t i = 0; i < operation.out_parts.count(peer); ++i)
            expect(operation.out_parts.offset(peer) + i, value_at<T>(peer, begin + i));
        }
        break;
      default: break;
    }
  }

  const Case& test_;
  int rank_;
  Parts parts_;
  std::vector<T> memory_;
  T* input_ = nullptr;
  T* output_ = nullptr;
  int wrong_ = 0;
};

bool has_parts(Op op) {
  return op == Op::gather || op == Op::all_gather || op == Op::scatter || op == Op::reduce_scatter ||
         op == Op::all_to_all;
}
bool reduces(Op op) { return op == Op::reduce || op == Op::all_reduce || op == Op::reduce_scatter; }

std::vector<Case> cases_for(int size, const std::vector<std::size_t>& counts) {
  std::vector<Case> cases;
  for (const MeshEntry& entry : mesh_algorithms()) {
    for (const std::size_t count : counts) {
      for (const Place place : {Place::apart, Place::own_part}) {
        if (entry.op == Op::all_to_all && place != Place::apart) continue;
        if (place != Place::apart && count != 7 && count != 70'001) continue;  // one path for small and one for large
        for (const bool uneven : {false, true}) {
          if (uneven && !has_parts(entry.op)) continue;
          // Parts are per rank: keep the whole buffer near `count`.
          const std::size_t each =
              has_parts(entry.op) && count > 1000 ? count / static_cast<std::size_t>(size) + 1 : count;
          cases.push_back(
              {.entry = &entry, .size = size, .count = each, .place = place, .uneven = uneven, .root = (size - 1) / 2});
        }
      }
    }
    if (reduces(entry.op)) {
      for (const ReduceOp op : {ReduceOp(ReduceOp::max), ReduceOp(ReduceOp::avg), ReduceOp::premultiplied(3)}) {
        for (const std::size_t count : {std::size_t{7}, std::size_t{30'011}}) {
          cases.push_back({.entry = &entry, .size = size, .count = count, .reduce = op, .root = size - 1});
        }
      }
    }
  }
  return cases;
}

void run_matrix(const WorldOptions& options, const std::vector<std::size_t>& counts) {
  const std::vector<Case> cases = cases_for(options.size, counts);
  MeshWorld world(options);
  world.run([&](int rank) {
    std::uint64_t seq = 0;
    for (const Case& test : cases) {
      Call<float>(test, rank).run(world, seq++);
      if (test.count <= 1000) Call<std::int32_t>(test, rank).run(world, seq++);
      if (::testing::Test::HasFailure()) throw Aborted("a case failed");
    }
  });
}

class MeshMatrix : public ::testing::TestWithParam<int> {};

TEST_P(MeshMatrix, Tcp) { run_matrix({.size = GetParam(), .channel = Channel::tcp}, {0, 1, 7, 1000, 70'001, 300'000}); }
TEST_P(MeshMatrix, TcpOneStream) {
  run_matrix({.size = GetParam(), .channel = Channel::tcp, .streams = 1}, {7, 200'003});
}
TEST_P(MeshMatrix, TcpThatSleepsAtOnce) {
  WorldOptions options{.size = GetParam(), .channel = Channel::tcp};
  options.adjust = [](int, MeshOptions& mesh) { mesh.waiting = WaitPolicy::for_sockets(1, 1, 0); };
  run_matrix(options, {0, 7, 200'003});
}
TEST_P(MeshMatrix, Sealed) { run_matrix({.size = GetParam(), .channel = Channel::sealed}, {0, 7, 70'001, 300'000}); }
TEST_P(MeshMatrix, SealedOnOneStream) {
  run_matrix({.size = GetParam(), .channel = Channel::sealed, .streams = 1}, {7, 200'003});
}
TEST_P(MeshMatrix, Ring) { run_matrix({.size = GetParam(), .channel = Channel::ring}, {0, 1, 7, 1000, 70'001}); }
TEST_P(MeshMatrix, TinyRing) {
  run_matrix({.size = GetParam(), .channel = Channel::ring, .ring_capacity = 1024}, {0, 7, 1000});
}

// Under the sanitizers every step takes its time; three sizes show what there is to find.
INSTANTIATE_TEST_SUITE_P(WorldSizes, MeshMatrix,
                         ::testing::ValuesIn(harness::kSanitized ? std::vector<int>{1, 2, 5}
                                                                 : std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9}));

// Numbers whose sum depends on the order of additions: all ranks must hold the same bits, and the same in every run.
class MeshBits : public ::testing::TestWithParam<int> {};

TEST_P(MeshBits, IdenticalOnAllRanksAndInEveryRun) {
  const auto size = static_cast<std::size_t>(GetParam());
  constexpr std::size_t kCount = 50'000;
  for (const char* name : {"direct", "exchange", "ring"}) {
    std::vector<std::vector<float>> results[2];
    for (auto& result : results) {
      result.assign(size, std::vector<float>(kCount));
      MeshWorld world({.size = GetParam()});
      world.run([&](int rank) {
        auto& data = result[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < kCount; ++i)
          data[i] = 1.0F / static_cast<float>(1 + (i * 31 + static_cast<std::size_t>(rank) * 17) % 1009);
        Operation operation;
        operation.op = Op::all_reduce;
        operation.dtype = DType::float32;
        operation.count = kCount;
        operation.in = operation.out = reinterpret_cast<std::byte*>(data.data());
        world.call(rank, find_mesh_algorithm(Op::all_reduce, name)->run, operation);
      });
      for (const auto& data : result) EXPECT_EQ(data, result[0]) << name;
    }
    EXPECT_EQ(results[0][0], results[1][0]) << name;
  }
}
INSTANTIATE_TEST_SUITE_P(WorldSizes, MeshBits, ::testing::Values(2, 3, 5));

struct Carried {
  std::uint64_t sent = 0, received = 0;
};
/// Bytes of the TCP sockets of this process, by socket.
std::map<std::string, Carried> carried() {
  std::map<std::string, Carried> sockets;
  for (const std::string& name : names_in("/proc/self/fd")) {
    const std::string target = link_target("/proc/self/fd/" + name);
    tcp_info info{};
    socklen_t size = sizeof info;
    if (!target.starts_with("socket:") || ::getsockopt(std::stoi(name), IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
      continue;
    sockets[target] = {info.tcpi_bytes_acked, info.tcpi_bytes_received};
  }
  return sockets;
}

/// How many sockets have sent and received since.
std::size_t used_both_ways(const std::map<std::string, Carried>& since) {
  std::size_t count = 0;
  for (const auto& [name, now] : carried()) {
    const auto found = since.find(name);
    if (found != since.end() && now.sent > found->second.sent && now.received > found->second.received) ++count;
  }
  return count;
}

void sum_of(MeshWorld& world, int rank, std::uint64_t seq, std::size_t count) {
  std::vector<float> data(count, static_cast<float>(rank + 1));
  Operation operation;
  operation.op = Op::all_reduce;
  operation.dtype = DType::float32;
  operation.count = count;
  operation.seq = seq;
  operation.in = operation.out = reinterpret_cast<std::byte*>(data.data());
  world.call(rank, mesh_all_reduce_direct, operation);
  const auto expected = static_cast<float>(world.size() * (world.size() + 1) / 2);
  EXPECT_EQ(std::count(data.begin(), data.end(), expected), static_cast<std::ptrdiff_t>(count));
}

void sum_of_ranks(MeshWorld& world, std::uint64_t seq, std::size_t count) {
  world.run([&](int rank) { sum_of(world, rank, seq, count); });
}

// Each pair begins with a connection for each direction and goes on with one for both, unless it has keys for one
// direction.
TEST(MeshConnections, AreJoinedAfterTheFirstExchange) {
  for (const int size : {2, 3, 5}) {
    const auto pairs = static_cast<std::size_t>(size * (size - 1) / 2);
    MeshWorld world({.size = size, .streams = 1});
    std::uint64_t seq = 0;
    for (int i = 0; i < 3; ++i) sum_of_ranks(world, seq++, 1000);
    const auto joined = carried();
    for (const std::size_t count : {1000, 0, 300'001, 1}) sum_of_ranks(world, seq++, count);
    EXPECT_EQ(used_both_ways(joined), 2 * pairs);  // both ends are here
  }
}

TEST(MeshConnections, ThatAreEncryptedStayApart) {
  MeshWorld world({.size = 2, .channel = Channel::sealed, .streams = 1});
  sum_of_ranks(world, 0, 1000);
  const auto opened = carried();
  for (std::uint64_t seq = 1; seq < 4; ++seq) sum_of_ranks(world, seq, 1000);
  EXPECT_EQ(used_both_ways(opened), 0U);
}

std::ptrdiff_t open_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  std::ptrdiff_t count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

TEST(MeshConnections, LeaveNoDescriptorOpenAfterSuccessAndAfterFailure) {
  const auto before = open_descriptors();
  for (const bool fails : {false, true}) {
    MeshWorld world({.size = 4});
    if (fails) {
      EXPECT_THROW(world.run([&](int rank) {
        if (rank == 2) throw Aborted("in the middle");
        sum_of(world, rank, 0, 1 << 18);
      }),
                   Aborted);
    } else {
      sum_of_ranks(world, 0, 1 << 18);
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(MeshConnections, OfARankThatEndsLoseItOnceJoinedToo) {
  for (const int lost : {0, 1}) {
    MeshWorld world({.size = 2});
    for (std::uint64_t seq = 0; seq < 3; ++seq) sum_of_ranks(world, seq, 1000);
    world.drop(lost);
    std::vector<float> data(100'000);
    Operation operation;
    operation.op = Op::all_reduce;
    operation.dtype = DType::float32;
    operation.count = data.size();
    operation.seq = 3;
    operation.in = operation.out = reinterpret_cast<std::byte*>(data.data());
    try {
      world.call(1 - lost, mesh_all_reduce_direct, operation);
      ADD_FAILURE() << "nothing was noticed of the end of rank " << lost;
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.rank(), lost);
    }
  }
}

TEST(MeshAlgorithms, TableHasEveryOperationAndFindsByName) {
  for (const Op op : {Op::broadcast, Op::reduce, Op::all_reduce, Op::gather, Op::all_gather, Op::scatter,
                      Op::reduce_scatter, Op::all_to_all, Op::barrier}) {
    const MeshEntry* entry = find_mesh_algorithm(op, "direct");
    ASSERT_NE(entry, nullptr) << to_string(op);
    EXPECT_EQ(entry->op, op);
  }
  EXPECT_EQ(find_mesh_algorithm(Op::barrier, "ring"), nullptr);
}

}  // namespace
}  // namespace maniple::test
