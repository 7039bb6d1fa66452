// One operation of a test: its memory on the device, its call, and the result that it must have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plugins/device_ranks.h"

namespace maniple::device_test {

using Bytes = std::vector<std::byte>;

struct Case {
  Op op = Op::all_reduce;
  DType dtype = DType::float32;
  ReduceOp reduce = ReduceOp::sum;
  std::vector<std::size_t>
      counts;  ///< one: the same for all; n: of each rank; n * n: all_to_all, what i sends to j at i * n + j
  int root = 0;
  bool in_place = false;
  bool registered = false;
  bool overlapping = false;  ///< in == out, though the parts are elsewhere
  std::size_t shift = 0;     ///< bytes by which memory is misaligned: once in rank 0, twice in rank 1, ...
  bool first_stage = true;
  bool last_stage = true;
  int ranks = 0;

  std::string describe(int size) const;
};

/// Device memory, ordinary or registered, in which calls find their buffers.
class Memory {
 public:
  Memory(Rank& rank, DevicePlugin& plugin, std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data(bool registered) const noexcept {
    return registered ? static_cast<std::byte*>(registered_.data()) : ordinary_;
  }
  std::size_t size() const noexcept { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* ordinary_ = nullptr;
  RegisteredMemory registered_;
};

/// Enqueues the case on the stream, waits, and throws if the result is not the one of the reduce kernels on the host.
void run_case(Rank& rank, DevicePlugin& plugin, const Memory& memory, const Case& test, void* stream,
              std::uint64_t seed);

/// Whether types.h gives the op a meaning for the dtype.
bool is_reducible(DType dtype, ReduceOp::Kind kind);

/// Copies with a wait for the stream.
void upload(Rank& rank, void* to, const Bytes& from, void* stream);
Bytes download(Rank& rank, const void* from, std::size_t bytes, void* stream);
/// Waits, polling, until all in the stream is complete; throws after `seconds`.
void finish(Rank& rank, void* stream, double seconds = 20);

/// Elements of any dtype, made from the numbers.
Bytes values(DType dtype, std::size_t count, std::uint64_t seed);
/// The same bits, or both NaN.
bool same(DType dtype, const Bytes& a, const Bytes& b);

}  // namespace maniple::device_test
