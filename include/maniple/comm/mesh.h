// DeviceMesh: the ranks of a group as a grid with named dimensions, with a group for each line of the grid.
//
//   maniple::DeviceMesh mesh(world, {{"pipe", 2}, {"data", 2}, {"tensor", 2}});      // 8 ranks
//   mesh["data"]->all_reduce(buffer_of(x));          // with the ranks that differ from this one in "data" alone
//   mesh.coordinate("pipe");                         // this rank's stage
//   std::cout << mesh;                               // the position of every rank
//
// Layout: ranks are laid out row by row; the last dimension varies fastest. Of the eight ranks above, 0 and 1 differ in
// "tensor", 0 and 2 in "data", 0 and 4 in "pipe". Put the dimension that communicates most last: consecutive ranks
// mostly share a host.
//
// Groups: mesh[name] is an ordinary ProcessGroup, whose ranks are the coordinates along that dimension: rank 1 of
// mesh["data"] has coordinate 1 there. Pass it wherever a group is accepted: DdpOptions::group, ClipGradOptions::group,
// DistOptions::group, ...
//
// Collective calls: the constructor and sub() are collective over the mesh's group; all other methods are local.
//
// Lifetime: a mesh is a value; copies share its groups.
//
// The class corresponds to DeviceMesh and init_device_mesh of torch.distributed. Here a rank is a process, whatever
// devices it computes on.
#pragma once

#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <maniple/comm/options.h>
#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct MeshDimension {
  std::string name = {};
  int size = 0;  ///< ranks along it; -1, in at most one dimension: group size / product of the other sizes
};

class DeviceMesh {
 public:
  /// Throws `InvalidArgument` on all ranks when the sizes do not fit the group, a name is empty or repeated, or ranks
  /// pass different dimensions. `options` apply to the groups of the dimensions.
  DeviceMesh(std::shared_ptr<ProcessGroup> group, std::vector<MeshDimension> dimensions,
             const GroupOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// The group of the ranks that differ from this one in that dimension alone, including this rank. Throws
  /// `InvalidArgument` for an unknown name.
  const std::shared_ptr<ProcessGroup>& operator[](std::string_view name) const;

  /// All ranks of the mesh.
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  const std::vector<MeshDimension>& dimensions() const noexcept { return dimensions_; }
  int size() const noexcept { return group_->size(); }
  int size(std::string_view name) const;
  /// This rank's position: in all dimensions, in the order of dimensions(), or in one.
  const std::vector<int>& coordinates() const noexcept { return coordinates_; }
  int coordinate(std::string_view name) const;

  /// Converts coordinates to a rank of group(), and back.
  int rank_at(const std::vector<int>& coordinates) const;
  std::vector<int> coordinates_of(int rank) const;
  /// The ranks of group() on the line through this rank along a dimension, by coordinate.
  std::vector<int> ranks_along(std::string_view name) const;

  /// The mesh of some dimensions, in the order given, through this rank. Its group has all ranks that differ from this
  /// one in these dimensions alone. Use it for data divided over several dimensions at once, such as batches over
  /// "replica" and "data". Collective over group().
  DeviceMesh sub(const std::vector<std::string>& names, const SourceLocation& where = SourceLocation::current()) const;

  /// "DeviceMesh of 8 ranks: pipe 2 x data 2 x tensor 2; rank 5 is at pipe 1, data 0, tensor 1", followed by the ranks
  /// of group() in rows.
  std::string text() const;

 private:
  DeviceMesh() = default;
  std::size_t index_of(std::string_view name) const;

  std::shared_ptr<ProcessGroup> group_;
  std::vector<MeshDimension> dimensions_;
  std::vector<int> coordinates_;
  std::vector<std::shared_ptr<ProcessGroup>> lines_;  ///< by dimension
  GroupOptions options_;
};

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

}  // namespace maniple
