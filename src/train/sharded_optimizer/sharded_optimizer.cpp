// ShardedOptimizer: a plain optimizer of this rank's slices, and the agreement of all ranks before each step.
#include <maniple/train/sharded_optimizer.h>

#include <algorithm>
#include <bit>
#include <unordered_set>

#include "comm/base/check.h"
#include "train/ddp/parameter.h"
#include "train/sharded_optimizer/sharded_state.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

using torch::Tensor;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == torch::kFloat16 || tensor.scalar_type() == torch::kBFloat16;
}

/// The number of state tensors per parameter in a kind of optimizer.
std::int64_t states_of(const torch::optim::OptimizerOptions& options) {
  const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options);
  const auto* adam_w = dynamic_cast<const torch::optim::AdamWOptions*>(&options);
  if (adam != nullptr) return adam->amsgrad() ? 3 : 2;
  if (adam_w != nullptr) return adam_w->amsgrad() ? 3 : 2;
  return 1;
}

void require_same_lines(ProcessGroup& group, const std::vector<std::string>& lines) {
  const std::string difference = first_difference(group, lines);
  MANIPLE_REQUIRE(difference.empty(),
                  "ShardedOptimizer: ranks were given different things: {}; all ranks pass parameters of the same "
                  "shapes in the same order, and the same options",
                  difference);
}

std::string described(std::size_t group, std::size_t index, const Tensor& parameter) {
  return format_text("parameter {} of group {}: {} [{}] with strides [{}] on {}", index, group,
                     c10::toString(parameter.scalar_type()), joined(parameter.sizes()), joined(parameter.strides()),
                     c10::DeviceTypeName(parameter.device().type(), true));
}

}  // namespace

// ---- Layout ---------------------------------------------------------------------------------------------------------

std::vector<FlatParameters::Item> ShardedOptimizerBase::Impl::fresh() {
  std::vector<FlatParameters::Item> items;
  const Groups& groups = self.param_groups();
  bool kept = groups.size() >= known.size();
  for (std::size_t g = 0; kept && g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    const std::size_t before = g < known.size() ? known[g].size() : 0;
    kept = parameters.size() >= before;
    for (std::size_t i = 0; kept && i < parameters.size(); ++i) {
      const Tensor& parameter = parameters[i];
      if (i < before) {
        kept = parameter.unsafeGetTensorImpl() == known[g][i];
        continue;
      }
      const bool master = step_options.master_weights && is_half(parameter);
      const std::int64_t bytes = master ? 4 : static_cast<std::int64_t>(parameter.element_size());
      items.push_back({g, i, parameter, states_of(groups[g].options()) * bytes + (master ? 4 : 0)});
    }
  }
  MANIPLE_REQUIRE(kept,
                  "ShardedOptimizer: param_groups() has lost parameters or has others in their place; parameters can "
                  "only be added (make a new optimizer)");
  return items;
}

void ShardedOptimizerBase::Impl::check_fresh(const std::vector<FlatParameters::Item>& items) {
  std::vector<std::string> lines;
  for (const auto& item : items) lines.push_back(described(item.group, item.index, item.parameter));
  // An optimizer without parameters, made for its options.
  Groups bare;
  for (const auto& one : self.param_groups()) bare.emplace_back(std::vector<Tensor>(), one.options().clone());
  for (const auto& [name, text] : state_of(*make(std::move(bare))).texts)
    lines.push_back(format_text("{} = {}", name, text));
  lines.push_back(
      format_text("master_weights = {}, maximize = {}", step_options.master_weights, step_options.maximize));
  require_same_lines(group(), lines);
  std::unordered_set<const void*> seen;
  for (const auto& one : known) seen.insert(one.begin(), one.end());
  for (const auto& item : items) {
    MANIPLE_REQUIRE(seen.insert(item.parameter.unsafeGetTensorImpl()).second,
                    "ShardedOptimizer: parameter {} of group {} is given twice", item.index, item.group);
    MANIPLE_REQUIRE(item.parameter.layout() == torch::kStrided && !item.parameter.is_meta(),
                    "ShardedOptimizer: parameter {} of group {} is {}; expected a dense tensor with memory", item.index,
                    item.group, item.parameter.is_meta() ? "on the meta device" : "sparse");
    detail::require_replicated_over(
        group(), format_text("{} of group {}", item.index, item.group), item.parameter, "ShardedOptimizer",
        "give fully sharded parameters to a plain optimizer, whose state is divided as they are");
    MANIPLE_REQUIRE(!sharding.shared_parameters || item.parameter.is_cpu(),
                    "ShardedOptimizer: parameter {} of group {} is on {}; shared_parameters is for the CPU", item.index,
                    item.group, item.parameter.device().str());
  }
}

void ShardedOptimizerBase::Impl::lay_out_fresh() {
  const std::vector<FlatParameters::Item> items = fresh();
  const Groups& groups = self.param_groups();
  if (items.empty() && local && groups.size() == known.size()) return;
  check_fresh(items);
  blocks.push_back(
      std::make_unique<FlatParameters>(FlatOptions{sharding.group, sharding.shared_parameters, leaders}, items));
  slices.resize(groups.size());
  known.resize(groups.size());
  std::vector<std::vector<Tensor>> added(groups.size());
  for (const ParameterSlice& slice : blocks.back()->slices()) {
    slices[slice.group].push_back(slice);
    added[slice.group].push_back(slice.local);
  }
  for (const auto& item : items) known[item.group].push_back(item.parameter.unsafeGetTensorImpl());
  const bool first = local == nullptr;
  Groups fresh_groups;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!first && g < local->param_groups().size()) {
      auto& parameters = local->param_groups()[g].params();
      parameters.insert(parameters.end(), added[g].begin(), added[g].end());
      continue;
    }
    torch::optim::OptimizerParamGroup one(std::move(added[g]), groups[g].options().clone());
    if (first) {
      fresh_groups.push_back(one);
    } else {
      local->add_param_group(one);
    }
  }
  if (first) local = make(std::move(fresh_groups));
}

// ---- Steps ----------------------------------------------------------------------------------------------------------

std::string ShardedOptimizerBase::Impl::obstacle() {
  if (left) return "unshare() was called, after which it makes no more steps; make a new optimizer";
  for (const auto& block : blocks) {
    if (const std::string moved = block->moved(); !moved.empty())
      return format_text(
          "{} no longer lies where the optimizer put it: module.to(), torch::load, set_data or another "
          "ShardedOptimizer has moved it; make the optimizer after that",
          moved);
  }
  for (std::size_t g = 0; g < self.param_groups().size(); ++g) {
    const auto& parameters = self.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      if (gradient.layout() != torch::kStrided)
        return format_text("the gradient of parameter {} of group {} is sparse; expected dense ones", i, g);
      if (gradient.sizes() != parameters[i].sizes())
        return format_text("the gradient of parameter {} of group {} has shape [{}], the parameter [{}]", i, g,
                           joined(gradient.sizes()), joined(parameters[i].sizes()));
    }
  }
  return {};
}

ShardedOptimizerBase::Impl::Vote ShardedOptimizerBase::Impl::vote(const std::string& obstacle) {
  const auto mix = [](std::uint64_t hash, std::uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
    return hash ^ (hash >> 29);
  };
  Vote result{.obstructed = obstacle.empty() ? 0u : 1u};
  for (const auto& one : self.param_groups()) {
    result.rates = mix(result.rates, std::bit_cast<std::uint64_t>(one.options().get_lr()));
    for (const Tensor& parameter : one.params()) {
      const bool defined = parameter.grad().defined();
      result.gradients = mix(result.gradients, defined ? 1 : 2);
      result.count += defined ? 1 : 0;
    }
  }
  return result;
}

void ShardedOptimizerBase::Impl::agree() {
  const std::string mine = obstacle();
  const Vote own = vote(mine);
  std::vector<Vote> all(group().size(), own);
  if (group().size() > 1) {
    group().all_gather(ConstBuffer{&own, sizeof own, DType::uint8},
                       Buffer{all.data(), all.size() * sizeof own, DType::uint8}, {}, {}, public_place());
  }
  MANIPLE_REQUIRE(mine.empty(), "ShardedOptimizer: {}; nothing was changed", mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].obstructed != 0) {
      throw_failed_on<InvalidArgument>(
          group(), static_cast<int>(r),
          format_text(
              "ShardedOptimizer: rank {} of the group cannot step, and its own error says why; nothing was changed",
              r));
    }
    MANIPLE_REQUIRE(
        all[r].rates == all[0].rates,
        "ShardedOptimizer: rank {} of the group has another learning rate than rank 0; give all ranks the same "
        "schedule (and a PlateauScheduler the same metric); nothing was changed",
        r);
    MANIPLE_REQUIRE(
        all[r].gradients == all[0].gradients,
        "ShardedOptimizer: rank {} of the group has gradients for {} parameters, rank 0 for {}{}; gradients must "
        "be averaged over the group first, by DistributedDataParallel, say; nothing was changed",
        r, all[r].count, all[0].count, all[r].count == all[0].count ? " others" : "");
  }
}

void ShardedOptimizerBase::Impl::step_slices() {
  for (std::size_t g = 0; g < slices.size(); ++g) {
    local->param_groups()[g].set_options(self.param_groups()[g].options().clone());
    for (ParameterSlice& slice : slices[g]) {
      const Tensor& gradient = slice.parameter.grad();
      Tensor part = gradient;
      if (gradient.defined() && !slice.is_whole())
        part = gradient.contiguous().view({-1}).narrow(0, slice.offset, slice.count);
      slice.local.mutable_grad() = std::move(part);
    }
  }
  local->step();
  for (auto& one : slices) {
    for (ParameterSlice& slice : one) slice.local.mutable_grad() = Tensor();
  }
}

void ShardedOptimizerBase::Impl::step() {
  lay_out_fresh();
  agree();
  try {
    step_slices();
  } catch (const std::exception& failure) {
    // Other ranks have stepped their parts, which cannot be undone; they must not wait for this rank.
    group().abort(format_text("the step of ShardedOptimizer failed on rank {}: {}", group().rank(), failure.what()));
    throw;
  }
  for (const auto& block : blocks) block->gather();
  for (const auto& one : self.param_groups()) {
    for (const Tensor& parameter : one.params()) {
      if (parameter.grad().defined()) bump_version(parameter);
    }
  }
}

// ---- The class ------------------------------------------------------------------------------------------------------

ShardedOptimizerBase::ShardedOptimizerBase(Groups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                           ShardingOptions sharding, optim::StepOptions step_options, MakeLocal make)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)),
      impl_(new Impl{*this, std::move(sharding), step_options, std::move(make)}) {
  const PublicCall call("the constructor of ShardedOptimizer, which all ranks call");
  Impl& impl = *impl_;
  if (!impl.sharding.group) impl.sharding.group = get_default_group();
  impl.group().require_member("ShardedOptimizer");
  require_same_lines(impl.group(), {format_text("{} parameter groups, shared_parameters = {}", param_groups().size(),
                                                impl.sharding.shared_parameters)});
  const Topology& topology = impl.group().topology();
  if (impl.sharding.shared_parameters && topology.node_count() > 1)
    impl.leaders = impl.group().split(topology.local_rank() == 0 ? 0 : -1, topology.rank, {}, {}, public_place());
  impl.lay_out_fresh();
}
ShardedOptimizerBase::~ShardedOptimizerBase() = default;

Tensor ShardedOptimizerBase::step(LossClosure closure) {
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  const PublicCall call("ShardedOptimizer::step, which all ranks call");
  impl_->step();
  return loss;
}

void ShardedOptimizerBase::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  const PublicCall call("ShardedOptimizer::add_param_group, which all ranks call");
  torch::optim::Optimizer::add_param_group(group);
  impl_->lay_out_fresh();
}

void ShardedOptimizerBase::reset_master_weights() {
  if (auto* masters = dynamic_cast<optim::MasterWeights*>(impl_->local.get())) masters->reset_master_weights();
}

const std::shared_ptr<ProcessGroup>& ShardedOptimizerBase::group() const noexcept { return impl_->sharding.group; }
bool ShardedOptimizerBase::shares_parameters() const noexcept {
  return impl_->sharding.shared_parameters && !impl_->left;
}

void ShardedOptimizerBase::unshare() {
  MANIPLE_REQUIRE(impl_->sharding.shared_parameters, "ShardedOptimizer: unshare() without shared_parameters");
  if (impl_->left) return;
  const PublicCall call("ShardedOptimizer::unshare, which all ranks call");
  for (const auto& block : impl_->blocks) block->leave();
  impl_->left = true;
  impl_->group().barrier({}, public_place());  // no rank may change shared memory that others have not copied yet
}

void ShardedOptimizerBase::save(torch::serialize::OutputArchive&) const {
  throw Unsupported(
      "torch::save of a ShardedOptimizer: every rank holds a part of the state; use Checkpoint, or optim::state_dict "
      "on all ranks");
}
void ShardedOptimizerBase::load(torch::serialize::InputArchive&) {
  throw Unsupported(
      "torch::load of a ShardedOptimizer: every rank holds a part of the state; use Checkpoint, or "
      "optim::load_state_dict");
}

}  // namespace maniple
