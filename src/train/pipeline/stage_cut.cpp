// Cuts a Sequential into the stages of a pipeline.
#include <map>
#include <set>

#include "comm/base/check.h"
#include <maniple/dist.h>
#include <maniple/train/pipeline.h>

namespace maniple {
namespace {

/// Some layers of a Sequential, under their names there.
struct LayersImpl : torch::nn::Module {
  LayersImpl(const torch::nn::Sequential& all, std::size_t begin, std::size_t end) : torch::nn::Module("Stage") {
    const auto names = all->named_children();
    for (std::size_t i = begin; i < end; ++i) {
      layers.push_back(*(all->begin() + static_cast<std::ptrdiff_t>(i)));
      register_module(names[i].key(), layers.back().ptr());
    }
  }
  torch::Tensor forward(torch::Tensor input) {
    torch::nn::AnyValue value(std::move(input));
    for (torch::nn::AnyModule& layer : layers) value = layer.any_forward(std::move(value));
    const torch::Tensor* const result = value.try_get<torch::Tensor>();
    MANIPLE_REQUIRE(result != nullptr, "Pipeline: the last layer of a stage must return a tensor; cut elsewhere");
    return *result;
  }
  std::vector<torch::nn::AnyModule> layers;
};

}  // namespace

StageCut cut_into_stages(const torch::nn::Sequential& layers, const StageCutOptions& options) {
  const auto group = options.group ? options.group : get_default_group();
  group->require_member("cut_into_stages");
  MANIPLE_REQUIRE(options.stages_per_rank >= 1, "cut_into_stages: {} stages for each rank; expected at least 1",
                  options.stages_per_rank);
  const std::size_t ranks = group->size(), own = group->rank(), count = ranks * options.stages_per_rank;
  StageCut cut;
  cut.begins = options.begins;
  if (cut.begins.empty()) {
    cut.begins = balanced_cut(layers, count, options.device, {.sample = options.sample, .group = group});
  }
  bool fits = cut.begins.size() == count && cut.begins.front() == 0 && cut.begins.back() < layers->size();
  for (std::size_t i = 1; i < cut.begins.size(); ++i) fits = fits && cut.begins[i] > cut.begins[i - 1];
  MANIPLE_REQUIRE(
      fits,
      "cut_into_stages: stages that begin with layers {} of {}; expected {} rising numbers, 0 first: {} for "
      "each of {} ranks",
      joined(cut.begins), layers->size(), count, options.stages_per_rank, ranks);

  struct Holders {
    std::string name;  // the name where it appears first
    torch::Tensor parameter;
    std::set<std::size_t> ranks;
  };
  std::map<const void*, std::size_t> seen;
  std::vector<Holders> parameters;
  for (std::size_t stage = 0; stage < count; ++stage) {
    const std::size_t end = stage + 1 < count ? cut.begins[stage + 1] : layers->size(), rank = stage % ranks;
    const auto part = std::make_shared<LayersImpl>(layers, cut.begins[stage], end);
    for (const auto& item : part->named_parameters()) {
      const auto [place, is_new] = seen.emplace(item.value().unsafeGetTensorImpl(), parameters.size());
      if (is_new) parameters.push_back({item.key(), item.value(), {}});
      parameters[place->second].ranks.insert(rank);
    }
    if (rank == own) cut.stages.emplace_back(part);
  }
  for (const Holders& one : parameters) {
    if (one.ranks.size() > 1 && one.ranks.count(own) != 0) {
      cut.tied.emplace_back(one.name, one.parameter);
    }
  }
  return cut;
}

}  // namespace maniple
