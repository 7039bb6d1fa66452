// Where tensors lie in a flat buffer, and which elements of each fall in which part of it.
#include "train/packed_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include <torch/torch.h>

namespace maniple::packed_layout_test {
namespace {

using Sizes = std::vector<std::size_t>;

PackedLayout layout_of(const Sizes& tensors, std::size_t element_bytes, std::size_t alignment = kPackedAlignment) {
  PackedLayout layout(element_bytes, alignment);
  for (const std::size_t elements : tensors) layout.add(elements);
  return layout;
}

Sizes offsets(const PackedLayout& layout, std::size_t tensors) {
  Sizes all;
  for (std::size_t i = 0; i < tensors; ++i) all.push_back(layout.offset(i));
  return all;
}

/// The buffer in `parts` parts of as many steps of the alignment each, as nearly as that is possible.
Sizes cut_equally(const PackedLayout& layout, std::size_t parts) {
  Sizes ends;
  const std::size_t steps = layout.total() / layout.alignment();
  for (std::size_t part = 1; part <= parts; ++part) ends.push_back(steps * part / parts * layout.alignment());
  return ends;
}

RegisteredMemory memory_of(std::size_t bytes) {
  const auto owner = std::make_shared<std::vector<std::max_align_t>>(bytes / sizeof(std::max_align_t) + 1);
  return {owner->data(), bytes, owner};
}

TEST(PackedLayout, AnEmptyListHasNoBytes) {
  PackedLayout layout = layout_of({}, 4);
  EXPECT_EQ(layout.total(), 0u);
  EXPECT_EQ(layout.bytes(), 0u);
  layout.cut({0, 0, 0});
  EXPECT_EQ(layout.part_bytes(), (Sizes{0, 0, 0}));
}

TEST(PackedLayout, TensorsBeginAtMultiplesOfTheAlignment) {
  const PackedLayout floats = layout_of({3, 16, 0, 17}, 4);
  EXPECT_EQ(floats.alignment(), 16u);
  EXPECT_EQ(offsets(floats, 4), (Sizes{0, 16, 32, 32}));
  EXPECT_EQ(floats.total(), 64u);
  EXPECT_EQ(floats.bytes(), 256u);
  EXPECT_EQ((Sizes{floats.padded(0), floats.padded(1), floats.padded(2), floats.padded(3)}), (Sizes{16, 16, 0, 32}));
  EXPECT_EQ(offsets(layout_of({3, 16, 0, 17}, 1), 4), (Sizes{0, 64, 128, 128}));
  EXPECT_EQ(offsets(layout_of({3, 4, 0, 5}, 16), 4), (Sizes{0, 4, 8, 8}));
  EXPECT_EQ(offsets(layout_of({1, 1}, 128), 2), (Sizes{0, 1})) << "an element is larger than the alignment";
}

TEST(PackedLayout, WithoutAlignmentThereIsNoPadding) {
  const PackedLayout layout = layout_of({3, 1, 0, 5}, 8, 1);
  EXPECT_EQ(offsets(layout, 4), (Sizes{0, 3, 4, 4}));
  EXPECT_EQ(layout.total(), 9u);
  EXPECT_EQ(layout.bytes(), 72u);
}

TEST(PackedLayout, ATensorMayLieInSeveralParts) {
  PackedLayout layout = layout_of({40, 5}, 4);  // [0, 40) and [48, 53) of 64
  layout.cut({16, 32, 48, 64});
  const std::vector<Sizes> expected{{0, 16, 0}, {16, 16, 16}, {32, 8, 32}, {0, 0, 0}};
  for (std::size_t part = 0; part < 4; ++part) {
    const PackedLayout::Piece piece = layout.piece(part, 0);
    EXPECT_EQ((Sizes{piece.begin, piece.count, piece.offset}), expected[part]) << part;
  }
  EXPECT_EQ(layout.piece(2, 1).count, 0u);
  EXPECT_EQ(layout.piece(3, 1).count, 5u);
  EXPECT_EQ(layout.piece(3, 1).offset, 48u);
  EXPECT_EQ(layout.part_bytes(), (Sizes{64, 64, 64, 64}));
  layout.cut({48, 64});  // another cut replaces the first
  EXPECT_EQ(layout.piece(0, 0).count, 40u);
  EXPECT_EQ(layout.part_bytes(), (Sizes{192, 64}));
}

TEST(PackedLayout, PartsHoldEveryElementOnce) {
  const Sizes tensors{0, 1, 15, 16, 17, 0, 100, 3};
  for (const std::size_t parts : {1u, 2u, 3u, 5u, 7u, 11u, 64u, 500u}) {  // the last ones have more parts than steps
    PackedLayout layout = layout_of(tensors, 4);
    layout.cut(cut_equally(layout, parts));
    std::size_t bytes = 0;
    for (const std::size_t one : layout.part_bytes()) bytes += one;
    EXPECT_EQ(bytes, layout.bytes());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      std::size_t next = 0;
      for (std::size_t part = 0; part < parts; ++part) {
        const PackedLayout::Piece piece = layout.piece(part, i);
        if (piece.count == 0) continue;
        EXPECT_EQ(piece.begin, next) << parts << " parts, tensor " << i;
        EXPECT_EQ(piece.offset, layout.offset(i) + piece.begin);
        EXPECT_GE(piece.offset, layout.part_begin(part));
        EXPECT_LE(piece.offset + piece.count, layout.part_end(part));
        next += piece.count;
      }
      EXPECT_EQ(next, tensors[i]) << parts << " parts, tensor " << i;
    }
  }
}

TEST(PackedLayout, RowsAreDividedAsByChunk) {
  for (const int parts : {1, 2, 3, 5, 7}) {
    for (const std::int64_t rows : {0, 1, 2, 5, 6, 16}) {
      const auto chunks = torch::arange(rows).chunk(parts);
      for (int part = 0; part < parts; ++part) {
        const RowRange range = rows_of(rows, parts, part);
        const auto chunk = static_cast<std::size_t>(part);
        EXPECT_EQ(range.count, chunk < chunks.size() ? chunks[chunk].numel() : 0) << rows << " rows, part " << part;
        if (range.count != 0) {
          EXPECT_EQ(range.begin, chunks[chunk][0].item<std::int64_t>()) << rows << " rows, part " << part;
        }
      }
    }
  }
}

TEST(PackedLayout, EachPartHoldsAHeadAndItsRows) {
  // 5 rows of 3, a scalar, none, 2 rows of 20: over 3 ranks 2 + 2 + 1, 1 + 0 + 0, nothing, 1 + 1 + 0.
  const std::vector<PackedLayout::Rows> tensors{{5, 3}, {1, 1}, {0, 0}, {2, 20}};
  const PackedLayout layout = PackedLayout::by_rows(4, 5, tensors, 3);
  EXPECT_EQ(layout.part_counts(), (Sizes{16 + 16 + 16 + 0 + 32, 16 + 16 + 0 + 0 + 32, 16 + 16}));
  EXPECT_EQ(layout.part_bytes(), (Sizes{320, 256, 128}));
  EXPECT_EQ(layout.total(), 176u);
  EXPECT_EQ((Sizes{layout.part_begin(0), layout.part_begin(1), layout.part_begin(2)}), (Sizes{0, 80, 144}));
  const auto piece = [&](std::size_t part, std::size_t i) {
    const PackedLayout::Piece one = layout.piece(part, i);
    return one.count == 0 ? Sizes{} : Sizes{one.begin, one.count, one.offset};
  };
  EXPECT_EQ(piece(0, 0), (Sizes{0, 6, 16}));
  EXPECT_EQ(piece(0, 1), (Sizes{0, 1, 32}));
  EXPECT_EQ(piece(0, 2), Sizes{});
  EXPECT_EQ(piece(0, 3), (Sizes{0, 20, 48}));
  EXPECT_EQ(piece(1, 0), (Sizes{6, 6, 96}));
  EXPECT_EQ(piece(1, 1), Sizes{});
  EXPECT_EQ(piece(1, 3), (Sizes{20, 20, 112}));
  EXPECT_EQ(piece(2, 0), (Sizes{12, 3, 160}));
  EXPECT_EQ(piece(2, 3), Sizes{});
}

TEST(PackedLayout, RowsOfNoTensorsLeaveTheHeads) {
  const PackedLayout layout = PackedLayout::by_rows(1, 16, {}, 5);
  EXPECT_EQ(layout.part_counts(), Sizes(5, 64));
  EXPECT_EQ(layout.bytes(), 320u);
}

TEST(PackedLayout, MoreRanksThanRows) {
  const std::vector<PackedLayout::Rows> tensors{{3, 7}};
  const PackedLayout layout = PackedLayout::by_rows(8, 0, tensors, 11);
  for (std::size_t part = 0; part < 11; ++part) {
    const PackedLayout::Piece piece = layout.piece(part, 0);
    EXPECT_EQ(piece.count, part < 3 ? 7u : 0u);
    EXPECT_EQ(piece.begin, 7 * std::min<std::size_t>(part, 3));
    EXPECT_EQ(layout.part_counts()[part], part < 3 ? 8u : 0u);
  }
}

TEST(PackedLayout, ViewsHaveTheStridesOfTheirTensor) {
  const torch::Tensor channels_last =
      torch::arange(2 * 3 * 4 * 5, torch::kFloat32).view({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const torch::Tensor transposed = torch::arange(12, torch::kFloat32).view({3, 4}).t();
  const torch::Tensor gaps = torch::arange(20, torch::kFloat32).view({4, 5}).narrow(1, 1, 2);
  const torch::Tensor none = torch::empty({0, 4});
  const torch::Tensor scalar = torch::ones({}).requires_grad_();
  const std::vector<torch::Tensor> tensors{channels_last, transposed, gaps, none, scalar};
  PackedLayout layout(sizeof(float));
  for (const torch::Tensor& tensor : tensors) layout.add(static_cast<std::size_t>(tensor.numel()));
  constexpr std::size_t kBase = 64;
  const RegisteredMemory memory = memory_of(kBase + layout.bytes());
  std::vector<torch::Tensor> views;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    views.push_back(layout.view(memory, kBase, i, tensors[i]));
    views[i].copy_(tensors[i].detach());
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(torch::equal(views[i], tensors[i].detach())) << i;
    EXPECT_EQ(views[i].strides(), i == 2 ? torch::IntArrayRef({2, 1}) : tensors[i].strides()) << i;
    EXPECT_FALSE(views[i].requires_grad());
    if (views[i].numel() == 0) continue;
    const auto* data = static_cast<const std::byte*>(memory.data()) + kBase + layout.offset(i) * sizeof(float);
    EXPECT_EQ(views[i].data_ptr(), data) << i;
  }
}

TEST(PackedLayout, AViewKeepsTheMemory) {
  torch::Tensor view;
  std::weak_ptr<void> owner;
  {
    const auto bytes = std::make_shared<std::vector<float>>(16, 1.0F);
    owner = bytes;
    view = layout_of({4}, 4).view({bytes->data(), 64, bytes}, 0, 0, torch::empty({2, 2}));
  }
  EXPECT_FALSE(owner.expired());
  EXPECT_EQ(view.sum().item<float>(), 4.0F);
  view.reset();
  EXPECT_TRUE(owner.expired());
}

}  // namespace
}  // namespace maniple::packed_layout_test
