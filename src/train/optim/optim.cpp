#include <maniple/train/optim.h>

#include <cmath>
#include <unordered_set>

#include "comm/base/check.h"
#include "comm/base/format.h"
#include "train/optim/stepper.h"

namespace maniple::optim {
namespace {

using torch::Tensor;

/// The loss of a closure, which needs gradients although the step itself runs without them.
Tensor loss_of_closure(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode with_gradients(true);
  return closure();
}

/// The state of a parameter; `make` creates it in the first step.
template <class State, class Make>
State& state_for(torch::optim::Optimizer& optimizer, const Tensor& parameter, const Make& make) {
  auto& states = optimizer.state();
  const auto key = state_key(states, parameter);
  const auto found = states.find(key);
  if (found != states.end()) return static_cast<State&>(*found->second);
  auto fresh = std::make_unique<State>();
  make(*fresh);
  State& result = *fresh;
  states[key] = std::move(fresh);
  return result;
}

/// A parameter that appears twice would be stepped by two threads at once. LibTorch itself only looks for it in
/// different groups.
void require_distinct(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::unordered_set<const void*> seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      MANIPLE_REQUIRE(seen.insert(groups[g].params()[i].unsafeGetTensorImpl()).second,
                      "parameter {} of group {} is given to the optimizer twice", i, g);
    }
  }
}

/// Adam and AdamW have the same options and states, but in unrelated classes.
template <class Options, class State>
void step_adam(torch::optim::Optimizer& optimizer, MasterWeights& masters, const char* name, bool decoupled) {
  Stepper stepper(masters, optimizer, name);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    auto& group = optimizer.param_groups()[g];
    const auto& options = static_cast<const Options&>(group.options());
    const auto [beta1, beta2] = options.betas();
    StepConstants constants{.lr = options.lr(), .beta1 = beta1, .beta2 = beta2, .eps = options.eps()};
    if (decoupled) {
      constants.keep = 1 - options.lr() * options.weight_decay();
      constants.decoupled_decay = options.weight_decay();
    } else {
      constants.weight_decay = options.weight_decay();
    }
    const bool l2 = constants.weight_decay != 0;
    const StepKernel kernel = options.amsgrad() ? (l2 ? StepKernel::amsgrad_l2 : StepKernel::amsgrad)
                                                : (l2 ? StepKernel::adam_l2 : StepKernel::adam);
    stepper.begin_group(kernel, constants);
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_for<State>(optimizer, parameter, [](State& fresh) { fresh.step(0); });
      state.step(state.step() + 1);
      const auto t = static_cast<double>(state.step());
      Tensor none;
      stepper.add(parameter,
                  {&state.exp_avg(), &state.exp_avg_sq(), options.amsgrad() ? &state.max_exp_avg_sq() : &none},
                  options.amsgrad() ? 3 : 2, state.step(),
                  {options.lr() / (1 - std::pow(beta1, t)), std::sqrt(1 - std::pow(beta2, t))});
    }
  }
  stepper.run();
}

// ---- Master weights in LibTorch's archives --------------------------------------------------------------------------

constexpr const char* kMasterWeights =
    "maniple_master_weights";  // in addition to torch::optim's entries, which are looked up by name

std::string master_name(std::size_t group, std::size_t i) { return format_text("group_{}_parameter_{}", group, i); }

void save_masters(torch::serialize::OutputArchive& archive, const MasterWeights& masters,
                  const torch::optim::Optimizer& optimizer) {
  if (!masters.step_options().master_weights) return;
  torch::serialize::OutputArchive copies(archive.compilation_unit());
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const Tensor copy = masters.master_weight(groups[g].params()[i]);
      if (copy.defined()) copies.write(master_name(g, i), copy);
    }
  }
  archive.write(kMasterWeights, copies);
}

/// If an archive has no copies, the next step makes them from the parameters.
void load_masters(torch::serialize::InputArchive& archive, MasterWeights& masters,
                  const torch::optim::Optimizer& optimizer) {
  masters.reset_master_weights();
  torch::serialize::InputArchive copies;
  if (!masters.step_options().master_weights || !archive.try_read(kMasterWeights, copies)) return;
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const Tensor& parameter = groups[g].params()[i];
      Tensor copy;
      if (!copies.try_read(master_name(g, i), copy)) continue;
      MANIPLE_REQUIRE(copy.sizes() == parameter.sizes(),
                      "the master weight of parameter {} of group {} has shape [{}] in the archive, the parameter [{}]",
                      i, g, joined(copy.sizes()), joined(parameter.sizes()));
      masters.set_master_weight(parameter, copy.to(parameter.device(), torch::kFloat32));
    }
  }
}

}  // namespace

Tensor MasterWeights::master_weight(const Tensor& parameter) const {
  const auto found = copies_.find(parameter.unsafeGetTensorImpl());
  return found == copies_.end() ? Tensor() : found->second;
}

void MasterWeights::set_master_weight(const Tensor& parameter, Tensor copy) {
  copies_[parameter.unsafeGetTensorImpl()] = std::move(copy);
}

// ---- SGD ------------------------------------------------------------------------------------------------------------

SGD::SGD(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::SGDOptions defaults, StepOptions options)
    : torch::optim::SGD(std::move(groups), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}
SGD::SGD(std::vector<Tensor> parameters, torch::optim::SGDOptions defaults, StepOptions options)
    : torch::optim::SGD(std::move(parameters), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}

Tensor SGD::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss = loss_of_closure(closure);
  Stepper stepper(*this, *this, "SGD");
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    const bool l2 = options.weight_decay() != 0;
    const bool momentum = options.momentum() != 0;
    const StepKernel kernel = !momentum            ? (l2 ? StepKernel::sgd_l2 : StepKernel::sgd)
                              : options.nesterov() ? (l2 ? StepKernel::nesterov_l2 : StepKernel::nesterov)
                                                   : (l2 ? StepKernel::momentum_l2 : StepKernel::momentum);
    stepper.begin_group(kernel, {.lr = options.lr(),
                                 .beta1 = options.momentum(),
                                 .beta2 = options.dampening(),
                                 .weight_decay = options.weight_decay()});
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      if (!momentum) {  // like torch::optim, which keeps no state then
        stepper.add(parameter, {}, 0, 0, {});
        continue;
      }
      auto& state = state_for<torch::optim::SGDParamState>(*this, parameter, [](auto&) {});
      const bool first = !state.momentum_buffer().defined();  // the first gradient becomes the buffer
      stepper.add(parameter, {&state.momentum_buffer()}, 1, first ? 1 : 2,
                  {first ? 0 : options.momentum(), first ? 1 : 1 - options.dampening()});
    }
  }
  stepper.run();
  return loss;
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGD::save(archive);
  save_masters(archive, *this, *this);
}

void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::SGD::load(archive);
  load_masters(archive, *this, *this);
}

// ---- Adam, AdamW ----------------------------------------------------------------------------------------------------

Adam::Adam(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamOptions defaults,
           StepOptions options)
    : torch::optim::Adam(std::move(groups), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}
Adam::Adam(std::vector<Tensor> parameters, torch::optim::AdamOptions defaults, StepOptions options)
    : torch::optim::Adam(std::move(parameters), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}

Tensor Adam::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss = loss_of_closure(closure);
  step_adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(*this, *this, "Adam", false);
  return loss;
}

void Adam::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::Adam::save(archive);
  save_masters(archive, *this, *this);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  torch::optim::Adam::load(archive);
  load_masters(archive, *this, *this);
}

AdamW::AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::AdamWOptions defaults,
             StepOptions options)
    : torch::optim::AdamW(std::move(groups), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}
AdamW::AdamW(std::vector<Tensor> parameters, torch::optim::AdamWOptions defaults, StepOptions options)
    : torch::optim::AdamW(std::move(parameters), std::move(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
}

Tensor AdamW::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss = loss_of_closure(closure);
  step_adam<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(*this, *this, "AdamW", true);
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::AdamW::save(archive);
  save_masters(archive, *this, *this);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::AdamW::load(archive);
  load_masters(archive, *this, *this);
}

// ---- Lion -----------------------------------------------------------------------------------------------------------

void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

void LionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
}

void LionParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Tensor, exp_avg);
}

Lion::Lion(std::vector<torch::optim::OptimizerParamGroup> groups, LionOptions defaults, StepOptions options)
    : torch::optim::Optimizer(std::move(groups), std::make_unique<LionOptions>(defaults)), MasterWeights(options) {
  require_distinct(param_groups());
  const auto [beta1, beta2] = defaults.betas();
  MANIPLE_REQUIRE(defaults.lr() >= 0, "optim::Lion: a learning rate of {}; expected a number that is not negative",
                  defaults.lr());
  MANIPLE_REQUIRE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                  "optim::Lion: betas of {} and {}; expected numbers from 0 to below 1", beta1, beta2);
  MANIPLE_REQUIRE(defaults.weight_decay() >= 0,
                  "optim::Lion: a weight_decay of {}; expected a number that is not negative", defaults.weight_decay());
}
Lion::Lion(std::vector<Tensor> parameters, LionOptions defaults, StepOptions options)
    : Lion(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(std::move(parameters))},
           std::move(defaults), options) {}

Tensor Lion::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  Tensor loss = loss_of_closure(closure);
  Stepper stepper(*this, *this, "Lion");
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const LionOptions&>(group.options());
    stepper.begin_group(StepKernel::lion, {.lr = options.lr(),
                                           .beta1 = std::get<0>(options.betas()),
                                           .beta2 = std::get<1>(options.betas()),
                                           .keep = 1 - options.lr() * options.weight_decay()});
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_for<LionParamState>(*this, parameter, [](auto&) {});
      stepper.add(parameter, {&state.exp_avg()}, 1, 0, {});
    }
  }
  stepper.run();
  return loss;
}

void Lion::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
  save_masters(archive, *this, *this);
}

void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
  load_masters(archive, *this, *this);
}

}  // namespace maniple::optim
