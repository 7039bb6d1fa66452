// FullyShardedBase, and operations on all units of a module.
#include <maniple/train/fully_sharded.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"
#include "train/state_key.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"

namespace maniple {
namespace {

using torch::Tensor;

/// A unit at or below a module, and the name of the unit's module.
struct NamedUnit {
  std::string name;
  std::shared_ptr<detail::ShardUnit> unit;
};

void collect_units(torch::nn::Module& module, const std::string& name, std::vector<NamedUnit>& units) {
  if (const auto* base = dynamic_cast<detail::FullyShardedBase*>(&module)) {
    const bool known =
        std::any_of(units.begin(), units.end(), [&](const NamedUnit& one) { return one.unit == base->unit(); });
    if (!known) units.push_back({name, base->unit()});
  }
  for (const auto& child : module.named_children()) collect_units(*child.value(), dotted(name, child.key()), units);
}

std::vector<NamedUnit> units_of(torch::nn::Module& module) {
  std::vector<NamedUnit> units;
  collect_units(module, "", units);
  return units;
}

std::vector<std::shared_ptr<detail::ShardUnit>> bare_units_of(torch::nn::Module& module) {
  std::vector<std::shared_ptr<detail::ShardUnit>> units;
  for (NamedUnit& one : units_of(module)) units.push_back(std::move(one.unit));
  return units;
}

/// Puts all units of a model into one family.
void join_family(const std::vector<std::shared_ptr<detail::ShardUnit>>& units) {
  for (const auto& unit : units) unit->family = units.front()->family;
}

void require_unchanged(const torch::nn::Module& module, std::optional<torch::Device> device,
                       std::optional<torch::Dtype> dtype) {
  for (const auto& item : module.named_parameters()) {
    const Tensor& tensor = item.value();
    const bool moves =
        device && (tensor.device().type() != device->type() || (device->has_index() && tensor.device() != *device));
    const bool converts = dtype && tensor.is_floating_point() && tensor.scalar_type() != *dtype;
    MANIPLE_REQUIRE(
        !moves && !converts,
        "fully_shard: to() cannot change the device or dtype of a unit ({} is {} on {}); convert the module "
        "first, or compute in another dtype with MixedPrecision::param_dtype",
        item.key(), c10::toString(tensor.scalar_type()), tensor.device().str());
  }
}

std::string megabytes(std::uint64_t bytes) { return format_text("{:.2f} MB", static_cast<double>(bytes) / 1e6); }

}  // namespace

namespace detail {
namespace {

/// A child of the module behind a unit. It refuses torch::save and torch::load of that module, which would bypass the
/// unit and take shards for whole parameters.
struct ArchiveGuard final : torch::nn::Module {
  ArchiveGuard() : torch::nn::Module("ArchiveGuard") {}
  void save(torch::serialize::OutputArchive&) const override { refuse("torch::save"); }
  void load(torch::serialize::InputArchive&) override { refuse("torch::load"); }
  [[noreturn]] static void refuse(const char* function) {
    throw Unsupported(
        format_text("{} of a module that was given to fully_shard: its parameters are this rank's rows; use Checkpoint "
                    "with CheckpointOptions::sharded, or full_parameters and set_full_parameters",
                    function));
  }
};

}  // namespace

FullyShardedBase::FullyShardedBase(std::shared_ptr<torch::nn::Module> module, FullyShardOptions options)
    : torch::nn::Module("FullySharded"), whole_(std::move(module)) {
  MANIPLE_REQUIRE(whole_ != nullptr, "fully_shard: the module is null");
  unit_ = ShardUnit::make(*whole_, options);
  for (const auto& entry : whole_->named_parameters(/*recurse=*/false))
    register_parameter(entry.key(), entry.value(), entry.value().requires_grad());
  for (const auto& entry : whole_->named_buffers(/*recurse=*/false)) register_buffer(entry.key(), entry.value());
  for (const auto& entry : whole_->named_children()) register_module(entry.key(), entry.value());
  if (unit_->group().size() > 1) whole_->register_module("fully_shard", std::make_shared<ArchiveGuard>());
  join_family(bare_units_of(*this));
}
FullyShardedBase::~FullyShardedBase() = default;

std::vector<torch::Tensor> FullyShardedBase::trained_parameters() const {
  std::vector<torch::Tensor> result = distinct(parameters());
  std::erase_if(result, [](const torch::Tensor& one) { return !one.requires_grad(); });
  return result;
}

UnitsNoSync FullyShardedBase::no_sync() {
  auto units = bare_units_of(*this);
  join_family(units);
  return UnitsNoSync(std::move(units));
}
Unsharded FullyShardedBase::unshard() { return Unsharded(bare_units_of(*this)); }

std::optional<TensorShard> FullyShardedBase::shard_of(const std::string& parameter) const {
  const ShardedParameter* found = unit_->find(parameter);
  if (found == nullptr) return std::nullopt;
  TensorShard shard = found->layout;
  shard.name = parameter;
  shard.local = found->shard;
  return shard;
}

void FullyShardedBase::train(bool on) {
  whole_->train(on);
  torch::nn::Module::train(on);
}
bool FullyShardedBase::is_training() const noexcept { return whole_->is_training(); }

void FullyShardedBase::to(torch::Device device, torch::Dtype dtype, bool) { require_unchanged(*this, device, dtype); }
void FullyShardedBase::to(torch::Dtype dtype, bool) { require_unchanged(*this, std::nullopt, dtype); }
void FullyShardedBase::to(torch::Device device, bool) { require_unchanged(*this, device, std::nullopt); }

std::shared_ptr<torch::nn::Module> FullyShardedBase::clone(const TorchOptional<torch::Device>&) const {
  throw Unsupported(
      "clone() of a fully sharded module: each rank holds a part; make the module anew, and use "
      "full_parameters and set_full_parameters");
}
void FullyShardedBase::save(torch::serialize::OutputArchive&) const {
  throw Unsupported(
      "torch::save of a fully sharded module: each rank holds a part; use Checkpoint with "
      "CheckpointOptions::sharded, or full_parameters on all ranks");
}
void FullyShardedBase::load(torch::serialize::InputArchive&) {
  throw Unsupported(
      "torch::load of a fully sharded module: each rank holds a part; use Checkpoint with "
      "CheckpointOptions::sharded, or set_full_parameters");
}

}  // namespace detail

FullyShardedSummary fully_sharded_summary(torch::nn::Module& module) {
  FullyShardedSummary summary;
  std::uint64_t most_whole = 0, most_gradient = 0;
  std::set<detail::ShardContext*> contexts;
  for (const NamedUnit& named : units_of(module)) {
    detail::ShardUnit& unit = *named.unit;
    summary.ranks = unit.group().size();
    summary.overlap = unit.context().overlaps() ? "thread" : "none";
    if (contexts.insert(&unit.context()).second) summary.scratch_bytes += unit.context().scratch_bytes();
    FullyShardedSummary::Unit one;
    one.name = named.name;
    std::uint64_t gradients = 0;
    for (const detail::ShardedParameter& parameter : unit.parameters()) {
      const auto elements = static_cast<std::uint64_t>(parameter.rows * parameter.row_elements);
      one.parameters += elements;
      one.shard_bytes += parameter.shard.nbytes();
      if (!parameter.parameter.requires_grad()) continue;
      summary.gradient_bytes += parameter.shard.nbytes();
      gradients += elements * parameter.whole.element_size();
    }
    one.whole_bytes = unit.whole_bytes();
    one.reduce_bytes = unit.reduce_bytes();
    one.reshards = unit.reshards();
    summary.parameter_bytes += one.shard_bytes;
    if (one.reshards) {
      most_whole = std::max(most_whole, one.whole_bytes);
      most_gradient = std::max(most_gradient, gradients);
    } else {
      summary.gathered_bytes += one.whole_bytes;
      summary.whole_gradient_bytes += gradients;
    }
    const auto ranks = static_cast<std::uint64_t>(summary.ranks);
    summary.received_bytes += (one.reshards ? 2 : 1) * (unit.gather_bytes() - unit.gather_bytes() / ranks);
    summary.sent_bytes += (one.reshards ? 2 : 1) * (unit.gather_bytes() - unit.gather_bytes() / ranks);
    summary.received_bytes += one.reduce_bytes - one.reduce_bytes / ranks;
    summary.sent_bytes += one.reduce_bytes - one.reduce_bytes / ranks;
    summary.units.push_back(std::move(one));
  }
  summary.gathered_bytes += most_whole;
  summary.whole_gradient_bytes += most_gradient;
  return summary;
}

std::uint64_t FullyShardedSummary::peak_bytes(int states) const noexcept {
  return parameter_bytes + gradient_bytes * static_cast<std::uint64_t>(1 + states) + gathered_bytes + scratch_bytes +
         whole_gradient_bytes;
}

std::string FullyShardedSummary::text() const {
  std::string result = format_text("fully sharded over {} ranks, {} units, overlap {}\n", ranks, units.size(), overlap);
  for (const Unit& unit : units)
    result += format_text("  {:<24} {:>10} parameters  whole {:>10}  here {:>10}{}\n",
                          unit.name.empty() ? "(root)" : unit.name, unit.parameters, megabytes(unit.whole_bytes),
                          megabytes(unit.shard_bytes), unit.reshards ? "" : "  whole until its backward");
  result += format_text(
      "  on this rank: parameters {}, gradients {}, whole at once {}, whole gradients {}, communication {}\n"
      "  in a step it receives {} and sends {}\n",
      megabytes(parameter_bytes), megabytes(gradient_bytes), megabytes(gathered_bytes), megabytes(whole_gradient_bytes),
      megabytes(scratch_bytes), megabytes(received_bytes), megabytes(sent_bytes));
  return result;
}

}  // namespace maniple
