// The names of Python's optimizer.state_dict(), made from and into those of checkpoints.
#include <maniple/train/optim.h>

#include <string_view>

#include "base/check.h"
#include "tensor/public_call.h"
#include "train/checkpoint/named_state.h"
#include "train/tensor_layout.h"

namespace maniple::optim {
namespace {

using Dict = std::map<std::string, torch::Tensor>;

constexpr std::string_view kParameters = "params";

/// Options that are neither here nor there numbers.
bool is_flag(const std::string& option) { return option == "amsgrad" || option == "nesterov" || option == "centered"; }

std::string saved_group(std::size_t g) { return format_text("group.{}.", g); }
std::string saved_parameter(std::size_t g, std::size_t i) { return format_text("group.{}.parameter.{}.", g, i); }
std::string dict_group(std::size_t g) { return format_text("param_groups.{}.", g); }
std::string dict_parameter(std::size_t n) { return format_text("state.{}.", n); }

/// Calls f(rest of the name, value) for the entries whose names begin with `prefix`.
template <class Map, class F>
void for_each_below(const Map& map, const std::string& prefix, const F& f) {
  for (auto entry = map.lower_bound(prefix); entry != map.end() && entry->first.starts_with(prefix); ++entry)
    f(entry->first.substr(prefix.size()), entry->second);
}

torch::Tensor number(double value, torch::ScalarType type) { return torch::full({}, value, type); }

void require_whole_parameters(const char* function, const torch::optim::Optimizer& optimizer) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      detail::require_whole(format_text("{} of group {}", i, g), parameters[i], function,
                            "its state is a part, too; use Checkpoint with CheckpointOptions::sharded");
  }
}

}  // namespace

Dict state_dict(torch::optim::Optimizer& optimizer) {
  const PublicCall call("optim::state_dict, which all ranks call");
  require_whole_parameters("optim::state_dict", optimizer);
  const NamedState saved = state_of(optimizer);
  Dict dict;
  std::int64_t n = 0;  // parameters so far
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto count = static_cast<std::int64_t>(optimizer.param_groups()[g].params().size());
    dict[dict_group(g) + std::string(kParameters)] = torch::arange(n, n + count, torch::kInt64);
    std::vector<double> betas;
    for_each_below(saved.texts, saved_group(g), [&](const std::string& name, const std::string& text) {
      if (name.starts_with("parameter")) return;
      if (name == "beta1" || name == "beta2") {
        betas.push_back(real_of(text));
      } else {
        dict[dict_group(g) + name] = number(real_of(text), is_flag(name) ? torch::kBool : torch::kFloat64);
      }
    });
    if (!betas.empty()) dict[dict_group(g) + "betas"] = torch::tensor(betas, torch::kFloat64);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i, ++n) {
      const std::string prefix = dict_parameter(static_cast<std::size_t>(n));
      for_each_below(saved.tensors, saved_parameter(g, i),
                     [&](const std::string& name, const torch::Tensor& tensor) { dict[prefix + name] = tensor; });
      const auto step = saved.texts.find(saved_parameter(g, i) + "step");
      if (step != saved.texts.end())
        dict[prefix + "step"] = number(static_cast<double>(integer_of(step->second)), torch::kFloat32);
    }
  }
  return dict;
}

void load_state_dict(torch::optim::Optimizer& optimizer, const Dict& dict) {
  const PublicCall call("optim::load_state_dict, which all ranks call");
  require_whole_parameters("optim::load_state_dict", optimizer);
  NamedState state = state_of(optimizer);  // for the options that the dict does not have
  state.tensors.clear();
  auto& groups = optimizer.param_groups();
  std::size_t n = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto listed = dict.find(dict_group(g) + std::string(kParameters));
    MANIPLE_REQUIRE(listed != dict.end(), "load_state_dict: there is no {}{}; this optimizer has {} parameter groups",
                    dict_group(g), kParameters, groups.size());
    const std::size_t count = groups[g].params().size();
    MANIPLE_REQUIRE(static_cast<std::size_t>(listed->second.numel()) == count,
                    "load_state_dict: group {} has {} parameters in the dict, here {}", g, listed->second.numel(),
                    count);
    for (auto& [name, text] : state.texts) {
      if (!name.starts_with(saved_group(g))) continue;
      const std::string option = name.substr(saved_group(g).size());
      if (option.starts_with("parameter")) continue;
      const bool beta = option == "beta1" || option == "beta2";
      const auto found = dict.find(dict_group(g) + (beta ? "betas" : option));
      if (found == dict.end()) continue;
      const double value = found->second.to(torch::kFloat64).reshape({-1})[option == "beta2" ? 1 : 0].item<double>();
      text = is_flag(option) ? (value != 0 ? "1" : "0") : text_of(value);
    }
    for (std::size_t i = 0; i < count; ++i, ++n) {
      const std::string here = saved_parameter(g, i);
      state.texts.erase(here + "stepped");
      state.texts.erase(here + "step");
      for_each_below(dict, dict_parameter(n), [&](const std::string& name, const torch::Tensor& tensor) {
        state.texts[here + "stepped"] = "1";
        if (name == "step") {
          state.texts[here + "step"] = text_of(tensor.item<std::int64_t>());
          return;
        }
        MANIPLE_REQUIRE(tensor.sizes() == groups[g].params()[i].sizes(),
                        "load_state_dict: {}{} has shape [{}], parameter {} of group {} has [{}]", dict_parameter(n),
                        name, joined(tensor.sizes()), i, g, joined(groups[g].params()[i].sizes()));
        state.tensors[here + name] = tensor;
      });
    }
  }
  MANIPLE_REQUIRE(dict.count(dict_group(groups.size()) + std::string(kParameters)) == 0,
                  "load_state_dict: there are more parameter groups in the dict than the {} of this optimizer",
                  groups.size());
  restore(optimizer, state);
}

}  // namespace maniple::optim
