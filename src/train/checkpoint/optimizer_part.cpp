// The optimizer part of a checkpoint.
//
// An optimizer names a parameter's state by position: "group.0.parameter.3.exp_avg". Positions are ambiguous among the
// stages of a pipeline, and differ between layouts. So sharded checkpoints use the part and name of the parameter:
// "group.0.parameter.model/3.weight.exp_avg". They also have texts that list the parameters:
// "...model/3.weight.listed", and "...model/5.weight.tied" for another name of a parameter that modules share. Both
// kinds of names can be read. If positions are used, texts give the names of the parameters,
// "group.0.parameter.3.names", for pipeline stages that load the checkpoint.
#include <algorithm>
#include <set>
#include <sstream>

#include "comm/base/check.h"
#include "train/checkpoint/part.h"
#include "train/state_key.h"

namespace maniple {
namespace {

using torch::optim::Optimizer;

constexpr const char* kListed = "listed";
constexpr const char* kTied = "tied";
constexpr const char* kNames = "names";

std::string count_name(std::size_t group) { return StateKey{StateOwner::of_group(group), kParametersField}.text(); }

/// Calls f(owner by position, parameter) for every parameter.
template <class F>
void for_each_parameter(const Optimizer& optimizer, const F& f) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) f(StateOwner::of_parameter(g, i), parameters[i]);
  }
}

/// The shard of a tensor of the optimizer's state: like its parameter's, if it has the parameter's shape.
TensorShard shard_of_state(const Optimizer& optimizer, const std::string& name, const torch::Tensor& local,
                           const Layouts& layouts) {
  const torch::Tensor parameter = parameter_of_state(optimizer, name);
  if (!parameter.defined()) return TensorShard::whole(name, local);
  MANIPLE_REQUIRE(
      layouts.find(parameter) != nullptr,
      "{} belongs to a parameter of [{}] that is in none of the modules that were added: add its module, so that "
      "it is known how the ranks divide it",
      name, joined(parameter.sizes()));
  if (parameter.sizes() != local.sizes()) return TensorShard::whole(name, local);
  return shard_with(&layouts, name, parameter, local);
}

/// Replaces names by position with names by parameter. Does nothing if a parameter is in none of the modules that were
/// added.
void name_by_parameter(PartState& state, const Optimizer& optimizer, const Layouts& layouts) {
  std::map<StateOwner, StateOwner> named;
  std::map<std::string, std::string> texts;
  bool all_have_names = true;
  for_each_parameter(optimizer, [&](const StateOwner& position, const torch::Tensor& parameter) {
    const Layouts::Parameter* const known = layouts.find(parameter);
    all_have_names = all_have_names && known != nullptr;
    if (!all_have_names) return;
    const std::string& first = known->names.front();
    const StateOwner& owner = named[position] = StateOwner::of_parameter(*position.group, first);
    texts[StateKey{owner, kListed}.text()] = "1";
    for (const std::string& other : known->names) {
      if (other != first) texts[StateKey{StateOwner::of_parameter(*position.group, other), kTied}.text()] = first;
    }
  });
  if (!all_have_names) return;
  const auto renamed = [&](const std::string& name) {
    StateKey key = StateKey::parse(name);
    if (const auto found = named.find(key.owner); found != named.end()) key.owner = found->second;
    return key.text();
  };
  for (PartState::Tensor& tensor : state.tensors) tensor.shard.name = renamed(tensor.shard.name);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) state.texts.erase(count_name(g));
  for (const auto& [name, text] : state.texts) texts[renamed(name)] = text;
  state.texts = std::move(texts);
  if (layouts.partial) state.kind = PartState::Texts::united;
}

/// Adds the names of parameters to a state with names by position.
void add_names(PartState& state, const Optimizer& optimizer, const Layouts& layouts) {
  for_each_parameter(optimizer, [&](const StateOwner& position, const torch::Tensor& parameter) {
    if (const Layouts::Parameter* const known = layouts.find(parameter))
      state.texts[StateKey{position, kNames}.text()] = joined(known->names, "\n");
  });
}

/// A saved state under the optimizer's names.
struct ByPosition {
  std::map<std::string, std::string> texts;
  std::map<std::string, std::string> tensors;  // and their names in the checkpoint
};

/// The owner of a parameter's state in a checkpoint, by its group and each of its saved names.
std::map<StateOwner, StateOwner> saved_owners(const SavedPart& saved) {
  std::map<StateOwner, StateOwner> owners;
  for (const auto& [name, text] : saved.texts()) {
    const auto [owner, field] = StateKey::parse(name);
    if (!owner.is_parameter()) continue;
    if (field == kListed) owners[owner] = owner;
    if (field == kTied) owners[owner] = StateOwner::of_parameter(*owner.group, text);
    if (field != kNames) continue;
    std::istringstream names(text);
    for (std::string one; std::getline(names, one);) owners[StateOwner::of_parameter(*owner.group, one)] = owner;
  }
  return owners;
}

/// The same for each parameter of the optimizer, by its position here.
std::map<StateOwner, StateOwner> owners_in(const SavedPart& saved, const Optimizer& optimizer, const Layouts& layouts) {
  const std::map<StateOwner, StateOwner> by_name = saved_owners(saved);
  std::map<StateOwner, StateOwner> owners;
  for_each_parameter(optimizer, [&](const StateOwner& position, const torch::Tensor& parameter) {
    const Layouts::Parameter* const known = layouts.find(parameter);
    MANIPLE_REQUIRE(known != nullptr,
                    "the checkpoint names the optimizer's state by the names of parameters, and the one of [{}] of {} "
                    "is in none of the modules that were added: add its module",
                    joined(parameter.sizes()), position.text());
    for (const std::string& name : known->names) {
      const auto found = by_name.find(StateOwner::of_parameter(*position.group, name));
      if (found == by_name.end()) continue;
      owners[position] = found->second;
      return;
    }
    throw InvalidArgument(format_text("group {} of the checkpoint's optimizer has no parameter {}, which this one has",
                                      *position.group, known->names.front()));
  });
  return owners;
}

ByPosition by_position(const SavedPart& saved, const Optimizer& optimizer, const Layouts& layouts) {
  ByPosition result;
  const auto has = [&](const char* field) {
    return std::any_of(saved.texts().begin(), saved.texts().end(),
                       [&](const auto& entry) { return StateKey::parse(entry.first).field == field; });
  };
  if (!has(kListed) && !(layouts.partial && has(kNames))) {
    for (const auto& [name, text] : saved.texts()) {
      if (StateKey::parse(name).field != kNames) result.texts[name] = text;
    }
    for (const auto& [name, tensor] : saved.tensors()) result.tensors[name] = name;
    return result;
  }
  for (const auto& [name, text] : saved.texts()) {
    if (!StateKey::parse(name).owner.is_parameter()) result.texts[name] = text;
  }
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    result.texts[count_name(g)] = std::to_string(optimizer.param_groups()[g].params().size());
  for (const auto& [position, owner] : owners_in(saved, optimizer, layouts)) {
    for_each_field(saved.texts(), owner.text(), [&](const std::string& field, const std::string& text) {
      const bool is_name = field == kListed || field == kTied || field == kNames;
      if (!is_name) result.texts[StateKey{position, field}.text()] = text;
    });
    for_each_field(saved.tensors(), owner.text(), [&](const std::string& field, const SavedPart::Tensor&) {
      result.tensors[StateKey{position, field}.text()] = StateKey{owner, field}.text();
    });
  }
  return result;
}

}  // namespace

Part optimizer_part(const std::string& name, Optimizer& optimizer) {
  return {name,
          [&optimizer](const Layouts* layouts) {
            PartState state;
            NamedState named = state_of(optimizer);
            state.texts = std::move(named.texts);
            state.kind = PartState::Texts::equal;
            for (const auto& [key, tensor] : named.tensors) {
              state.tensors.push_back({layouts == nullptr ? TensorShard::whole(key, tensor)
                                                          : shard_of_state(optimizer, key, tensor, *layouts)});
            }
            if (layouts != nullptr) name_by_parameter(state, optimizer, *layouts);
            return state;
          },
          [&optimizer](const SavedPart& saved, const LoadOptions&, const Layouts& layouts) {
            const ByPosition found = by_position(saved, optimizer, layouts);
            NamedState state;
            state.texts = found.texts;
            for (const auto& [key, saved_name] : found.tensors) {
              const SavedPart::Tensor& tensor = saved.tensors().at(saved_name);
              const torch::Tensor parameter = parameter_of_state(optimizer, key);
              if (parameter.defined() && layouts.find(parameter) != nullptr) {
                TensorShard like =
                    shard_of_state(optimizer, key, torch::empty(parameter.sizes(), tensor.dtype), layouts);
                like.name = saved_name;
                if (like.shape == tensor.shape) {
                  saved.read(like);
                  state.tensors[key] = like.local;
                  continue;
                }
              }
              state.tensors[key] = saved.read(saved_name);
            }
            restore(optimizer, state);
          },
          {},
          dynamic_cast<ShardedOptimizerBase*>(&optimizer),
          [&optimizer](PartState& state, const Layouts& layouts) { add_names(state, optimizer, layouts); }};
}

Part sharded_optimizer_part(const std::string& name, ShardedOptimizerBase& optimizer) {
  return {name,
          [&optimizer](const Layouts* layouts) {
            PartState state;
            state.texts = optimizer.state_texts();
            state.kind = PartState::Texts::united;
            for (const ShardOf& shard : optimizer.shards()) state.tensors.push_back({TensorShard::flat(shard)});
            if (layouts != nullptr) name_by_parameter(state, optimizer, *layouts);
            return state;
          },
          [&optimizer](const SavedPart& saved, const LoadOptions&, const Layouts& layouts) {
            const ByPosition found = by_position(saved, optimizer, layouts);
            std::set<std::string> names;
            for (const auto& [key, saved_name] : found.tensors) names.insert(key);
            for (ShardOf& shard : optimizer.begin_load(found.texts, names)) {
              if (const auto at = found.tensors.find(shard.name); at != found.tensors.end()) shard.name = at->second;
              saved.read(shard);
            }
          }};
}

}  // namespace maniple
