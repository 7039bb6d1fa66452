// Every dtype, op, instruction set, number of sources and destinations, count, aliasing and alignment against the
// reference.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "comm/collective/reduce/kernels.h"
#include "comm/collective/reduce_reference.h"
#include "harness/sanitizers.h"

namespace maniple {
namespace {

using test::Bytes;

enum class Alias { none, first, last, all };
constexpr const char* kAliasNames[] = {"nothing aliased", "destination is first source", "destination is last source",
                                       "destinations are sources"};

/// Buffers with guard bytes around each, optionally at odd addresses.
class Arena {
 public:
  Arena(std::size_t buffers, std::size_t bytes, bool misaligned)
      : bytes_(bytes),
        stride_((bytes + 2 * kGuard + 63) / 64 * 64),
        shift_(misaligned ? 1 : 0),
        memory_(buffers * stride_ + 64, kPattern) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    base_ = memory_.data() + (64 - address % 64) % 64;
  }
  /// Misaligned ones differ in how: 1, 3, 5, 7, 9, ... bytes past a multiple of 64.
  unsigned char* at(std::size_t i) { return base_ + i * stride_ + kGuard + shift_ * (1 + 2 * (i % 15)); }
  bool guards_intact(std::size_t buffers) {
    for (std::size_t i = 0; i < buffers; ++i) {
      for (std::size_t k = 1; k <= 32; ++k) {
        if (at(i)[-static_cast<std::ptrdiff_t>(k)] != kPattern || at(i)[bytes_ + k - 1] != kPattern) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kPattern = 0xa5;
  std::size_t bytes_;
  std::size_t stride_;
  std::size_t shift_;
  Bytes memory_;
  unsigned char* base_;
};

struct Layout {
  std::size_t destinations;
  Alias alias;
  bool misaligned;
};

void check(const ReduceKernels& kernels, const Reduction& reduction, const std::vector<Bytes>& inputs,
           const Bytes& expected, std::size_t count, const Layout& layout) {
  const std::size_t element = size_of(reduction.dtype);
  const std::size_t sources = inputs.size();
  Arena arena(sources + layout.destinations, count * element, layout.misaligned);
  std::vector<const void*> from;
  std::vector<void*> to;
  for (std::size_t s = 0; s < sources; ++s) {
    if (count != 0) std::memcpy(arena.at(s), inputs[s].data(), count * element);
    from.push_back(arena.at(s));
  }
  for (std::size_t d = 0; d < layout.destinations; ++d) to.push_back(arena.at(sources + d));
  if (layout.alias == Alias::first) to[0] = arena.at(0);
  if (layout.alias == Alias::last) to.back() = arena.at(sources - 1);
  if (layout.alias == Alias::all) {
    for (std::size_t d = 0; d < to.size() && d < sources; ++d) to[d] = arena.at(d);
  }

  reduce_with(kernels, reduction, from, to, count);

  const auto where = [&] {
    return fmt::format("{} {} {} sources {} destinations {} count {} {}{} divide_by {}", kernels.name,
                       to_string(reduction.dtype), to_string(reduction.op.kind()), sources, to.size(), count,
                       kAliasNames[static_cast<int>(layout.alias)], layout.misaligned ? " misaligned" : "",
                       reduction.divide_by);
  };
  for (std::size_t d = 0; d < to.size(); ++d) {
    const auto* result = static_cast<const unsigned char*>(to[d]);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(test::same_element(reduction.dtype, result + i * element, expected.data() + i * element))
          << where() << ": element " << i << " of destination " << d << " is "
          << test::show_element(reduction.dtype, result + i * element) << ", expected "
          << test::show_element(reduction.dtype, expected.data() + i * element);
    }
    ASSERT_EQ(std::memcmp(to[0], to[d], count * element), 0) << where() << ": destinations differ in bits";
  }
  for (std::size_t s = 0; s < sources; ++s) {
    const bool written = std::find(to.begin(), to.end(), from[s]) != to.end();
    if (!written && count != 0) {
      ASSERT_EQ(std::memcmp(from[s], inputs[s].data(), count * element), 0)
          << where() << ": source " << s << " changed";
    }
  }
  ASSERT_TRUE(arena.guards_intact(sources + layout.destinations)) << where() << ": wrote outside of a buffer";
}

std::vector<Reduction> reductions_of(DType dtype) {
  std::vector<Reduction> all;
  for (int k = 0; k < ReduceOp::kKindCount; ++k) {
    const auto kind = static_cast<ReduceOp::Kind>(k);
    if (baseline_reduce_kernels().table[static_cast<int>(dtype)][kind] == nullptr) continue;
    if (kind == ReduceOp::premul_sum) {
      all.push_back({.dtype = dtype, .op = ReduceOp::premultiplied(-3)});
      all.push_back({.dtype = dtype, .op = ReduceOp::premultiplied(-3), .premultiply = false});
    } else if (kind == ReduceOp::avg) {
      for (const int ranks : {1, 3, 8, 1000}) all.push_back({.dtype = dtype, .op = kind, .divide_by = ranks});
    } else {
      all.push_back({.dtype = dtype, .op = kind});
    }
  }
  return all;
}

class ReduceMatrix : public testing::TestWithParam<DType> {};

TEST_P(ReduceMatrix, EqualsTheReference) {
  const DType dtype = GetParam();
  const std::vector<std::size_t> counts = harness::kSanitized ? std::vector<std::size_t>{0, 1, 7, 70}
                                                              : std::vector<std::size_t>{0, 1, 3, 7, 64, 1000, 5003};
  for (const std::size_t count : counts) {
    std::vector<Bytes> inputs;
    for (std::size_t s = 0; s < 16; ++s) inputs.push_back(test::random_elements(dtype, count, 100 * count + s));
    for (const std::size_t sources : {1, 2, 3, 4, 5, 8, 16}) {
      const std::vector<Bytes> used(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(sources));
      for (const Reduction& reduction : reductions_of(dtype)) {
        const Bytes expected = test::reference_reduction(reduction, used, count);
        for (const ReduceKernels* kernels : supported_reduce_kernels()) {
          for (const std::size_t destinations : {1, 2, 3}) {
            for (const Alias alias : {Alias::none, Alias::first, Alias::last, Alias::all}) {
              for (const bool misaligned : {false, true}) {
                check(*kernels, reduction, used, expected, count, {destinations, alias, misaligned});
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllTypes, ReduceMatrix,
                         testing::Values(DType::int8, DType::int16, DType::int32, DType::int64, DType::uint8,
                                         DType::float16, DType::bfloat16, DType::float32, DType::float64, DType::bool8),
                         [](const auto& tested) { return std::string(to_string(tested.param)); });

}  // namespace
}  // namespace maniple
