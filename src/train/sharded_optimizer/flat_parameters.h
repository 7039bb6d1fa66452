// Parameters in one row of memory for each device and dtype, and which part of it each rank steps.
//
// The row is cut into one part for each rank. All ranks hold the whole row (or, shared, all ranks of a host the same
// one); a rank changes its own part, its *slices* of parameters, and gather() brings the others'.
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
  std::int64_t elements = 0;  ///< with padding
  std::int64_t unit = 1;      ///< it may be cut at multiples of so many elements; 0: not at all
  std::int64_t cost = 1;      ///< of an element
};
/// Before element `element` of member `member`; member == members: the end.
struct CutPoint {
  std::size_t member = 0;
  std::int64_t element = 0;
};
/// The `parts` - 1 points that divide the members into parts of equal cost, as nearly as they may be cut.
std::vector<CutPoint> cut_evenly(const std::vector<CutMember>& members, int parts);

// ---- The rows themselves --------------------------------------------------------------------------------------------

/// This rank's part of a parameter.
struct ParameterSlice {
  std::size_t group = 0, index = 0;  ///< of the parameter in the optimizer
  torch::Tensor parameter;           ///< the whole
  std::int64_t offset = 0, count = 0;
  torch::Tensor local;  ///< its memory: of the shape of the parameter where it is all of it, otherwise flat

  bool is_whole() const { return count == parameter.numel(); }
};

struct FlatOptions {
  std::shared_ptr<ProcessGroup> group = nullptr;
  bool shared = false;  ///< the ranks of a host have one row between them
  std::shared_ptr<ProcessGroup> leaders =
      nullptr;  ///< shared, on several hosts: the first rank of each; on others a handle
};

class FlatParameters {
 public:
  struct Item {
    std::size_t group = 0, index = 0;
    torch::Tensor parameter;
    std::int64_t cost = 1;  ///< bytes of state that an element has
  };

  /// Moves the parameters into the row, with rank 0's values. Collective; shapes, strides and dtypes are the same on
  /// all ranks.
  FlatParameters(FlatOptions options, const std::vector<Item>& items);

  const std::vector<ParameterSlice>& slices() const noexcept { return slices_; }
  /// A parameter that no longer lies here, "parameter 3 of group 0"; empty: none.
  std::string moved() const;
  /// All ranks have changed their slices; afterwards all see all of them. Collective.
  void gather();
  /// Gives the parameters memory of this rank's own.
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
    PackedLayout layout;  // cut into parts by rank; shared: by host
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
