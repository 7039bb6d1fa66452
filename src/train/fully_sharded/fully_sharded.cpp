// FullyShardedBase, and what is done with all units of a module.
#include <maniple/train/fully_sharded.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/check.h"
#include "tensor/public_call.h"
#include "train/fully_sharded/unit.h"
#include "train/tensor_layout.h"

namespace maniple {
namespace {

using torch::Tensor;

/// The units at and below a module, and the names of their modules.
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
  for (const auto& child : module.named_children())
    collect_units(*child.value(), name.empty() ? child.key() : name + "." + child.key(), units);
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

/// Of every sharded parameter of a module: its unit, and what that knows of it.
struct Sharded {
  detail::ShardUnit* unit = nullptr;
  const detail::ShardedParameter* parameter = nullptr;
};
std::unordered_map<const c10::TensorImpl*, Sharded> sharded_in(const std::vector<NamedUnit>& units) {
  std::unordered_map<const c10::TensorImpl*, Sharded> all;
  for (const NamedUnit& one : units) {
    for (const detail::ShardedParameter& parameter : one.unit->parameters())
      all[parameter.parameter.unsafeGetTensorImpl()] = {one.unit.get(), &parameter};
  }
  return all;
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

/// A child of the module behind a unit: torch::save and torch::load of that module, past the unit, would take rows for whole parameters.
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
}
FullyShardedBase::~FullyShardedBase() = default;

std::vector<torch::Tensor> FullyShardedBase::trained_parameters() const {
  std::vector<torch::Tensor> result = distinct(parameters());
  std::erase_if(result, [](const torch::Tensor& one) { return !one.requires_grad(); });
  return result;
}

UnitsNoSync FullyShardedBase::no_sync() { return UnitsNoSync(bare_units_of(*this)); }
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

NamedTensors full_parameters(torch::nn::Module& module, int only_rank) {
  const PublicCall call("full_parameters, which all ranks call");
  const torch::NoGradGuard no_grad;
  const auto sharded = sharded_in(units_of(module));
  NamedTensors result;
  for (const auto& item : module.named_parameters()) {
    const auto found = sharded.find(item.value().unsafeGetTensorImpl());
    if (found == sharded.end()) {
      result.emplace_back(item.key(), item.value().detach().clone());
      continue;
    }
    const detail::ShardedParameter& one = *found->second.parameter;
    ProcessGroup& group = found->second.unit->group();
    const bool wanted = only_rank < 0 || group.rank() == only_rank;
    Tensor whole = torch::empty(wanted ? one.shape : std::vector<std::int64_t>{0}, one.shard.options());
    const Device device = detail::device_for(one.shard.device());
    std::vector<std::size_t> bytes;
    for (int rank = 0; rank < group.size(); ++rank)
      bytes.push_back(static_cast<std::size_t>(detail::rows_of(one.rows, group.size(), rank).count * one.row_elements) *
                      one.shard.element_size());
    const ConstBuffer own{one.shard.data_ptr(), one.shard.nbytes(), DType::uint8, device};
    const Buffer all{whole.data_ptr(), whole.nbytes(), DType::uint8, device};
    const CallOptions options{.stream = current_stream_on(device), .where = public_place()};
    if (only_rank < 0) {
      group.all_gather(own, all, bytes, options);
    } else {
      group.gather(own, all, only_rank, bytes, options);
    }
    if (wanted) result.emplace_back(item.key(), std::move(whole));
  }
  return result;
}

void set_full_parameters(torch::nn::Module& module, const NamedTensors& parameters) {
  const torch::NoGradGuard no_grad;
  const auto sharded = sharded_in(units_of(module));
  const auto named = module.named_parameters();
  const auto place_of = [&](const std::string& name) {
    const Tensor* parameter = named.find(name);
    MANIPLE_REQUIRE(parameter != nullptr, "set_full_parameters: the module has no parameter {}", name);
    return *parameter;
  };
  // Everything is looked at before anything is changed.
  for (const auto& [name, tensor] : parameters) {
    const auto found = sharded.find(place_of(name).unsafeGetTensorImpl());
    const auto shape = found == sharded.end() ? place_of(name).sizes().vec() : found->second.parameter->shape;
    MANIPLE_REQUIRE(tensor.defined() && tensor.sizes().vec() == shape,
                    "set_full_parameters: {} has shape [{}] here, the module's [{}]", name,
                    tensor.defined() ? joined(tensor.sizes()) : "", joined(shape));
  }
  for (const auto& [name, tensor] : parameters) {
    Tensor parameter = place_of(name);
    const auto found = sharded.find(parameter.unsafeGetTensorImpl());
    if (found == sharded.end()) {
      parameter.copy_(tensor);
    } else {
      const detail::RowRange own = found->second.parameter->own;
      parameter.copy_((tensor.dim() == 0 ? tensor.reshape({1}) : tensor).narrow(0, own.begin, own.count));
    }
  }
}

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
