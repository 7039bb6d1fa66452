// DeviceMesh: the ranks of a group as a grid with named dimensions, and a group for each line of it.
//
//   maniple::DeviceMesh mesh(world, {{"pipe", 2}, {"data", 2}, {"tensor", 2}});      // 8 ranks
//   mesh["data"]->all_reduce(buffer_of(x));          // with the ranks that differ from this one in "data" alone
//   mesh.coordinate("pipe");                         // which stage this rank is
//   std::cout << mesh;                               // who is where
//
// Ranks are laid out row by row: the last dimension runs fastest. Of the eight ranks above, 0 and 1 differ in "tensor",
// 0 and 2 in "data", 0 and 4 in "pipe". So what communicates most belongs last: ranks that follow each other mostly
// share a host.
//
// mesh[name] is a ProcessGroup like any other, and its ranks are the coordinates along that dimension: rank 1 of
// mesh["data"] has coordinate 1 there. Whatever takes a group takes it: DdpOptions::group, ClipGradOptions::group,
// DistOptions::group, ...
//
// The constructor and sub() are collective over the group of the mesh; everything else is local. A mesh is a value:
// copies share its groups. (torch.distributed has this as DeviceMesh and init_device_mesh. Here a rank is a process,
// whatever devices it computes on.)
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
  int size = 0;  ///< ranks along it; -1, in one dimension at most: what the others leave
};

class DeviceMesh {
 public:
  /// Throws `InvalidArgument` on all ranks when the sizes do not fit the group, a name is empty or there twice, or when
  /// ranks were given different dimensions. `options` are those of the groups.
  DeviceMesh(std::shared_ptr<ProcessGroup> group, std::vector<MeshDimension> dimensions,
             const GroupOptions& options = {}, const SourceLocation& where = SourceLocation::current());

  /// The ranks that differ from this one in that dimension alone, this one among them. Throws `InvalidArgument` for a
  /// name that is none.
  const std::shared_ptr<ProcessGroup>& operator[](std::string_view name) const;

  /// All ranks of the mesh.
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  const std::vector<MeshDimension>& dimensions() const noexcept { return dimensions_; }
  int size() const noexcept { return group_->size(); }
  int size(std::string_view name) const;
  /// Where this rank is, in the order of dimensions(); and in one of them.
  const std::vector<int>& coordinates() const noexcept { return coordinates_; }
  int coordinate(std::string_view name) const;

  /// The rank, in group(), that has these coordinates; and the coordinates of a rank of group().
  int rank_at(const std::vector<int>& coordinates) const;
  std::vector<int> coordinates_of(int rank) const;
  /// The ranks, in group(), along a dimension through this rank, by coordinate.
  std::vector<int> ranks_along(std::string_view name) const;

  /// The mesh of some dimensions, in the order given, through this rank: its group has all ranks that differ from this
  /// one in these dimensions alone. For what is divided over several dimensions at once, such as batches over "replica"
  /// and "data". Collective over group().
  DeviceMesh sub(const std::vector<std::string>& names, const SourceLocation& where = SourceLocation::current()) const;

  /// "DeviceMesh of 8 ranks: pipe 2 x data 2 x tensor 2; rank 5 is at pipe 1, data 0, tensor 1", then the ranks of
  /// group() in rows.
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
