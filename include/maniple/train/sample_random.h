// Random numbers for one sample: augmentation is the same in every run, whatever the number of workers and ranks.
//
//   auto flipped = maniple::transformed(digits, [](torch::data::Example<> sample, maniple::SampleRandom& random) {
//     if (random.unit() < 0.5) sample.data = sample.data.flip({-1});
//     return sample;
//   });
//
// A DataLoader makes one SampleRandom per sample, seeded with the loader's seed, the epoch and the sample's index (for
// streams: shard and position in the shard). It is passed to the dataset's get(), a transform or a decode function with
// a parameter of this type. It works with the distributions of the standard library, but their results depend on the
// library; its own functions do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <ATen/core/Generator.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class SampleRandom {
 public:
  using result_type = std::uint64_t;
  SampleRandom(std::uint64_t seed, std::size_t epoch, std::uint64_t index) noexcept;

  std::uint64_t operator()() noexcept;                ///< any 64 bits
  double unit() noexcept;                             ///< uniform in [0, 1)
  std::uint64_t below(std::uint64_t bound) noexcept;  ///< uniform in [0, bound); 0 for a bound of 0
  at::Generator generator();                          ///< for LibTorch's functions, seeded with the next number
  static constexpr std::uint64_t min() noexcept { return 0; }
  static constexpr std::uint64_t max() noexcept { return std::numeric_limits<std::uint64_t>::max(); }

 private:
  std::uint64_t state_;
};

}  // namespace maniple
