// DeviceMesh: which ranks each group has, coordinates, sub-meshes, what does not fit. And memory that a host has once.
#include <cstring>
#include <sstream>

#include <maniple/comm/error.h>
#include <maniple/comm/mesh.h>

#include "comm/group/matrix.h"
#include "fault/expect_error.h"

namespace maniple::harness {
namespace {

class Meshes : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Meshes, testing::ValuesIn(places({1, 2, 3, 6, 8})), name_of);

std::vector<int> members_of(const ProcessGroup& group) {
  std::vector<int> result;
  for (const auto& member : group.topology().members) result.push_back(member.global_rank);
  return result;
}

std::vector<int> gathered(ProcessGroup& group, int value) {
  std::vector<int> all(static_cast<std::size_t>(group.size()));
  group.all_gather(buffer_of(value), buffer_of(all));
  return all;
}

TEST_P(Meshes, EachDimensionHasAGroupWhoseRanksAreTheCoordinates) {
  run([](Rank& r) {
    // The largest grid of two and three that the ranks fill.
    const int rows = r.size % 2 == 0 ? 2 : 1, columns = r.size / rows;
    const DeviceMesh mesh(r.world, {{"row", rows}, {"column", columns}});
    EXPECT_EQ(mesh.size(), r.size);
    EXPECT_EQ(mesh.size("row"), rows);
    EXPECT_EQ(mesh.coordinate("row"), r.rank / columns);
    EXPECT_EQ(mesh.coordinate("column"), r.rank % columns);
    EXPECT_EQ(mesh["row"]->rank(), mesh.coordinate("row"));
    EXPECT_EQ(mesh["column"]->rank(), mesh.coordinate("column"));
    std::vector<int> in_my_row, in_my_column;
    for (int rank = 0; rank < r.size; ++rank) {
      if (rank / columns == r.rank / columns) in_my_row.push_back(rank);
      if (rank % columns == r.rank % columns) in_my_column.push_back(rank);
    }
    EXPECT_EQ(members_of(*mesh["column"]), in_my_row);
    EXPECT_EQ(members_of(*mesh["row"]), in_my_column);
    EXPECT_EQ(mesh.ranks_along("column"), in_my_row);
    EXPECT_EQ(mesh.ranks_along("row"), in_my_column);
    EXPECT_EQ(gathered(*mesh["column"], r.rank), in_my_row);
    EXPECT_EQ(gathered(*mesh["row"], r.rank), in_my_column);
    for (int rank = 0; rank < r.size; ++rank) EXPECT_EQ(mesh.rank_at(mesh.coordinates_of(rank)), rank);
  });
}

TEST_P(Meshes, OneSizeFollowsFromTheOthers) {
  run([](Rank& r) {
    const DeviceMesh mesh(r.world, {{"a", 1}, {"b", -1}, {"c", 1}});
    EXPECT_EQ(mesh.size("b"), r.size);
    EXPECT_EQ(mesh.coordinates(), (std::vector<int>{0, r.rank, 0}));
    EXPECT_EQ(mesh["a"]->size(), 1);
    EXPECT_EQ(gathered(*mesh["b"], r.rank * 10).back(), (r.size - 1) * 10);
  });
}

TEST_P(Meshes, SubMeshesGoThroughThisRank) {
  run([](Rank& r) {
    if (r.size != 8) return;
    const DeviceMesh mesh(r.world, {{"pipe", 2}, {"data", 2}, {"tensor", 2}});
    const DeviceMesh outer = mesh.sub({"pipe", "data"});
    EXPECT_EQ(outer.size(), 4);
    EXPECT_EQ(outer.coordinates(), (std::vector<int>{r.rank / 4, r.rank / 2 % 2}));
    EXPECT_EQ(members_of(*outer.group()),
              (std::vector<int>{r.rank % 2, 2 + r.rank % 2, 4 + r.rank % 2, 6 + r.rank % 2}));
    EXPECT_EQ(outer.group()->rank(), outer.rank_at(outer.coordinates()));
    EXPECT_EQ(outer["data"].get(), mesh["data"].get());
    const DeviceMesh turned = mesh.sub({"tensor", "pipe"});
    EXPECT_EQ(turned.group()->rank(), r.rank % 2 * 2 + r.rank / 4);
    EXPECT_EQ(gathered(*turned.group(), turned.coordinate("tensor")), (std::vector<int>{0, 0, 1, 1}));
    const DeviceMesh line = mesh.sub({"data"});
    EXPECT_EQ(line.group().get(), mesh["data"].get());
    std::ostringstream text;
    text << mesh;
    EXPECT_TRUE(
        contains(text.str(), fmt::format("pipe 2 x data 2 x tensor 2; rank {} is at pipe {}, data {}, tensor {}\n",
                                         r.rank, r.rank / 4, r.rank / 2 % 2, r.rank % 2)))
        << text.str();
    EXPECT_TRUE(contains(text.str(), "\n  pipe 1 data 0  tensor: 4 5\n")) << text.str();
  });
}

TEST_P(Meshes, InvalidShapesAreRefusedOnAllRanksAndTheGroupStaysUsable) {
  run([](Rank& r) {
    const auto text_of = [&](std::vector<MeshDimension> dimensions) {
      const Caught caught = catch_error([&] { DeviceMesh mesh(r.world, std::move(dimensions)); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      return caught.text;
    };
    EXPECT_TRUE(contains(text_of({{"a", r.size}, {"b", 5}}),
                         fmt::format("a {} x b 5 is {} ranks, but group world has {}", r.size, 5 * r.size, r.size)));
    EXPECT_TRUE(contains(text_of({{"a", 11}, {"b", -1}}), "cannot be divided by 11"));
    EXPECT_TRUE(contains(text_of({{"a", -1}, {"b", -1}}), "two sizes of -1"));
    EXPECT_TRUE(contains(text_of({{"a", 0}}), "has size 0"));
    EXPECT_TRUE(contains(text_of({{"a", 1}, {"a", r.size}}), "are called a"));
    EXPECT_TRUE(contains(text_of({{"", r.size}}), "has no name"));
    EXPECT_TRUE(contains(text_of({}), "no dimensions"));
    EXPECT_TRUE(contains(text_of({{"a", 1 << 30}, {"b", 1 << 30}}), "at least 2147483648 ranks"));
    if (r.size > 1) {
      EXPECT_TRUE(contains(text_of({{r.rank == 1 ? "x" : "y", r.size}}), "rank 1 of the group has dimensions x"));
    }
    const DeviceMesh mesh(r.world, {{"a", -1}});
    EXPECT_TRUE(contains(catch_error([&] { mesh["b"]; }).text, "there is no dimension \"b\"; there are a"));
    EXPECT_TRUE(contains(catch_error([&] { mesh.sub({"a", "a"}); }).text, "named twice"));
    EXPECT_TRUE(contains(catch_error([&] { static_cast<void>(mesh.rank_at({r.size})); }).text, "expected 0 to"));
    EXPECT_EQ(gathered(*r.world, 1).size(), static_cast<std::size_t>(r.size));
  });
}

// ---- ProcessGroup::allocate_shared ----------------------------------------------------------------------------------

TEST_P(Meshes, SharedMemoryIsThereOnceForEachHost) {
  run([](Rank& r) {
    constexpr std::size_t kCount = 5000;
    if (with_plugin() || r.world->transport() == "tcp") {
      bool shares = false;
      for (const auto& node : r.world->topology().nodes) shares = shares || node.size() > 1;
      if (with_plugin() || shares) {
        const Caught caught = catch_error([&] { r.world->allocate_shared(kCount); });
        EXPECT_TRUE(caught.is(ErrorKind::unsupported)) << caught;
        EXPECT_EQ(gathered(*r.world, 1).size(), static_cast<std::size_t>(r.size));
        return;
      }
    }
    const Topology& topology = r.world->topology();
    RegisteredMemory memory = r.world->allocate_shared(kCount * sizeof(int));
    const std::span<int> numbers = memory.as<int>(kCount);
    EXPECT_EQ(numbers[kCount - 1], 0);
    r.world->barrier();
    numbers[static_cast<std::size_t>(topology.local_rank())] = 100 + r.rank;
    if (topology.local_rank() == topology.local_size() - 1) numbers[kCount - 1] = r.rank;
    r.world->barrier();
    const auto& here = topology.nodes[static_cast<std::size_t>(topology.node_rank())];
    for (std::size_t i = 0; i < here.size(); ++i) EXPECT_EQ(numbers[i], 100 + here[i]);
    EXPECT_EQ(numbers[kCount - 1], here.back());
    r.world->barrier();
    if (r.rank == 0) memory = {};  // the others' stays
    r.world->barrier();
    if (r.rank != 0) {
      EXPECT_EQ(numbers[kCount - 1], here.back());
    }
    EXPECT_EQ(r.world->allocate_shared(0).size(), 0u);
    if (r.size > 1) {
      const Caught caught = catch_error([&] { r.world->allocate_shared(r.rank == 1 ? 8 : 16); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      EXPECT_TRUE(contains(caught.text, "rank 1 of the group asked for 8 bytes, rank 0 for 16")) << caught;
    }
  });
}

}  // namespace
}  // namespace maniple::harness
