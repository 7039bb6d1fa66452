// Ordinary memory that is read out of other processes: what may be read, who is read, and what happens when it is
// forbidden.
#include "comm/shm/peer_memory.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <numeric>

#include "comm/collective/shm/arena_call.h"

namespace maniple {
namespace peer_memory_test {
namespace {

// A child process, which lives until it is released, and what it shows.
class Neighbour {
 public:
  static constexpr std::uint64_t kValue = 0x1234567890abcdef;

  Neighbour() {
    auto* const shared = static_cast<PeerMemory::Identity*>(
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    child_ = ::fork();
    if (child_ == 0) {
      PeerMemory memory(1);
      auto value = std::make_unique<std::uint64_t>(kValue);
      shared[0] = memory.identify();
      shared[1].address = reinterpret_cast<std::uint64_t>(value.get());
      EXPECT_EQ(::write(ready[1], "r", 1), 1);
      for (;;) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    identity = shared[0];
    value_address = shared[1].address;
    ::close(ready[0]);
    ::close(ready[1]);
    ::munmap(shared, 4096);
  }
  ~Neighbour() { end(); }
  void end() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = -1;
  }

  PeerMemory::Identity identity;
  std::uint64_t value_address = 0;

 private:
  pid_t child_ = -1;
};

TEST(PeerMemory, IsReadWhereItLies) {
  const Neighbour neighbour;
  PeerMemory memory(2);
  std::uint64_t value = 0;
  ASSERT_TRUE(memory.read(1, neighbour.identity, &value, neighbour.value_address, sizeof value));
  EXPECT_EQ(value, Neighbour::kValue);
}

TEST(PeerMemory, AddressesThatAreNotMappedAreNotRead) {
  const Neighbour neighbour;
  PeerMemory memory(2);
  std::uint64_t value = 1;
  EXPECT_FALSE(memory.read(1, neighbour.identity, &value, 4096, sizeof value));
  EXPECT_EQ(value, 1U);
}

// The number of a process may mean another one where this one looks.
TEST(PeerMemory, AProcessThatIsNotTheOneThatShowedItselfIsNotRead) {
  const Neighbour neighbour;
  PeerMemory memory(2), own(1);
  std::uint64_t value = 1;
  PeerMemory::Identity other = neighbour.identity;
  other.word ^= 1;
  EXPECT_FALSE(memory.read(1, other, &value, neighbour.value_address, sizeof value));
  other = neighbour.identity;
  other.process = own.identify().process;
  EXPECT_FALSE(memory.read(1, other, &value, reinterpret_cast<std::uint64_t>(&value), sizeof value));
  other.process = neighbour.identity.process;
  other.word = 0;  // it had no random word
  EXPECT_FALSE(memory.read(1, other, &value, neighbour.value_address, sizeof value));
  EXPECT_EQ(value, 1U);
}

TEST(PeerMemory, AProcessThatHasEndedIsNotRead) {
  Neighbour neighbour;
  PeerMemory memory(2);
  std::uint64_t value = 0;
  ASSERT_TRUE(memory.read(1, neighbour.identity, &value, neighbour.value_address, sizeof value));
  neighbour.end();
  EXPECT_FALSE(memory.read(1, neighbour.identity, &value, neighbour.value_address, sizeof value));
}

// ---- Operations -----------------------------------------------------------------------------------------------------

// Runs a function as each rank of an arena, in a process each, as if each had a core. What it returns is what was
// wrong.
void run_processes(int size, const std::function<std::string(Arena&)>& run) {
  const auto segment = Segment::create(ArenaLayout::of(size, ArenaLayout::usual_stage_bytes(size)).bytes);
  const UniqueFd inherited(::dup(segment->fd()));  // a child has neither the mapping nor the descriptor of the segment
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    std::string wrong;
    try {
      AbortSignal abort;
      ArenaOptions options;
      options.rank = rank;
      options.size = size;
      options.cores = size;
      options.spin_us = 0;  // there may be fewer
      options.abort = &abort;
      Arena arena(Segment::adopt(UniqueFd(::dup(inherited.get())), segment->size()), options);
      wrong = run(arena);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
    ::_exit(wrong.empty() ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << "of " << size << " ranks";
  }
}

void run_one(Arena& arena, const Operation& operation) {
  static const RegisteredTable kNothing;
  OperationContext context(Deadline::after(std::chrono::seconds(60)));
  ArenaCall call{arena, kNothing, context, Signature::of(operation)};
  run_in_arena(call, operation);
}

std::uint32_t value_of(int from, int to, std::size_t i) {
  return static_cast<std::uint32_t>(from * 1000003 + to * 7919) + static_cast<std::uint32_t>(i);
}

// How much one rank gives to another: nothing, little or much; or the same to all.
std::size_t count_of(int from, int to, std::size_t count, bool uneven) {
  return uneven ? count * static_cast<std::size_t>((from + 2 * to) % 3) : count;
}

std::string all_to_all(Arena& arena, std::size_t count, bool uneven) {
  const int size = arena.size(), me = arena.rank();
  std::vector<std::size_t> in_counts, out_counts;
  std::vector<std::uint32_t> in;
  for (int r = 0; r < size; ++r) {
    in_counts.push_back(count_of(me, r, count, uneven));
    out_counts.push_back(count_of(r, me, count, uneven));
    for (std::size_t i = 0; i < in_counts.back(); ++i) in.push_back(value_of(me, r, i));
  }
  std::vector<std::uint32_t> out(std::accumulate(out_counts.begin(), out_counts.end(), std::size_t{0}));
  Operation op;
  op.op = Op::all_to_all;
  op.dtype = DType::int32;
  op.count = uneven ? 0 : count;
  op.in = reinterpret_cast<const std::byte*>(in.data());
  op.out = reinterpret_cast<std::byte*>(out.data());
  op.in_parts = uneven ? Parts(in_counts) : Parts(count, size);
  op.out_parts = uneven ? Parts(out_counts) : Parts(count, size);
  run_one(arena, op);
  for (int r = 0; r < size; ++r) {
    for (std::size_t i = 0; i < out_counts[static_cast<std::size_t>(r)]; ++i) {
      if (out[op.out_parts.offset(r) + i] != value_of(r, me, i))
        return fmt::format("all_to_all of {} from rank {}: element {}", count, r, i);
    }
  }
  return {};
}

std::string scatter(Arena& arena, std::size_t count, bool uneven) {
  const int size = arena.size(), me = arena.rank(), root = size - 1;
  std::vector<std::size_t> counts;
  std::vector<std::uint32_t> in;
  for (int r = 0; r < size; ++r) {
    counts.push_back(count_of(root, r, count, uneven));
    for (std::size_t i = 0; me == root && i < counts.back(); ++i) in.push_back(value_of(root, r, i));
  }
  std::vector<std::uint32_t> out(counts[static_cast<std::size_t>(me)]);
  Operation op;
  op.op = Op::scatter;
  op.dtype = DType::int32;
  op.root = root;
  op.count = uneven ? 0 : count;
  op.in = reinterpret_cast<const std::byte*>(in.data());
  op.out = reinterpret_cast<std::byte*>(out.data());
  op.parts = uneven ? Parts(counts) : Parts(count, size);
  run_one(arena, op);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] != value_of(root, me, i)) return fmt::format("scatter of {}: element {}", count, i);
  }
  return {};
}

std::string run_both(Arena& arena) {
  for (const std::size_t count : {4096, 25'001, 700'003}) {
    for (const bool uneven : {false, true}) {
      if (std::string wrong = all_to_all(arena, count, uneven); !wrong.empty()) return wrong;
      if (arena.size() < 4) continue;
      if (std::string wrong = scatter(arena, count, uneven); !wrong.empty()) return wrong;
    }
  }
  return {};
}

TEST(PeerMemory, AllToAllAndScatterTakeNoStage) {
  for (const int size : {2, 3, 4, 5}) {
    run_processes(size, [](Arena& arena) {
      if (std::string wrong = run_both(arena); !wrong.empty()) return wrong;
      if (!arena.reads_peers()) return std::string("it has stopped reading");
      return std::string(arena.step_base() == 0 ? "" : "something went through the stage");
    });
  }
}

// broadcast, gather and all_gather of values that differ from call to call; `counts` elements from each rank.
std::string move(Arena& arena, Op kind, const std::vector<std::size_t>& counts, int root, int number) {
  const int me = arena.rank();
  const bool gathers = kind != Op::broadcast;
  const auto value = [number](int from, std::size_t i) { return value_of(from, number, i); };
  Operation op;
  op.op = kind;
  op.dtype = DType::int32;
  op.root = root;
  op.parts = Parts(counts);
  const std::size_t own = counts[static_cast<std::size_t>(gathers ? me : root)];
  op.count = gathers ? 0 : own;
  std::vector<std::uint32_t> in(own);
  for (std::size_t i = 0; i < own; ++i) in[i] = value(me, i);
  std::vector<std::uint32_t> gathered(kind == Op::all_gather || me == root ? op.parts.total() : 0);
  std::vector<std::uint32_t>& out = gathers ? gathered : in;
  op.in = reinterpret_cast<const std::byte*>(in.data());
  op.out = reinterpret_cast<std::byte*>(out.data());
  run_one(arena, op);
  if (out.empty()) return {};
  for (int r = gathers ? 0 : root; r < (gathers ? arena.size() : root + 1); ++r) {
    const std::size_t begin = gathers ? op.parts.offset(r) : 0;
    for (std::size_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i) {
      if (out[begin + i] != value(r, i)) return fmt::format("call {}: element {} of rank {}", number, i, r);
    }
  }
  return {};
}

// The first calls of a kind and size try both ways: each carries the right bytes, and all ranks take the same.
TEST(PeerMemory, BothWaysAreTried) {
  constexpr int kCalls = 2 * static_cast<int>(FasterWay::kTries) + 2;
  for (const int size : {2, 3, 4}) {
    run_processes(size, [](Arena& arena) {
      for (const Op kind : {Op::broadcast, Op::gather, Op::all_gather, Op::scatter, Op::all_to_all}) {
        for (const int root : {0, arena.size() - 1}) {
          int staged = 0;
          for (int number = 0; number < kCalls; ++number) {
            const std::uint32_t before = arena.step_base();
            std::vector<std::size_t> counts;
            for (int r = 0; r < arena.size(); ++r) counts.push_back(30'000 + 1'000 * static_cast<std::size_t>(r));
            std::string wrong = kind == Op::scatter      ? scatter(arena, 40'000, false)
                                : kind == Op::all_to_all ? all_to_all(arena, 50'000, false)
                                                         : move(arena, kind, counts, root, number);
            if (!wrong.empty()) return fmt::format("operation {}, {}", static_cast<int>(kind), wrong);
            if (number < 2 * static_cast<int>(FasterWay::kTries)) staged += arena.step_base() != before ? 1 : 0;
          }
          // (Of the operations that have no root here, and of scatter, the second round is no longer at the beginning.)
          const bool first = root == 0 || kind == Op::broadcast || kind == Op::gather;
          if (first && staged != static_cast<int>(FasterWay::kTries))
            return fmt::format("operation {}, root {}: {} calls through the stage", static_cast<int>(kind), root,
                               staged);
        }
      }
      return std::string();
    });
  }
}

// As a container does it.
void forbid_reading() {
  sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(rules), rules};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("seccomp failed");
}

TEST(PeerMemory, WhereOneRankMayNotReadAllTakeTheStage) {
  for (const int size : {2, 4}) {
    run_processes(size, [](Arena& arena) {
      if (arena.rank() == 1) forbid_reading();
      if (std::string wrong = run_both(arena); !wrong.empty()) return wrong;
      if (arena.reads_peers()) return std::string("it still reads");
      return std::string(arena.step_base() != 0 ? "" : "nothing went through the stage");
    });
  }
}

}  // namespace
}  // namespace peer_memory_test
}  // namespace maniple
