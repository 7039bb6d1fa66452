#include <maniple/comm/mesh.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <set>

#include <fmt/format.h>

#include "comm/base/check.h"

namespace maniple {
namespace {

/// "pipe 2 x data 2"
std::string text_of(const std::vector<MeshDimension>& dimensions) {
  std::string text;
  for (const MeshDimension& one : dimensions)
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", one.name, one.size);
  return text;
}

std::string names_of(const std::vector<MeshDimension>& dimensions) {
  std::string text;
  for (const MeshDimension& one : dimensions) text += (text.empty() ? "" : ", ") + one.name;
  return text;
}

/// Makes a mistake on one rank an error on all, so that no rank waits.
void require_same_everywhere(ProcessGroup& group, const std::string& mine, const char* who,
                             const SourceLocation& where) {
  const std::vector<std::string> all = group.all_gather_objects(mine, {}, where);
  for (std::size_t r = 1; r < all.size(); ++r) {
    MANIPLE_REQUIRE(all[r] == all[0],
                    "{}: rank {} of the group has dimensions {}, rank 0 has {}; all ranks pass the same", who, r,
                    all[r], all[0]);
  }
}

/// Computes the size given as -1.
void fit(std::vector<MeshDimension>& dimensions, const ProcessGroup& group) {
  MANIPLE_REQUIRE(!dimensions.empty(), "DeviceMesh: no dimensions; at least one is needed");
  const std::string asked = text_of(dimensions);
  std::set<std::string> names;
  MeshDimension* open = nullptr;
  std::int64_t product = 1;
  for (MeshDimension& one : dimensions) {
    MANIPLE_REQUIRE(!one.name.empty(), "DeviceMesh: a dimension of {} has no name", asked);
    MANIPLE_REQUIRE(names.insert(one.name).second, "DeviceMesh: two dimensions of {} are called {}", asked, one.name);
    MANIPLE_REQUIRE(one.size >= 1 || one.size == -1,
                    "DeviceMesh: dimension {} has size {}; expected 1 or more, or -1 for what the others leave",
                    one.name, one.size);
    if (one.size == -1) {
      MANIPLE_REQUIRE(open == nullptr, "DeviceMesh: {} has two sizes of -1; one can follow from the others", asked);
      open = &one;
    } else {
      product = std::min<std::int64_t>(product * one.size, std::int64_t{1} << 31);
    }
  }
  if (open != nullptr) {
    MANIPLE_REQUIRE(group.size() % product == 0,
                    "DeviceMesh: the {} ranks of group {} cannot be divided by {} ({}: no size of {} fits)",
                    group.size(), group.name(), product, asked, open->name);
    open->size = static_cast<int>(group.size() / product);
  }
  MANIPLE_REQUIRE(open != nullptr || product == group.size(), "DeviceMesh: {} is {}{} ranks, but group {} has {}",
                  asked, product == std::int64_t{1} << 31 ? "at least " : "", product, group.name(), group.size());
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<ProcessGroup> group, std::vector<MeshDimension> dimensions,
                       const GroupOptions& options, const SourceLocation& where)
    : group_(std::move(group)), dimensions_(std::move(dimensions)), options_(options) {
  MANIPLE_REQUIRE(group_ != nullptr, "DeviceMesh: no group was given");
  group_->require_member("DeviceMesh");
  require_same_everywhere(*group_, text_of(dimensions_), "DeviceMesh", where);
  fit(dimensions_, *group_);
  coordinates_ = coordinates_of(group_->rank());
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    std::vector<int> first = coordinates_;
    first[d] = 0;
    lines_.push_back(group_->split(rank_at(first), coordinates_[d], options_, {}, where));
  }
}

std::size_t DeviceMesh::index_of(std::string_view name) const {
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    if (dimensions_[d].name == name) return d;
  }
  throw InvalidArgument(
      fmt::format("DeviceMesh: there is no dimension \"{}\"; there are {}", name, names_of(dimensions_)));
}

const std::shared_ptr<ProcessGroup>& DeviceMesh::operator[](std::string_view name) const {
  return lines_[index_of(name)];
}
int DeviceMesh::size(std::string_view name) const { return dimensions_[index_of(name)].size; }
int DeviceMesh::coordinate(std::string_view name) const { return coordinates_[index_of(name)]; }

int DeviceMesh::rank_at(const std::vector<int>& coordinates) const {
  MANIPLE_REQUIRE(coordinates.size() == dimensions_.size(), "DeviceMesh: {} coordinates for {} dimensions ({})",
                  coordinates.size(), dimensions_.size(), text_of(dimensions_));
  int rank = 0;
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    MANIPLE_REQUIRE(coordinates[d] >= 0 && coordinates[d] < dimensions_[d].size,
                    "DeviceMesh: coordinate {} in dimension {}; expected 0 to {}", coordinates[d], dimensions_[d].name,
                    dimensions_[d].size - 1);
    rank = rank * dimensions_[d].size + coordinates[d];
  }
  return rank;
}

std::vector<int> DeviceMesh::coordinates_of(int rank) const {
  MANIPLE_REQUIRE(rank >= 0 && rank < size(), "DeviceMesh: rank {}; its group has ranks 0 to {}", rank, size() - 1);
  std::vector<int> result(dimensions_.size());
  for (std::size_t d = dimensions_.size(); d-- > 0;) {
    result[d] = rank % dimensions_[d].size;
    rank /= dimensions_[d].size;
  }
  return result;
}

std::vector<int> DeviceMesh::ranks_along(std::string_view name) const {
  const std::size_t d = index_of(name);
  std::vector<int> result, place = coordinates_;
  for (place[d] = 0; place[d] < dimensions_[d].size; ++place[d]) result.push_back(rank_at(place));
  return result;
}

DeviceMesh DeviceMesh::sub(const std::vector<std::string>& names, const SourceLocation& where) const {
  std::vector<MeshDimension> chosen;
  for (const std::string& name : names) chosen.push_back({name, 0});
  require_same_everywhere(*group_, names_of(chosen), "DeviceMesh::sub", where);
  MANIPLE_REQUIRE(!names.empty(), "DeviceMesh::sub: no dimensions; at least one is needed");
  MANIPLE_REQUIRE(std::set<std::string>(names.begin(), names.end()).size() == names.size(),
                  "DeviceMesh::sub: a dimension is named twice in {}", names_of(chosen));
  DeviceMesh mesh;
  mesh.options_ = options_;
  std::vector<int> first = coordinates_;
  int key = 0;
  for (const std::string& name : names) {
    const std::size_t d = index_of(name);
    mesh.dimensions_.push_back(dimensions_[d]);
    mesh.coordinates_.push_back(coordinates_[d]);
    mesh.lines_.push_back(lines_[d]);
    key = key * dimensions_[d].size + coordinates_[d];
    first[d] = 0;
  }
  mesh.group_ = names.size() == 1 ? mesh.lines_.front() : group_->split(rank_at(first), key, options_, {}, where);
  return mesh;
}

std::string DeviceMesh::text() const {
  std::string place;
  for (std::size_t d = 0; d < dimensions_.size(); ++d)
    place += fmt::format("{}{} {}", d == 0 ? "" : ", ", dimensions_[d].name, coordinates_[d]);
  std::string text = fmt::format("DeviceMesh of {} rank{}: {}; rank {} is at {}\n", size(), size() == 1 ? "" : "s",
                                 text_of(dimensions_), group_->rank(), place);
  // One row per line of the last dimension, prefixed by the other coordinates.
  const int width = static_cast<int>(fmt::formatted_size("{}", size() - 1));
  for (int rank = 0; rank < size(); ++rank) {
    const std::vector<int> at = coordinates_of(rank);
    if (at.back() == 0) {
      text += " ";
      for (std::size_t d = 0; d + 1 < dimensions_.size(); ++d)
        text += fmt::format(" {} {}", dimensions_[d].name, at[d]);
      text += fmt::format("{}{}:", dimensions_.size() > 1 ? "  " : " ", dimensions_.back().name);
    }
    text += fmt::format(" {:>{}}", rank, width);
    if (at.back() + 1 == dimensions_.back().size) text += "\n";
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) { return out << mesh.text(); }

}  // namespace maniple
