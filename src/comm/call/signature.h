// A compact description of a rank's call. It travels with every frame, so that ranks whose calls differ get an error
// that shows the difference.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "comm/call/operation.h"
#include <maniple/comm/error.h>

namespace maniple {

struct Signature {
  std::uint64_t seq = 0;    ///< number of the call in its group
  std::uint64_t what = 0;   ///< op, dtype, reduce kind, root (for a premultiplied sum: or a hash of uneven counts)
  std::uint64_t count = 0;  ///< elements
  std::uint64_t detail =
      0;  ///< the premultiplication factor's bits, or a hash of uneven counts; for new_group, of its list

  friend bool operator==(const Signature&, const Signature&) = default;

  static Signature of(const Operation& operation) noexcept {
    Signature s;
    s.seq = operation.seq;
    s.what = static_cast<std::uint64_t>(operation.op) | static_cast<std::uint64_t>(operation.dtype) << 8 |
             static_cast<std::uint64_t>(operation.reduce.kind()) << 16 |
             static_cast<std::uint64_t>(static_cast<std::uint32_t>(operation.root)) << 32;
    s.count = operation.count;
    if (operation.reduce.kind() == ReduceOp::premul_sum) {
      const double factor = operation.reduce.factor();
      std::memcpy(&s.detail, &factor, sizeof factor);
      // Operations that reduce into parts do not have a root.
      if (!operation.parts.equal()) s.what |= operation.parts.hash() << 32;
    } else if (!operation.parts.equal()) {
      s.detail = operation.parts.hash();
    } else if (!operation.in_parts.equal()) {
      s.detail = 1;  // all_to_all: lists differ between ranks, but every rank must have one
    }
    return s;
  }

  /// The signature of a point-to-point message (dtype, count and tag), for describe(). Messages are matched without it.
  static Signature of_message(DType dtype, int tag, std::size_t bytes) noexcept {
    return {0, static_cast<std::uint64_t>(Op::send) | static_cast<std::uint64_t>(dtype) << 8, bytes / size_of(dtype),
            static_cast<std::uint32_t>(tag)};
  }

  /// "all_reduce #12 float32[1000] sum", "send float32[1000] tag 3"; never throws on malformed input from the wire.
  std::string describe() const;
};

/// The place of a call: "train.cpp:40"; "in Checkpoint::save (train.cpp:40)" for a call that the library made on behalf
/// of a public call (a place without a line of its own, see train/tensor/public_call.h); empty if unknown.
std::string place_text(const char* file, unsigned line);
/// "all_reduce #12 float32[1000] sum at train.cpp:40"
std::string call_at(const std::string& call, const std::string& place);

/// The error for ranks whose calls differ: "ranks called different things: rank 0: all_reduce #12 ... at train.cpp:40;
/// ...".
ErrorInfo mismatch_of(std::vector<RankCall> calls);

}  // namespace maniple
