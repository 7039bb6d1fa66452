// The part of a checkpoint that is an optimizer.
//
// An optimizer names the state of a parameter by its position: "group.0.parameter.3.exp_avg". Stages of a pipeline have positions in common,
// and in another layout the same parameter has another one. So sharded checkpoints name it by the part and name of the parameter:
// "group.0.parameter.model/3.weight.exp_avg". Texts beside it say which parameters there are: "...model/3.weight.listed", and
// "...model/5.weight.tied" for another name of one that modules share. Both kinds of names are read.
#include <algorithm>
#include <set>

#include "base/check.h"
#include "train/checkpoint/part.h"

namespace maniple {
namespace {

using torch::optim::Optimizer;

constexpr const char* kListed = "listed";
constexpr const char* kTied = "tied";

std::string prefix_of(std::size_t group, const std::string& parameter) {
  return format_text("group.{}.parameter.{}.", group, parameter);
}
std::string count_name(std::size_t group) { return format_text("group.{}.parameters", group); }

/// Calls f(group, prefix by position, parameter).
template <class F>
void for_each_parameter(const Optimizer& optimizer, const F& f) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) f(g, prefix_of(g, std::to_string(i)), parameters[i]);
  }
}

/// Of a tensor of the optimizer's state: as its parameter, if it has its shape.
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

/// From names by position to names by parameter. Left as it is where a parameter is in no module that was added.
void name_by_parameter(PartState& state, const Optimizer& optimizer, const Layouts& layouts) {
  std::map<std::string, std::string> prefixes;
  std::map<std::string, std::string> texts;
  bool all_have_names = true;
  for_each_parameter(optimizer, [&](std::size_t group, const std::string& prefix, const torch::Tensor& parameter) {
    const Layouts::Parameter* const known = layouts.find(parameter);
    all_have_names = all_have_names && known != nullptr;
    if (!all_have_names) return;
    const std::string& first = known->names.front();
    prefixes[prefix] = prefix_of(group, first);
    texts[prefixes[prefix] + kListed] = "1";
    for (const std::string& other : known->names) {
      if (other != first) texts[prefix_of(group, other) + kTied] = first;
    }
  });
  if (!all_have_names) return;
  const auto renamed = [&](const std::string& name) {  // what stands behind the last dot is the field
    const std::size_t field = name.rfind('.') + 1;
    const auto found = prefixes.find(name.substr(0, field));
    return found == prefixes.end() ? name : found->second + name.substr(field);
  };
  for (PartState::Tensor& tensor : state.tensors) tensor.shard.name = renamed(tensor.shard.name);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) state.texts.erase(count_name(g));
  for (const auto& [name, text] : state.texts) texts[renamed(name)] = text;
  state.texts = std::move(texts);
  if (layouts.partial) state.kind = PartState::Texts::united;
}

/// A saved state as the optimizer names it.
struct ByPosition {
  std::map<std::string, std::string> texts;
  std::map<std::string, std::string> tensors;  // and what they are called in the checkpoint
};

/// Of each parameter of the optimizer: what its state's names begin with in the checkpoint.
std::map<std::string, std::string> places_in(const SavedPart& saved, const Optimizer& optimizer,
                                             const Layouts& layouts) {
  std::map<std::string, std::string> places;
  for_each_parameter(optimizer, [&](std::size_t group, const std::string& prefix, const torch::Tensor& parameter) {
    const Layouts::Parameter* const known = layouts.find(parameter);
    MANIPLE_REQUIRE(known != nullptr,
                    "the checkpoint names the optimizer's state by the names of parameters, and the one of [{}] of {} "
                    "is in none of the modules that were added: add its module",
                    joined(parameter.sizes()), prefix.substr(0, prefix.size() - 1));
    for (const std::string& name : known->names) {
      const std::string place = prefix_of(group, name);
      const auto tied = saved.texts().find(place + kTied);
      if (saved.texts().count(place + kListed) != 0) {
        places[prefix] = place;
      } else if (tied != saved.texts().end()) {
        places[prefix] = prefix_of(group, tied->second);
      }
      if (places.count(prefix) != 0) return;
    }
    throw InvalidArgument(format_text("group {} of the checkpoint's optimizer has no parameter {}, which this one has",
                                      group, known->names.front()));
  });
  return places;
}

ByPosition by_position(const SavedPart& saved, const Optimizer& optimizer, const Layouts& layouts) {
  ByPosition result;
  const auto is_listed = [](const auto& entry) { return entry.first.ends_with(std::string(".") + kListed); };
  if (std::none_of(saved.texts().begin(), saved.texts().end(), is_listed)) {
    result.texts = saved.texts();
    for (const auto& [name, tensor] : saved.tensors()) result.tensors[name] = name;
    return result;
  }
  for (const auto& [name, text] : saved.texts()) {
    if (name.find(".parameter.") == std::string::npos) result.texts[name] = text;
  }
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    result.texts[count_name(g)] = std::to_string(optimizer.param_groups()[g].params().size());
  for (const auto& [to, from] : places_in(saved, optimizer, layouts)) {
    const auto each = [&](const auto& entries, const auto& take) {
      for (auto entry = entries.lower_bound(from); entry != entries.end() && entry->first.starts_with(from); ++entry) {
        const std::string field = entry->first.substr(from.size());
        // A parameter "w" and another one "w.x" begin alike.
        if (field.find('.') == std::string::npos && field != kListed && field != kTied) take(to + field, *entry);
      }
    };
    each(saved.texts(), [&](const std::string& name, const auto& entry) { result.texts[name] = entry.second; });
    each(saved.tensors(), [&](const std::string& name, const auto& entry) { result.tensors[name] = entry.first; });
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
          dynamic_cast<ShardedOptimizerBase*>(&optimizer)};
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
