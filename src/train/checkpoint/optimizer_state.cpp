#include "train/checkpoint/named_state.h"

#include "comm/base/check.h"
#include "train/optim/stepper.h"
#include "train/sharded_optimizer/sharded_state.h"
#include "train/state_key.h"

namespace maniple {
namespace {

namespace torch_optim = torch::optim;

// Fields of the optimizer itself.
constexpr const char* kKind = "kind";
constexpr const char* kGroups = "groups";

// ---- The visitors: one pass over the fields serves saving and loading. ----------------------------------------------

template <class V>
void visit(torch_optim::SGDOptions& o, V& v) {
  v("lr", o.lr()), v("momentum", o.momentum()), v("dampening", o.dampening()), v("weight_decay", o.weight_decay());
  v("nesterov", o.nesterov());
}
template <class V>
void visit(torch_optim::SGDParamState& s, V& v) {
  v("momentum_buffer", s.momentum_buffer());
}

template <class Options, class V>
void visit_adam_options(Options& o, V& v) {
  v("lr", o.lr()), v("beta1", std::get<0>(o.betas())), v("beta2", std::get<1>(o.betas())), v("eps", o.eps());
  v("weight_decay", o.weight_decay()), v("amsgrad", o.amsgrad());
}
template <class State, class V>
void visit_adam_state(State& s, V& v) {
  v("step", s.step()), v("exp_avg", s.exp_avg()), v("exp_avg_sq", s.exp_avg_sq()),
      v("max_exp_avg_sq", s.max_exp_avg_sq());
}
template <class V>
void visit(torch_optim::AdamOptions& o, V& v) {
  visit_adam_options(o, v);
}
template <class V>
void visit(torch_optim::AdamParamState& s, V& v) {
  visit_adam_state(s, v);
}
template <class V>
void visit(torch_optim::AdamWOptions& o, V& v) {
  visit_adam_options(o, v);
}
template <class V>
void visit(torch_optim::AdamWParamState& s, V& v) {
  visit_adam_state(s, v);
}

template <class V>
void visit(torch_optim::RMSpropOptions& o, V& v) {
  v("lr", o.lr()), v("alpha", o.alpha()), v("eps", o.eps()), v("weight_decay", o.weight_decay()),
      v("momentum", o.momentum());
  v("centered", o.centered());
}
template <class V>
void visit(torch_optim::RMSpropParamState& s, V& v) {
  v("step", s.step()), v("square_avg", s.square_avg()), v("momentum_buffer", s.momentum_buffer()),
      v("grad_avg", s.grad_avg());
}

template <class V>
void visit(torch_optim::AdagradOptions& o, V& v) {
  v("lr", o.lr()), v("lr_decay", o.lr_decay()), v("weight_decay", o.weight_decay()), v("eps", o.eps());
  v("initial_accumulator_value", o.initial_accumulator_value());
}
template <class V>
void visit(torch_optim::AdagradParamState& s, V& v) {
  v("step", s.step()), v("sum", s.sum());
}

template <class V>
void visit(optim::LionOptions& o, V& v) {
  v("lr", o.lr()), v("beta1", std::get<0>(o.betas())), v("beta2", std::get<1>(o.betas()));
  v("weight_decay", o.weight_decay());
}
template <class V>
void visit(optim::LionParamState& s, V& v) {
  v("exp_avg", s.exp_avg());
}

// ---- Saving and loading ---------------------------------------------------------------------------------------------

/// Adds the fields of an owner to a state.
struct Saver {
  NamedState& state;
  StateOwner owner;
  std::string key(const char* field) const { return StateKey{owner, field}.text(); }
  void operator()(const char* field, double& value) { state.texts[key(field)] = text_of(value); }
  void operator()(const char* field, std::int64_t& value) { state.texts[key(field)] = text_of(value); }
  void operator()(const char* field, bool& value) { state.texts[key(field)] = value ? "1" : "0"; }
  void operator()(const char* field, torch::Tensor& value) {
    if (value.defined()) state.tensors[key(field)] = value;  // e.g. max_exp_avg_sq without amsgrad is undefined
  }
};

const std::string& text_in(const NamedState& state, const StateKey& key) {
  const auto found = state.texts.find(key.text());
  MANIPLE_REQUIRE(found != state.texts.end(), "the checkpoint has no {}", key.text());
  return found->second;
}

/// Takes the fields of an owner from a state, and moves tensors to the parameter's device.
struct Loader {
  const NamedState& state;
  StateOwner owner;
  torch::Device device{torch::kCPU};

  const std::string& text(const char* field) const { return text_in(state, {owner, field}); }
  void operator()(const char* name, double& value) { value = real_of(text(name)); }
  void operator()(const char* name, std::int64_t& value) { value = integer_of(text(name)); }
  void operator()(const char* name, bool& value) { value = text(name) == "1"; }
  void operator()(const char* name, torch::Tensor& value) {
    const auto found = state.tensors.find(StateKey{owner, name}.text());
    value = found == state.tensors.end() ? torch::Tensor()
                                         : found->second.to(device, found->second.scalar_type(), false, true);
  }
};

template <class Options, class State>
NamedState save_as(torch_optim::Optimizer& optimizer) {
  NamedState state;
  auto& groups = optimizer.param_groups();
  auto& states = optimizer.state();
  state.texts[kGroups] = text_of(static_cast<std::int64_t>(groups.size()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Saver options{state, StateOwner::of_group(g)};
    visit(static_cast<Options&>(groups[g].options()), options);
    state.texts[options.key(kParametersField)] = text_of(static_cast<std::int64_t>(groups[g].params().size()));
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const auto found = states.find(optim::state_key(states, groups[g].params()[i]));
      if (found == states.end()) continue;  // never stepped
      Saver fields{state, StateOwner::of_parameter(g, i)};
      state.texts[fields.key(kSteppedField)] = "1";
      visit(static_cast<State&>(*found->second), fields);
    }
  }
  return state;
}

template <class Options, class State>
void restore_as(torch_optim::Optimizer& optimizer, const NamedState& state) {
  auto& groups = optimizer.param_groups();
  auto& states = optimizer.state();
  const auto count = [&](const StateKey& key) { return static_cast<std::size_t>(integer_of(text_in(state, key))); };
  const std::size_t saved_groups = count({{}, kGroups});
  MANIPLE_REQUIRE(saved_groups == groups.size(), "the checkpoint's optimizer has {} parameter groups, this one {}",
                  saved_groups, groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::size_t saved = count({StateOwner::of_group(g), kParametersField});
    MANIPLE_REQUIRE(saved == groups[g].params().size(),
                    "group {} of the checkpoint's optimizer has {} parameters, here {}", g, saved,
                    groups[g].params().size());
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Loader options{state, StateOwner::of_group(g)};
    visit(static_cast<Options&>(groups[g].options()), options);
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const torch::Tensor& parameter = groups[g].params()[i];
      const auto key = optim::state_key(states, parameter);
      states.erase(key);
      Loader fields{state, StateOwner::of_parameter(g, i), parameter.device()};
      if (state.texts.count(StateKey{fields.owner, kSteppedField}.text()) == 0) continue;
      auto fresh = std::make_unique<State>();
      visit(*fresh, fields);
      states[key] = std::move(fresh);
    }
  }
}

struct Kind {
  const char* name;
  bool (*is)(torch_optim::Optimizer&);
  NamedState (*save)(torch_optim::Optimizer&);
  void (*restore)(torch_optim::Optimizer&, const NamedState&);
};

template <class T, class Options, class State>
constexpr Kind kind(const char* name) {
  return {name, [](torch_optim::Optimizer& o) { return dynamic_cast<T*>(&o) != nullptr; }, &save_as<Options, State>,
          &restore_as<Options, State>};
}

constexpr Kind kKinds[] = {
    kind<torch_optim::SGD, torch_optim::SGDOptions, torch_optim::SGDParamState>("SGD"),
    kind<torch_optim::Adam, torch_optim::AdamOptions, torch_optim::AdamParamState>("Adam"),
    kind<torch_optim::AdamW, torch_optim::AdamWOptions, torch_optim::AdamWParamState>("AdamW"),
    kind<torch_optim::RMSprop, torch_optim::RMSpropOptions, torch_optim::RMSpropParamState>("RMSprop"),
    kind<torch_optim::Adagrad, torch_optim::AdagradOptions, torch_optim::AdagradParamState>("Adagrad"),
    kind<optim::Lion, optim::LionOptions, optim::LionParamState>("Lion"),
};

const Kind& kind_of(torch_optim::Optimizer& optimizer) {
  for (const Kind& entry : kKinds) {
    if (entry.is(optimizer)) return entry;
  }
  throw Unsupported("this kind of optimizer cannot be saved; SGD, Adam, AdamW, RMSprop, Adagrad and Lion can");
}

/// Calls f(name of its float32 copy in a checkpoint, parameter) for every parameter.
template <class F>
void for_each_master(torch_optim::Optimizer& optimizer, const F& f) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      f(StateKey{StateOwner::of_parameter(g, i), kMasterWeightField}.text(), parameters[i]);
  }
}

}  // namespace

NamedState state_of(torch_optim::Optimizer& optimizer) {
  if (auto* sharded = dynamic_cast<ShardedOptimizerBase*>(&optimizer)) return whole_state(*sharded);
  const Kind& found = kind_of(optimizer);
  NamedState state = found.save(optimizer);
  state.texts[kKind] = found.name;
  if (const auto* masters = dynamic_cast<optim::MasterWeights*>(&optimizer)) {
    for_each_master(optimizer, [&](const std::string& name, const torch::Tensor& parameter) {
      if (const torch::Tensor copy = masters->master_weight(parameter); copy.defined()) state.tensors[name] = copy;
    });
  }
  return state;
}

void restore(torch_optim::Optimizer& optimizer, const NamedState& state) {
  if (auto* sharded = dynamic_cast<ShardedOptimizerBase*>(&optimizer)) return restore_shards(*sharded, state);
  const Kind& found = kind_of(optimizer);
  const auto saved = state.texts.find(kKind);
  MANIPLE_REQUIRE(saved != state.texts.end() && saved->second == found.name,
                  "the checkpoint's optimizer is {}, this one {}",
                  saved == state.texts.end() ? "of no kind" : saved->second, found.name);
  found.restore(optimizer, state);
  if (auto* masters = dynamic_cast<optim::MasterWeights*>(&optimizer)) {
    masters->reset_master_weights();
    for_each_master(optimizer, [&](const std::string& name, const torch::Tensor& parameter) {
      if (const auto copy = state.tensors.find(name); copy != state.tensors.end())
        masters->set_master_weight(parameter, copy->second.to(parameter.device(), torch::kFloat32, false, true));
    });
  }
}

torch::Tensor parameter_of_state(const torch_optim::Optimizer& optimizer, const std::string& name) {
  const StateOwner owner = StateKey::parse(name).owner;
  const auto index = owner.index();
  const auto& groups = optimizer.param_groups();
  if (!index || *owner.group >= groups.size()) return {};
  const auto& parameters = groups[*owner.group].params();
  return *index < parameters.size() ? parameters[*index] : torch::Tensor();
}

}  // namespace maniple
