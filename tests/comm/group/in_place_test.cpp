// Operations in place, by every path (inline, staged, direct, out of another process, over the mesh, in a hierarchy);
// and every other overlap of input and output, which is refused before anything moves.
#include <cstdlib>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

using testing::HasSubstr;

std::int32_t value(std::size_t i, int of) {
  return static_cast<std::int32_t>(i * 7 + static_cast<std::size_t>(of) * 100'003);
}

// One buffer of a part for each rank, in which all operations take place.
class InPlace {
 public:
  InPlace(Rank& r, std::int32_t* all, std::size_t each) : r_(r), all_(all), each_(each) {}

  void run(int root) {
    const bool is_root = r_.rank == root;
    fill(0, is_root ? total() : 0, root);
    r_.world->scatter(is_root ? whole() : Buffer{}, own(), root);
    expect("scatter", first(), each_, [&](std::size_t i) { return value(i, root); });
    if (is_root) expect("scatter's input", 0, total(), [&](std::size_t i) { return value(i, root); });

    fill(first(), each_, r_.rank);
    r_.world->gather(own(), is_root ? whole() : Buffer{}, root);
    if (is_root) expect("gather", 0, total(), [&](std::size_t i) { return value(i, owner(i)); });

    fill(first(), each_, r_.rank);
    r_.world->all_gather(own(), whole());
    expect("all_gather", 0, total(), [&](std::size_t i) { return value(i, owner(i)); });

    fill(0, total(), r_.rank);
    r_.world->reduce_scatter(whole(), own(), ReduceOp::max);
    expect("reduce_scatter", first(), each_, [&](std::size_t i) { return value(i, r_.size - 1); });

    fill(0, total(), r_.rank);
    r_.world->all_reduce(whole(), ReduceOp::max);
    expect("all_reduce", 0, total(), [&](std::size_t i) { return value(i, r_.size - 1); });

    fill(0, total(), r_.rank);
    r_.world->reduce(whole(), is_root ? whole() : Buffer{}, root, ReduceOp::max);
    expect("reduce", 0, is_root ? total() : 0, [&](std::size_t i) { return value(i, r_.size - 1); });

    fill(0, total(), r_.rank);
    r_.world->broadcast(whole(), root);
    expect("broadcast", 0, total(), [&](std::size_t i) { return value(i, root); });
  }

 private:
  std::size_t total() const { return each_ * static_cast<std::size_t>(r_.size); }
  std::size_t first() const { return each_ * static_cast<std::size_t>(r_.rank); }
  int owner(std::size_t i) const { return static_cast<int>(i / each_); }
  Buffer whole() const { return {all_, total(), DType::int32}; }
  Buffer own() const { return {all_ + first(), each_, DType::int32}; }

  void fill(std::size_t begin, std::size_t count, int of) {
    std::fill_n(all_, total(), -1);
    for (std::size_t i = begin; i < begin + count; ++i) all_[i] = value(i, of);
  }
  template <class Expected>
  void expect(const char* name, std::size_t begin, std::size_t count, Expected&& expected) {
    for (std::size_t i = begin; i < begin + count; ++i) {
      ASSERT_EQ(all_[i], expected(i)) << name << " of " << each_ << " for each, element " << i << " on rank "
                                      << r_.rank;
    }
  }

  Rank& r_;
  std::int32_t* all_;
  std::size_t each_;
};

void all_in_place(Rank& r) {
  const std::size_t largest = kSanitized || with_plugin() ? 5003 : 100'003;
  const std::size_t bytes = largest * static_cast<std::size_t>(r.size) * sizeof(std::int32_t);
  RegisteredMemory registered = r.world->allocate(bytes);
  std::vector<std::int32_t> ordinary(bytes / sizeof(std::int32_t));
  for (const std::size_t each : {std::size_t{1}, std::size_t{3}, std::size_t{700}, largest}) {
    for (int root = 0; root < std::min(r.size, 3); ++root) {
      InPlace(r, ordinary.data(), each).run(root);
      InPlace(r, static_cast<std::int32_t*>(registered.data()), each).run(root);
    }
  }
}

class InPlaceTest : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, InPlaceTest, testing::ValuesIn(places({2, 3, 5})), name_of);

TEST_P(InPlaceTest, ResultsAreRight) { run(all_in_place); }

class ForcedInPlace : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Every, ForcedInPlace, testing::Values("staged", "direct", "ring", "tree"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(ForcedInPlace, ResultsAreRight) {
  if (with_plugin() || chosen_as() == As::netns) return;
  const std::string name = GetParam();
  const bool mesh = name == "ring" || name == "tree";
  run_ranks({.n = 3,
             .as = chosen_as(),
             .transport = mesh ? TransportKind::tcp : TransportKind::automatic,
             .algorithm = name,
             .timeout = Seconds(60),
             .limit = Seconds(120)},
            all_in_place);
}

TEST(HierarchyInPlace, ResultsAreRight) {
  if (with_plugin() || chosen_as() != As::processes) return;
  run_ranks({.n = 5, .as = As::processes, .init = false, .timeout = Seconds(60), .limit = Seconds(120)}, [](Rank& r) {
    ::setenv("MANIPLE_HOST", r.rank < 3 ? "first" : "second", 1);
    r.init();
    all_in_place(r);
  });
}

// Each rank is the root of its own call: the call is refused before other ranks have to take part.
TEST_P(InPlaceTest, OtherOverlapsAreRefused) {
  run([](Rank& r) {
    const auto n = static_cast<std::size_t>(r.size);
    std::vector<std::int32_t> memory(n * 4 + 4, 1);
    const auto at = [&](std::size_t first, std::size_t count) {
      return Buffer{memory.data() + first, count, DType::int32};
    };
    const auto refused = [&](const char* name, auto&& call) {
      try {
        call();
        ADD_FAILURE() << name << " was not refused";
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), HasSubstr("overlap")) << name;
      }
    };
    const Buffer all = at(0, n * 4);
    const auto own = static_cast<std::size_t>(r.rank) * 4;
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, n * 4 - 1}) {  // shift 0: in == out
      if (shift != 0) {
        const Buffer shifted = shift == 1 ? at(1, n * 4) : at(4, n * 4);
        refused("all_reduce", [&] { r.world->all_reduce(all, shifted); });
        refused("reduce", [&] { r.world->reduce(all, shifted, r.rank); });
        refused("all_to_all", [&] { r.world->all_to_all(all, shifted); });
      } else {
        refused("all_to_all", [&] { r.world->all_to_all(all, all); });
      }
      if (shift == own) continue;
      const Buffer part = at(shift, 4);
      refused("gather", [&] { r.world->gather(part, all, r.rank); });
      refused("all_gather", [&] { r.world->all_gather(part, all); });
      refused("scatter", [&] { r.world->scatter(all, part, r.rank); });
      refused("reduce_scatter", [&] { r.world->reduce_scatter(all, part); });
    }
    refused("all_reduce_coalesced", [&] { r.world->all_reduce_coalesced(std::vector<Buffer>{at(4, 2), at(0, 5)}); });
    refused("a batch of two receives", [&] {
      r.world->batch_isend_irecv(
          std::vector<PointToPoint>{PointToPoint::recv(at(0, 2), r.rank, 1), PointToPoint::recv(at(1, 2), r.rank, 2)});
    });
    refused("a batch that sends what it receives", [&] {
      r.world->batch_isend_irecv(
          std::vector<PointToPoint>{PointToPoint::send(at(0, 4), r.rank, 1), PointToPoint::recv(at(0, 4), r.rank, 1)});
    });
    for (const std::int32_t one : memory) EXPECT_EQ(one, 1);
    // The group is as it was, and sends may overlap each other.
    std::int32_t sum = 1, in[2] = {};
    r.world->all_reduce(buffer_of(sum));
    EXPECT_EQ(sum, r.size);
    for (const Work& work : r.world->batch_isend_irecv(
             std::vector<PointToPoint>{PointToPoint::send(at(0, 1), r.rank, 1), PointToPoint::send(at(0, 1), r.rank, 2),
                                       PointToPoint::recv({&in[0], 1, DType::int32}, r.rank, 1),
                                       PointToPoint::recv({&in[1], 1, DType::int32}, r.rank, 2)})) {
      work.synchronize();
    }
    EXPECT_EQ(in[0] + in[1], 2);
  });
}

}  // namespace
}  // namespace maniple::harness
