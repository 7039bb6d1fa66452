// Parameters in one row of memory per device and dtype, and the part of the row that each rank steps.
//
// The row is cut into one part per rank. All ranks hold the whole row; with `shared`, all ranks of a host share one. A
// rank changes only its own part, its *slices* of parameters, and gather() fetches the slices of other ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>

#include "train/packed_layout.h"
#include <maniple/comm/process_group.h>

namespace maniple {

// ---- Where the row is cut: a pure function. -------------------------------------------------------------------------

struct CutMember {
  std::int64_t elements = 0;  ///< including padding
  std::int64_t unit = 1;      ///< it may be cut at multiples of `unit` elements; 0: not at all
  std::int64_t cost = 1;      ///< per element
};
/// The position before element `element` of member `member`; member == members.size() is the end.
struct CutPoint {
  std::size_t member = 0;
  std::int64_t element = 0;
};
/// The `parts` - 1 points that divide the members into parts of nearly equal cost, given where members may be cut.
std::vector<CutPoint> cut_evenly(const std::vector<CutMember>& members, int parts);

// ---- The rows themselves --------------------------------------------------------------------------------------------

/// This rank's part of a parameter.
struct ParameterSlice {
  std::size_t group = 0, index = 0;  ///< position of the parameter in the optimizer
  torch::Tensor parameter;           ///< the whole parameter
  std::int64_t offset = 0, count = 0;
  torch::Tensor local;  ///< the slice: shaped like the parameter if it covers the whole parameter, otherwise flat

  bool is_whole() const { return count == parameter.numel(); }
};

struct FlatOptions {
  std::shared_ptr<ProcessGroup> group = nullptr;
  bool shared = false;  ///< the ranks of a host share one row
  std::shared_ptr<ProcessGroup> leaders =
      nullptr;  ///< shared, on several hosts: the first rank of each host; on other ranks a handle
};

class FlatParameters {
 public:
  struct Item {
    std::size_t group = 0, index = 0;
    torch::Tensor parameter;
    std::int64_t cost = 1;  ///< bytes of optimizer state per element
  };

  /// Moves the parameters into rows, with rank 0's values. Collective. Shapes, strides and dtypes must be the same on
  /// all ranks.
  FlatParameters(FlatOptions options, const std::vector<Item>& items);

  const std::vector<ParameterSlice>& slices() const noexcept { return slices_; }
  /// The first parameter found outside its row, "parameter 3 of group 0"; empty if there is none.
  std::string moved() const;
  /// Call when all ranks may have changed their slices; afterwards every rank sees all slices. Collective.
  void gather();
  /// Moves the parameters back into memory of this rank's own.
  void leave();

 private:
  struct Member {
    std::size_t group, index;
    torch::Tensor parameter;
    std::int64_t cost;
    const void* address;
  };
  struct Row {
    std::vector<Member> members;
    PackedLayout layout;  // cut into one part per rank; with `shared`, one per host
    RegisteredMemory memory;
    Device device;
    std::vector<std::size_t> bytes_of_parts;
  };
  void lay_out(const std::vector<Item>& items);
  void move_in(Row& row);
  void cut();

  FlatOptions options_;
  std::vector<Row> rows_;
  std::vector<ParameterSlice> slices_;
};

}  // namespace maniple
