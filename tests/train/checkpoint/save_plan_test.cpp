// Who writes which box of a tensor, and the index that says so: without ranks, without files.
#include <map>
#include <random>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/base/format.h"
#include "train/checkpoint/save_plan.h"
#include <maniple/comm/error.h>

namespace maniple::save_plan_test {
namespace {

/// The elements of the whole that a box has, in its order.
std::vector<std::int64_t> elements(const TensorBox& box) {
  std::vector<std::int64_t> all;
  const BoxRuns runs(box);
  for (std::int64_t at = 0;;) {
    const auto run = runs.from(at);
    if (!run) return all;
    EXPECT_EQ(run->at, static_cast<std::int64_t>(all.size()));
    for (std::int64_t i = 0; i < run->length; ++i) all.push_back(run->begin + i);
    at = run->begin + run->length;
  }
}

TEST(TensorBox, RunsAreTheElementsOfASlice) {
  std::mt19937 random(3);
  const auto below = [&](std::int64_t n) { return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random); };
  for (int story = 0; story < 300; ++story) {
    TensorBox box;
    for (std::int64_t d = below(4); d > 0; --d) {
      box.view.push_back(1 + below(5));
      box.offset.push_back(below(box.view.back() + 1));
      box.size.push_back(below(box.view.back() - box.offset.back() + 1));
    }
    torch::Tensor slice = torch::arange(elements_of(box.view), torch::kInt64).view(box.view);
    for (std::size_t d = 0; d < box.view.size(); ++d)
      slice = slice.narrow(static_cast<std::int64_t>(d), box.offset[d], box.size[d]);
    slice = slice.contiguous();
    const std::vector<std::int64_t> expected(slice.data_ptr<std::int64_t>(),
                                             slice.data_ptr<std::int64_t>() + slice.numel());
    ASSERT_EQ(elements(box), expected) << joined(box.view) << " at " << joined(box.offset) << " of "
                                       << joined(box.size);
    std::size_t in_parts = 0;
    for (const TensorBox& part : cut_box(box, 3)) in_parts += elements(part).size();
    ASSERT_EQ(in_parts, expected.size());
  }
}

TEST(TensorBox, HolesOverlapsAndWhatLiesOutsideAreFound) {
  const auto trouble = [](const std::vector<TensorBox>& boxes) {
    std::vector<const TensorBox*> all;
    for (const TensorBox& box : boxes) all.push_back(&box);
    return cover_error(all, {4, 6});
  };
  const auto box = [](std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
    return TensorBox{{4, 6}, {row, column}, {rows, columns}};
  };
  EXPECT_EQ(trouble({box(0, 0, 4, 2), box(0, 2, 4, 4)}), "");
  EXPECT_EQ(trouble({box(0, 0, 2, 3), box(2, 0, 2, 6), box(0, 3, 2, 3), box(1, 1, 0, 2)}), "");
  EXPECT_EQ(trouble({box(0, 0, 4, 2), box(0, 3, 4, 3)}), "4 of its 24 elements are in no piece");
  EXPECT_NE(trouble({box(0, 0, 4, 4), box(0, 3, 2, 3), box(3, 4, 1, 2)}).find("overlap"), std::string::npos);
  EXPECT_NE(trouble({box(0, 0, 4, 6), box(0, 0, 4, 6)}).find("overlap"), std::string::npos);
  EXPECT_NE(trouble({box(0, 0, 4, 7)}).find("lies outside"), std::string::npos);
  EXPECT_NE(trouble({box(3, 0, 2, 6)}).find("lies outside"), std::string::npos);
}

HeldBox held(const std::string& name, const Extents& shape, TensorBox box) {
  return {"model", name, "F32", shape, std::move(box), false};
}

TEST(SavePlan, ReplicasAreWrittenOnceAndSpreadByBytes) {
  std::vector<HeldBox> mine;
  for (const std::int64_t rows : {1000, 10, 3000, 1, 7}) {
    const Extents shape = {rows, 1000};
    mine.push_back(held("w" + std::to_string(rows), shape, TensorBox::whole(shape)));
  }
  const SavePlan plan = make_save_plan({mine, mine, mine, mine});
  std::int64_t least = INT64_MAX, most = 0, all = 0;
  for (const auto& items : plan.items) {
    std::int64_t bytes = 0;
    for (const SavePlan::Item& item : items) bytes += 4 * item.box.count();
    least = std::min(least, bytes), most = std::max(most, bytes), all += bytes;
  }
  EXPECT_EQ(all, 4 * 4018 * 1000);
  EXPECT_LT(static_cast<double>(most), 1.02 * static_cast<double>(least));
  EXPECT_EQ(parse_index(encode_index(plan.index)), plan.index);
  EXPECT_EQ(decode_held(encode_held(mine)), mine);
}

TEST(SavePlan, WhatWouldBeLostIsRefusedByName) {
  const auto trouble = [](const std::vector<std::vector<HeldBox>>& by_rank) -> std::string {
    try {
      make_save_plan(by_rank);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "planned";
  };
  const Extents shape = {4, 6};
  const HeldBox top = held("w", shape, {shape, {0, 0}, {2, 6}}), bottom = held("w", shape, {shape, {2, 0}, {2, 6}});
  EXPECT_EQ(trouble({{top}, {bottom}, {top}}), "planned");
  EXPECT_NE(trouble({{top}, {top}}).find("\"w\" of part \"model\", [4, 6], as ranks 0, 1 hold it: 12 of its 24"),
            std::string::npos);
  EXPECT_NE(trouble({{top}, {held("w", shape, TensorBox::whole(shape))}}).find("overlap"), std::string::npos);
  EXPECT_NE(trouble({{top, bottom, top}}).find("given twice on rank 0"), std::string::npos);
  EXPECT_NE(trouble({{top}, {held("w", {2, 6}, TensorBox::whole({2, 6}))}}).find("F32 [2, 6] on rank 1"),
            std::string::npos);
  EXPECT_NE(trouble({{top}, {held("w", shape, TensorBox::flat(24, 12, 12))}}).find("and of [24] on rank 1"),
            std::string::npos);
}

TEST(CheckpointIndex, HostileOnesAreRefusedByName) {
  const auto trouble = [](const std::string& tensor) -> std::string {
    const std::string text = R"({"format":"maniple-sharded-checkpoint-1","files":["a","b"],"parts":{"m":{"texts":{},)"
                             R"("tensors":{"w":)" +
                             tensor + "}}}}";
    try {
      parse_index(text);
    } catch (const ProtocolError& error) {
      return error.what();
    }
    return "parsed";
  };
  const std::string head = R"({"dtype":"F32","shape":[4],"pieces":)";
  EXPECT_EQ(trouble(head + R"([[0,"w",[0],[2]],[1,"w",[2],[2]]]})"), "parsed");
  EXPECT_EQ(trouble(head + R"([[0,"w",[0],[2]],[1,"w",[3],[1]]]})"),
            "tensor \"w\" of part \"m\": 1 of its 4 elements are in no piece");
  for (const auto& [pieces, what] : std::map<std::string, std::string>{
           {R"([[0,"w",[0],[3]],[1,"w",[2],[2]]])", "overlap"},
           {R"([[0,"w",[0],[2]],[0,"w",[2],[2]]])", "two pieces are in one place"},
           {R"([[0,"w",[1],[4]]])", "lies outside"},
           {R"([[0,"w",[9223372036854775807],[4]]])", "lies outside"},
           {R"([[2,"w",[0],[4]]])", "not listed"},
           {R"([[0,"w",[0,0],[4,1]]])", "lies outside"},
           {R"([[0,"w",[-1],[4]]])", "a piece is not"},
           {R"([])", "4 of its 4 elements"},
           {R"([[0,"w",[0],[4]]],"view":[5])", "its view has not as many elements"},
       }) {
    EXPECT_NE(trouble(head + pieces + "}").find(what), std::string::npos)
        << pieces << ": " << trouble(head + pieces + "}");
  }
  EXPECT_NE(trouble(R"({"dtype":"F32","shape":[4294967296,4294967296],"pieces":[]})").find("larger than any file"),
            std::string::npos);
  EXPECT_NE(trouble(R"({"dtype":"X","shape":[4],"pieces":[]})").find("unknown dtype"), std::string::npos);
  EXPECT_NE(trouble(head + R"([]},"w":)" + head + "[]}").find("stands in the index twice"), std::string::npos);
}

}  // namespace
}  // namespace maniple::save_plan_test
