// Construction of a unit, and the switch of its parameters between shards and whole tensors.
#include "train/fully_sharded/unit.h"

#include <algorithm>
#include <unordered_map>

#include "comm/base/check.h"
#include "train/ddp/parameter.h"
#include "train/state_key.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>
#include <maniple/train/tensor_layout.h>

namespace maniple::detail {
namespace {

using torch::Tensor;

/// Calls f(module, its name) for the module and its descendants, except nested units and their contents.
template <class F>
void for_each_own(torch::nn::Module& module, const std::string& prefix, const F& f, bool& contains_units) {
  f(module, prefix);
  for (const auto& child : module.named_children()) {
    if (dynamic_cast<FullyShardedBase*>(child.value().get()) != nullptr) {
      contains_units = true;
    } else {
      for_each_own(*child.value(), dotted(prefix, child.key()), f, contains_units);
    }
  }
}

const char* dtype_name(std::optional<torch::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "unset"; }

}  // namespace

// ---- Construction ---------------------------------------------------------------------------------------------------

std::shared_ptr<ShardUnit> ShardUnit::make(torch::nn::Module& module, const FullyShardOptions& given) {
  FullyShardOptions options = given;
  if (!options.group) options.group = get_default_group();
  MANIPLE_REQUIRE(options.overlap != Overlap::inline_,
                  "fully_shard: Overlap::inline_ is an option of DistributedDataParallel's buckets; a unit takes none "
                  "(communicate when it is needed), thread or automatic");
  options.group->require_member("fully_shard");
  if (options.replicate_group) options.replicate_group->require_member("fully_shard: replicate_group");
  if (options.replicate_group && options.replicate_group->size() == 1) options.replicate_group = nullptr;
  const torch::NoGradGuard no_grad;
  const PublicCall call("fully_shard, which all ranks call");
  return std::shared_ptr<ShardUnit>(new ShardUnit(module, options));
}

ShardUnit::ShardUnit(torch::nn::Module& module, const FullyShardOptions& options)
    : options_(options), context_(ShardContext::of(options)), class_name_(module.name()) {
  MANIPLE_REQUIRE(dynamic_cast<FullyShardedBase*>(&module) == nullptr,
                  "fully_shard: {} is a unit already; give it the module itself", class_name_);
  number_ = context_->add(this);
  try {
    collect(module);
    require_same_on_all_ranks(module);
    if (options_.init_sync) synchronize(module);
    reshards_ = options_.reshard_after_forward.value_or(!contains_units_);
    shard();
    lay_out_gather();
  } catch (...) {
    context_->remove(this);
    throw;
  }
  for (const ShardedParameter& one : parameters_) {
    TensorLayout layout = layout_of(one.parameter);  // a tensor-parallel layer may divide it, too
    layout.kind = LayoutKind::fully_sharded;
    layout.divided_over.push_back(options_.group);
    layout.owner = "fully_shard " + text();
    layout.shard = one.layout;
    set_layout(one.parameter, std::move(layout));
  }
}

ShardUnit::~ShardUnit() { context_->remove(this); }

std::string ShardUnit::text() const { return format_text("unit {} ({})", number_, class_name_); }

void ShardUnit::fail(const std::string& what) {
  const std::string text = format_text("fully_shard: {} on rank {}: {}", this->text(), group().rank(), what);
  context_->abort(text);
  throw InvalidArgument(text);
}

void ShardUnit::collect(torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  for_each_own(
      module, "",
      [&](torch::nn::Module& own, const std::string& prefix) {
        const auto* divided = dynamic_cast<const ShardedModule*>(&own);
        for (const auto& entry : own.named_parameters(/*recurse=*/false)) {
          const Tensor& parameter = entry.value();
          const std::string name = dotted(prefix, entry.key());
          const auto [place, fresh] = seen.emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
          if (!fresh) {
            parameters_[place->second].names.push_back(name);
            continue;
          }
          const TensorLayout known = layout_of(parameter);
          MANIPLE_REQUIRE(known.kind != LayoutKind::fully_sharded,
                          "fully_shard: parameter {} of {} belongs to {} already; a parameter that several modules use "
                          "must be in one unit: make their common parent the unit, and not them",
                          name, text(), known.owner);
          MANIPLE_REQUIRE(!parameter.is_meta(),
                          "fully_shard: parameter {} of {} is on the meta device and has no values; give fully_shard a "
                          "function that makes the module, and each unit is made and divided before the next",
                          name, text());
          MANIPLE_REQUIRE(parameter.layout() == torch::kStrided && !parameter.is_complex(),
                          "fully_shard: parameter {} of {} is {}; expected a dense one of real numbers", name, text(),
                          parameter.is_complex() ? "complex" : "sparse");
          MANIPLE_REQUIRE(parameters_.empty() || parameter.device() == device_,
                          "fully_shard: parameter {} of {} is on {}, others on {}; a unit is on one device", name,
                          text(), parameter.device().str(), device_.str());
          device_ = parameter.device();
          ShardedParameter one;
          one.names = {name};
          one.parameter = parameter;
          one.shape = parameter.sizes().vec();
          one.rows = parameter.dim() == 0 ? 1 : parameter.size(0);
          one.row_elements = one.rows == 0 ? 0 : parameter.numel() / one.rows;
          one.own = rows_of(one.rows, group().size(), group().rank());
          // In a tensor-parallel module: a part of a part.
          if (divided != nullptr) {
            if (auto shard = divided->shard_of(entry.key())) one.layout = std::move(*shard);
          }
          if (one.layout.shape.empty()) one.layout = TensorShard::whole(name, parameter);
          one.layout.local = Tensor();
          if (parameter.dim() == 0) {
            one.layout.view = {1};
            one.layout.offset = {one.own.begin};
          } else {
            one.layout.offset[0] += one.own.begin;
          }
          parameters_.push_back(std::move(one));
        }
      },
      contains_units_);
}

void ShardUnit::require_same_on_all_ranks(const torch::nn::Module& module) {
  const MixedPrecision& precision = options_.mixed_precision;
  std::vector<std::string> lines = {
      format_text("{}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}, output_dtype {}, init_sync {}",
                  text(), options_.reshard_after_forward.value_or(!contains_units_), dtype_name(precision.param_dtype),
                  dtype_name(precision.reduce_dtype), dtype_name(precision.output_dtype), options_.init_sync)};
  for (const ShardedParameter& one : parameters_) {
    lines.push_back(format_text("parameter {}: {} [{}] on {}{}", one.name(), c10::toString(one.parameter.scalar_type()),
                                joined(one.shape), c10::DeviceTypeName(one.parameter.device().type(), true),
                                one.parameter.requires_grad() ? "" : ", frozen"));
  }
  for (const auto& entry : module.named_buffers())
    lines.push_back(format_text("buffer {}: {} [{}]", entry.key(), c10::toString(entry.value().scalar_type()),
                                joined(entry.value().sizes())));
  for (ProcessGroup* ranks : {options_.group.get(), options_.replicate_group.get()}) {
    const std::string difference = ranks == nullptr ? "" : first_difference(*ranks, lines);
    MANIPLE_REQUIRE(difference.empty(), "fully_shard: ranks of group {} were given different modules or options: {}",
                    ranks->name(), difference);
  }
}

// With replicas, first makes the ranks with the same position in different model copies equal, then copies rank 0's
// values within each model copy.
void ShardUnit::synchronize(torch::nn::Module& module) {
  std::vector<Tensor> tensors;
  for (const ShardedParameter& one : parameters_) tensors.push_back(one.parameter);
  bool ignored = false;
  for_each_own(
      module, "",
      [&](torch::nn::Module& own, const std::string&) {
        for (const auto& entry : own.named_buffers(/*recurse=*/false)) tensors.push_back(entry.value());
      },
      ignored);
  for (const auto& ranks : {options_.replicate_group, options_.group}) {
    if (ranks && ranks->size() > 1) Replicator(ranks, tensors).copy_from(0);
  }
}

torch::ScalarType ShardUnit::gathered_dtype(const Tensor& parameter) const {
  return parameter.is_floating_point() ? options_.mixed_precision.param_dtype.value_or(parameter.scalar_type())
                                       : parameter.scalar_type();
}

void ShardUnit::shard() {
  PackedLayout wholes;  // in bytes
  for (const ShardedParameter& one : parameters_)
    wholes.add(one.rows * one.row_elements * c10::elementSize(gathered_dtype(one.parameter)));
  whole_bytes_ = wholes.bytes();
  const Tensor all = torch::empty({static_cast<std::int64_t>(std::max<std::size_t>(whole_bytes_, 1))},
                                  torch::TensorOptions().dtype(torch::kUInt8).device(device_));
  storage_ = all.storage();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& one = parameters_[i];
    Tensor& parameter = one.parameter;
    const auto dtype = gathered_dtype(parameter);
    one.whole = torch::empty({0}, parameter.options().dtype(dtype).requires_grad(false));
    one.whole.set_(storage_, static_cast<std::int64_t>(wholes.offset(i) / c10::elementSize(dtype)), one.shape,
                   torch::empty(one.shape, torch::kMeta).strides());
    const Tensor rows = parameter.dim() == 0 ? parameter.detach().reshape({1}) : parameter.detach();
    one.shard = rows.narrow(0, one.own.begin, one.own.count).contiguous().clone();
    parameter.mutable_grad() = Tensor();
    parameter.set_data(one.shard);
    guard_concealed(one);
  }
  is_whole_ = true;
  free_unused();
}

// Called again in forward: the parameter may have been frozen before.
void ShardUnit::guard_concealed(ShardedParameter& one) const {
  if (one.guarded || !one.parameter.requires_grad()) return;
  one.guarded = true;
  one.parameter.register_hook([name = one.name(), unit = text()](const Tensor&) -> void {
    throw InvalidArgument(format_text(
        "fully_shard: parameter {} of {} got a gradient outside of its unit's forward, where it is this rank's rows "
        "alone; call the unit that fully_shard returned, not the module that it was given",
        name, unit));
  });
}

const ShardedParameter* ShardUnit::find(const std::string& name) const {
  for (const ShardedParameter& one : parameters_) {
    if (std::find(one.names.begin(), one.names.end(), name) != one.names.end()) return &one;
  }
  return nullptr;
}

bool ShardUnit::owns(const Tensor& tensor) const {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

bool ShardUnit::has_frozen() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const ShardedParameter& one) { return !one.parameter.requires_grad(); });
}

// ---- Whole, and no longer -------------------------------------------------------------------------------------------

void ShardUnit::expose(const NodePointer<GatheredBy>& node, bool kept) {
  if (exposures_ == 0) {
    try {
      if (!kept) context_->gather(*this);
    } catch (...) {
      free_unused();
      throw;
    }
    for (ShardedParameter& one : parameters_) {
      guard_concealed(one);
      one.exposed_version = static_cast<std::uint32_t>(one.parameter._version());
      one.parameter.set_data(one.whole);
    }
  }
  ++exposures_;
  if (!node) return;
  const bool first = node->num_inputs() == 0;
  if (first) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].parameter.requires_grad()) continue;
      node->trained.push_back(i);
      node->add_input_metadata(parameters_[i].parameter);
    }
  }
  for (std::size_t k = 0; k < node->trained.size(); ++k)
    torch::autograd::impl::set_gradient_edge(parameters_[node->trained[k]].parameter,
                                             {node, static_cast<std::uint32_t>(k)});
}

void ShardUnit::expose_undefined(const NodePointer<GatheredBy>& node) {
  if (exposures_ == 0) allocate_whole();
  expose(node, /*kept=*/true);
}

void ShardUnit::conceal() {
  if (--exposures_ > 0) return;
  for (ShardedParameter& one : parameters_) {
    if (one.parameter.grad_fn()) torch::autograd::impl::set_gradient_edge(one.parameter, {nullptr, 0});
    one.parameter.set_data(one.shard);
    if (static_cast<std::uint32_t>(one.parameter._version()) != one.exposed_version) lost_write_ = one.name();
  }
  free_unused();
}

void ShardUnit::let_go() {
  --graphs_;
  free_unused();
}

// If a graph keeps the old whole parameters, their memory is reused: the values are refreshed in place.
void ShardUnit::allocate_whole() {
  if (is_whole_) return;
  const Tensor fresh = torch::empty({static_cast<std::int64_t>(std::max<std::size_t>(whole_bytes_, 1))},
                                    torch::TensorOptions().dtype(torch::kUInt8).device(device_));
  storage_.set_data_ptr_noswap(fresh.storage().set_data_ptr(at::DataPtr(nullptr, device_)));
  is_whole_ = true;
}

void ShardUnit::free_unused() noexcept {
  if (!is_whole_ || exposures_ > 0 || graphs_ > 0) return;
  storage_.set_data_ptr_noswap(at::DataPtr(nullptr, device_));
  is_whole_ = false;
}

}  // namespace maniple::detail
