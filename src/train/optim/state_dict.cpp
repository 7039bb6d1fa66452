// Converts between the names of Python's optimizer.state_dict() and the names in checkpoints.
#include <maniple/train/optim.h>

#include "comm/base/check.h"
#include "train/checkpoint/named_state.h"
#include "train/state_key.h"
#include "train/tensor/public_call.h"
#include "train/tensor_layout.h"

namespace maniple::optim {
namespace {

using Dict = std::map<std::string, torch::Tensor>;

// PyTorch's names: "param_groups.0.lr" and, with parameters numbered across all groups, "state.3.exp_avg".
constexpr const char* kParameters = "params";
constexpr const char* kStep = "step";

/// Boolean options: numbers neither in PyTorch nor in checkpoints.
bool is_flag(const std::string& option) { return option == "amsgrad" || option == "nesterov" || option == "centered"; }

std::string dict_group(std::size_t g) { return format_text("param_groups.{}", g); }
std::string dict_parameter(std::size_t n) { return format_text("state.{}", n); }

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
  std::int64_t n = 0;  // parameters counted so far
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto count = static_cast<std::int64_t>(optimizer.param_groups()[g].params().size());
    dict[dotted(dict_group(g), kParameters)] = torch::arange(n, n + count, torch::kInt64);
    std::vector<double> betas;
    for_each_field(saved.texts, StateOwner::of_group(g).text(),
                   [&](const std::string& option, const std::string& text) {
                     if (option == kParametersField) return;
                     if (option == "beta1" || option == "beta2") {
                       betas.push_back(real_of(text));
                     } else {
                       dict[dotted(dict_group(g), option)] =
                           number(real_of(text), is_flag(option) ? torch::kBool : torch::kFloat64);
                     }
                   });
    if (!betas.empty()) dict[dotted(dict_group(g), "betas")] = torch::tensor(betas, torch::kFloat64);
    for (std::int64_t i = 0; i < count; ++i, ++n) {
      const StateOwner owner = StateOwner::of_parameter(g, i);
      const std::string there = dict_parameter(n);
      for_each_field(saved.tensors, owner.text(), [&](const std::string& field, const torch::Tensor& tensor) {
        dict[dotted(there, field)] = tensor;
      });
      const auto step = saved.texts.find(StateKey{owner, kStep}.text());
      if (step != saved.texts.end())
        dict[dotted(there, kStep)] = number(static_cast<double>(integer_of(step->second)), torch::kFloat32);
    }
  }
  return dict;
}

void load_state_dict(torch::optim::Optimizer& optimizer, const Dict& dict) {
  const PublicCall call("optim::load_state_dict, which all ranks call");
  require_whole_parameters("optim::load_state_dict", optimizer);
  NamedState state = state_of(optimizer);  // for options that the dict does not have
  state.tensors.clear();
  auto& groups = optimizer.param_groups();
  std::size_t n = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto listed = dict.find(dotted(dict_group(g), kParameters));
    MANIPLE_REQUIRE(listed != dict.end(), "load_state_dict: there is no {}.{}; this optimizer has {} parameter groups",
                    dict_group(g), kParameters, groups.size());
    const std::size_t count = groups[g].params().size();
    MANIPLE_REQUIRE(static_cast<std::size_t>(listed->second.numel()) == count,
                    "load_state_dict: group {} has {} parameters in the dict, here {}", g, listed->second.numel(),
                    count);
    for (auto& [name, text] : state.texts) {
      const StateKey key = StateKey::parse(name);
      const std::string& option = key.field;
      if (key.owner != StateOwner::of_group(g) || option == kParametersField) continue;
      const bool beta = option == "beta1" || option == "beta2";
      const auto found = dict.find(dotted(dict_group(g), beta ? "betas" : option));
      if (found == dict.end()) continue;
      const double value = found->second.to(torch::kFloat64).reshape({-1})[option == "beta2" ? 1 : 0].item<double>();
      text = is_flag(option) ? (value != 0 ? "1" : "0") : text_of(value);
    }
    for (std::size_t i = 0; i < count; ++i, ++n) {
      const StateOwner owner = StateOwner::of_parameter(g, i);
      const std::string stepped = StateKey{owner, kSteppedField}.text(), step = StateKey{owner, kStep}.text();
      state.texts.erase(stepped);
      state.texts.erase(step);
      for_each_field(dict, dict_parameter(n), [&](const std::string& field, const torch::Tensor& tensor) {
        state.texts[stepped] = "1";
        if (field == kStep) {
          state.texts[step] = text_of(tensor.item<std::int64_t>());
          return;
        }
        MANIPLE_REQUIRE(tensor.sizes() == groups[g].params()[i].sizes(),
                        "load_state_dict: {}.{} has shape [{}], parameter {} of group {} has [{}]", dict_parameter(n),
                        field, joined(tensor.sizes()), i, g, joined(groups[g].params()[i].sizes()));
        state.tensors[StateKey{owner, field}.text()] = tensor;
      });
    }
  }
  MANIPLE_REQUIRE(dict.count(dotted(dict_group(groups.size()), kParameters)) == 0,
                  "load_state_dict: there are more parameter groups in the dict than the {} of this optimizer",
                  groups.size());
  restore(optimizer, state);
}

}  // namespace maniple::optim
