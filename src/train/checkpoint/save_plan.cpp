#include "train/checkpoint/save_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/safetensors.h"
#include "train/state_key.h"

namespace maniple {
namespace {

/// Smaller replicas are not cut.
constexpr std::int64_t kLeastCutBytes = std::int64_t{1} << 20;
constexpr std::size_t kMaxPlanText = std::size_t{1} << 20;

void put_extents(ByteWriter& writer, const Extents& extents) {
  writer.put(static_cast<std::uint32_t>(extents.size()));
  for (const std::int64_t extent : extents) writer.put(extent);
}

Extents get_extents(ByteReader& reader) {
  Extents extents;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) extents.push_back(reader.get<std::int64_t>());
  return extents;
}

/// A box of one tensor, and the ranks that hold it.
struct SharedBox {
  const HeldBox* first;
  std::vector<SavePlan::Holder> holders;
};

std::string ranks_of(const std::vector<SavePlan::Holder>& holders) {
  std::vector<std::size_t> ranks;
  for (const SavePlan::Holder& holder : holders) ranks.push_back(holder.rank);
  return joined(ranks);
}

/// The distinct boxes of a tensor.
std::vector<SharedBox> distinct(const std::vector<std::vector<HeldBox>>& held,
                                const std::vector<SavePlan::Holder>& holders) {
  std::map<std::pair<Extents, Extents>, SharedBox> boxes;
  const SavePlan::Holder& first = holders.front();
  const HeldBox& like = held[first.rank][first.held];
  for (const SavePlan::Holder& holder : holders) {
    const HeldBox& each = held[holder.rank][holder.held];
    MANIPLE_REQUIRE(each.dtype == like.dtype && each.shape == like.shape,
                    "tensor \"{}\" of part \"{}\" is {} [{}] on rank {} and {} [{}] on rank {}: a name must mean the "
                    "same tensor on all "
                    "ranks",
                    each.name, each.part, like.dtype, joined(like.shape), first.rank, each.dtype, joined(each.shape),
                    holder.rank);
    MANIPLE_REQUIRE(
        each.box.view == like.box.view,
        "tensor \"{}\" of part \"{}\" is divided in a view of [{}] on rank {} and of [{}] on rank {}; expected "
        "one for all ranks",
        each.name, each.part, joined(like.box.view), first.rank, joined(each.box.view), holder.rank);
    if (each.box.count() == 0) continue;
    SharedBox& box = boxes[{each.box.offset, each.box.size}];
    if (box.holders.empty()) box.first = &each;
    MANIPLE_REQUIRE(box.holders.empty() || box.holders.back().rank != holder.rank,
                    "tensor \"{}\" of part \"{}\" is given twice on rank {}", each.name, each.part, holder.rank);
    box.holders.push_back(holder);
  }
  std::vector<SharedBox> result;
  std::vector<const TensorBox*> cover;
  for (auto& [place, box] : boxes) {
    cover.push_back(&box.first->box);
    result.push_back(std::move(box));
  }
  if (const std::string error = cover_error(cover, like.box.view); !error.empty()) {
    throw InvalidArgument(format_text("tensor \"{}\" of part \"{}\", [{}], as ranks {} hold it: {}", like.name,
                                      like.part, joined(like.shape), ranks_of(holders), error));
  }
  return result;
}

}  // namespace

std::string encode_held(const std::vector<HeldBox>& held) {
  ByteWriter writer;
  writer.put(static_cast<std::uint64_t>(held.size()));
  for (const HeldBox& each : held) {
    for (const std::string* text : {&each.part, &each.name, &each.dtype}) writer.put_string(*text);
    for (const Extents* extents : {&each.shape, &each.box.view, &each.box.offset, &each.box.size})
      put_extents(writer, *extents);
    writer.put(static_cast<std::uint8_t>(each.of_lowest_rank));
  }
  return writer.take();
}

std::vector<HeldBox> decode_held(std::string_view bytes) {
  ByteReader reader(bytes);
  std::vector<HeldBox> held;
  for (auto left = reader.get<std::uint64_t>(); left > 0; --left) {
    HeldBox each;
    for (std::string* text : {&each.part, &each.name, &each.dtype}) *text = reader.get_string(kMaxPlanText);
    for (Extents* extents : {&each.shape, &each.box.view, &each.box.offset, &each.box.size})
      *extents = get_extents(reader);
    each.of_lowest_rank = reader.get<std::uint8_t>() != 0;
    held.push_back(std::move(each));
  }
  reader.expect_end();
  return held;
}

SavePlan make_save_plan(const std::vector<std::vector<HeldBox>>& held) {
  const std::size_t ranks = held.size();
  MANIPLE_REQUIRE(ranks < kMaxFilesOfCheckpoint, "a sharded checkpoint of {} ranks: at most {} can write one", ranks,
                  kMaxFilesOfCheckpoint - 1);
  SavePlan plan;
  plan.items.resize(ranks);
  std::map<std::pair<std::string_view, std::string_view>, std::vector<SavePlan::Holder>> tensors;
  for (std::size_t r = 0; r < ranks; ++r) {
    plan.index.files.push_back(rank_file_name(r, ranks));
    for (std::size_t i = 0; i < held[r].size(); ++i) tensors[{held[r][i].part, held[r][i].name}].push_back({r, i});
  }
  // A piece to be written by one of its holders.
  struct Job {
    std::int64_t bytes;
    TensorBox box;
    std::vector<SavePlan::Holder> holders;
  };
  std::vector<Job> jobs;
  std::vector<std::int64_t> load(ranks, 0);
  const auto assign = [&](Job& job, std::size_t to) {
    load[job.holders[to].rank] += job.bytes;
    plan.items[job.holders[to].rank].push_back({job.holders[to].held, std::move(job.box), {}});
  };
  for (const auto& [name, holders] : tensors) {
    const HeldBox& like = held[holders.front().rank][holders.front().held];
    const auto element = safetensors_element_bytes(like.dtype);
    MANIPLE_REQUIRE(element, "tensor \"{}\" has dtype {}, which safetensors files cannot hold", like.name, like.dtype);
    plan.index.parts[like.part].tensors[like.name] = {like.dtype, like.shape, like.box.view, {}};
    for (SharedBox& shared : distinct(held, holders)) {
      const auto bytes = shared.first->box.count() * static_cast<std::int64_t>(*element);
      const bool alone = shared.holders.size() == 1;
      if (alone || shared.first->of_lowest_rank) {
        Job job{bytes, shared.first->box, std::move(shared.holders)};
        assign(job, 0);
        continue;
      }
      plan.replicas.push_back(shared.holders);
      plan.replica_names.push_back(format_text("tensor \"{}\" of part \"{}\"", like.name, like.part));
      const auto parts = bytes < kLeastCutBytes ? 1 : static_cast<std::int64_t>(shared.holders.size());
      for (TensorBox& box : cut_box(shared.first->box, parts)) {
        const auto piece = box.count() * static_cast<std::int64_t>(*element);
        jobs.push_back({piece, std::move(box), shared.holders});
      }
    }
  }
  // Largest first; each goes to the holder with the fewest bytes to write. (Stable, so that all ranks make the same
  // plan.)
  std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.bytes > b.bytes; });
  for (Job& job : jobs) {
    std::size_t to = 0;
    for (std::size_t i = 1; i < job.holders.size(); ++i) {
      if (load[job.holders[i].rank] < load[job.holders[to].rank]) to = i;
    }
    assign(job, to);
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    std::stable_sort(plan.items[r].begin(), plan.items[r].end(), [&](const SavePlan::Item& a, const SavePlan::Item& b) {
      return std::tie(a.held, a.box.offset) < std::tie(b.held, b.box.offset);
    });
    std::set<std::string> used;
    for (SavePlan::Item& item : plan.items[r]) {
      const HeldBox& each = held[r][item.held];
      const std::string key = name_in_part(each.part, each.name);
      item.key = key;
      for (int copy = 2; !used.insert(item.key).second; ++copy) item.key = format_text("{}#{}", key, copy);
      plan.index.parts[each.part].tensors[each.name].pieces.push_back({item.box, r, item.key});
    }
  }
  return plan;
}

}  // namespace maniple
