#include "train/ddp/parameter.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "comm/base/check.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"

namespace maniple {
namespace {

std::vector<NamedTensor> once_each(const std::function<void(const TensorSource::Visit&)>& tensors,
                                   std::set<const void*>& seen) {
  std::vector<NamedTensor> result;
  tensors([&](const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    result.push_back({name, tensor});
  });
  return result;
}

/// Describes everything that must be the same on all ranks, one line per item.
std::vector<std::string> description(const DdpOptions& options, const ModuleTensors& tensors) {
  std::vector<std::string> lines;
  const auto add = [&](const char* name, auto value) { lines.push_back(format_text("option {} = {}", name, value)); };
  add("bucket_cap_mb", options.bucket_cap_mb);
  add("first_bucket_mb", options.first_bucket_mb);
  add("find_unused_parameters", options.find_unused_parameters);
  add("static_graph", options.static_graph);
  add("gradient_as_bucket_view", options.gradient_as_bucket_view);
  add("broadcast_buffers", options.broadcast_buffers);
  add("init_sync", options.init_sync);
  add("overlap", static_cast<int>(options.overlap));
  add("average", static_cast<int>(options.average));
  add("delay_all_reduce_named_params", format_text("[{}]", joined(options.delay_all_reduce_named_params)));
  add("param_to_hook_all_reduce", options.param_to_hook_all_reduce);
  const auto list = [&](const char* kind, const std::vector<NamedTensor>& named) {
    for (const auto& [name, tensor] : named) {
      lines.push_back(
          format_text("{} {} {} [{}]{}{}", kind, name, c10::toString(tensor.scalar_type()), joined(tensor.sizes()),
                      tensor.is_cpu() ? "" : " on a GPU",
                      tensor.is_contiguous() ? "" : format_text(" strides [{}]", joined(tensor.strides()))));
    }
  };
  list("parameter", tensors.trained);
  list("frozen parameter", tensors.frozen);
  list("buffer", tensors.buffers);
  return lines;
}

std::string line_or_end(const std::vector<std::string>& lines, std::size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace

std::string first_difference(ProcessGroup& group, const std::vector<std::string>& lines) {
  if (group.size() == 1) return "";
  std::string mine;
  for (const std::string& line : lines) mine += line + "\n";
  const std::vector<std::string> texts = group.all_gather_objects(mine, {}, public_place());
  if (std::all_of(texts.begin(), texts.end(), [&](const std::string& other) { return other == texts[0]; })) return "";
  std::vector<std::vector<std::string>> ranks;
  std::size_t longest = 0;
  for (const std::string& text : texts) {
    ranks.push_back(split(text));
    longest = std::max(longest, ranks.back().size());
  }
  for (std::size_t i = 0; i < longest; ++i) {
    std::vector<std::pair<std::string, std::vector<int>>> held;  // in rank order
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const std::string line = line_or_end(ranks[r], i);
      auto same = std::find_if(held.begin(), held.end(), [&](const auto& one) { return one.first == line; });
      if (same == held.end()) same = held.insert(held.end(), {line, {}});
      same->second.push_back(static_cast<int>(r));
    }
    if (held.size() == 1) continue;
    std::string text;
    for (const auto& [line, who] : held) {
      text += format_text("{}{} {} {} {}", text.empty() ? "" : "; ", who.size() == 1 ? "rank" : "ranks", joined(who),
                          who.size() == 1 ? "has" : "have", line);
    }
    return text;
  }
  return "";
}

std::string ddp_prefix(const ProcessGroup& group) {
  return format_text("[DistributedDataParallel {} rank {}/{}] ", group.name(), group.rank(), group.size());
}

ModuleTensors tensors_of(const TensorSource& source) {
  std::set<const void*> seen;
  ModuleTensors result;
  for (NamedTensor& parameter : once_each(source.parameters, seen)) {
    MANIPLE_REQUIRE(
        parameter.tensor.is_leaf(),
        "DistributedDataParallel: parameter {} is the result of a computation; expected a leaf of the graph, "
        "whose gradient autograd keeps",
        parameter.name);
    auto& list = parameter.tensor.requires_grad() ? result.trained : result.frozen;
    list.push_back(std::move(parameter));
  }
  result.buffers = once_each(source.buffers, seen);
  for (const auto* list : {&result.trained, &result.frozen, &result.buffers}) {
    for (const auto& [name, tensor] : *list) {
      const Argument argument{"DistributedDataParallel", name.c_str()};
      require_usable(tensor, argument);
      dtype_of(tensor, argument);
    }
  }
  MANIPLE_REQUIRE(!result.trained.empty(),
                  "DistributedDataParallel: the module has no parameter that requires a gradient; there is "
                  "nothing to average");
  return result;
}

void require_device_ids(const std::vector<int>& device_ids, const ModuleTensors& tensors) {
  if (device_ids.empty()) return;
  MANIPLE_REQUIRE(device_ids.size() == 1,
                  "DistributedDataParallel: device_ids names {} GPUs; expected this rank's, {{local_rank}}, or none",
                  device_ids.size());
  for (const auto* list : {&tensors.trained, &tensors.frozen}) {
    for (const auto& [name, tensor] : *list) {
      const torch::Device device = tensor.device();
      MANIPLE_REQUIRE(device.is_cuda() && device.index() == device_ids.front(),
                      "DistributedDataParallel: device_ids is {{{}}}, but parameter {} is on {}; move the module there "
                      "before it is wrapped, or leave device_ids empty",
                      device_ids.front(), name, device.str());
    }
  }
}

std::vector<torch::Tensor> buffers_of(const TensorSource& source) {
  std::set<const void*> seen;
  once_each(source.parameters, seen);
  std::vector<torch::Tensor> result;
  for (NamedTensor& buffer : once_each(source.buffers, seen)) result.push_back(std::move(buffer.tensor));
  return result;
}

void require_same_on_all_ranks(ProcessGroup& group, const DdpOptions& options, const ModuleTensors& tensors) {
  const std::string difference = first_difference(group, description(options, tensors));
  if (difference.empty()) return;
  throw InvalidArgument(
      format_text("{}the ranks do not agree: {}; build the same module with the same options on every rank",
                  ddp_prefix(group), difference));
}

std::string Parameter::conversion() const {
  if (!tensor.requires_grad())
    return format_text(
        "parameter {} required a gradient when it was wrapped and requires none now; freeze parameters before "
        "wrapping, "
        "or wrap the module again",
        name);
  if (tensor.scalar_type() != dtype || tensor.device() != device)
    return format_text(
        "parameter {} was converted from {} to {} on {} after it was wrapped, which drops its hook: its gradients "
        "are no longer averaged; convert the module first and wrap it then",
        name, c10::toString(dtype), c10::toString(tensor.scalar_type()), tensor.device().str());
  if (!hook->is_attached())
    return format_text(
        "parameter {} got other memory after it was wrapped (torch::load of the wrapped module, or a conversion and "
        "back), which drops its hook: its gradients are no longer averaged; call the wrapper's forward, which restores "
        "the hook, or load and convert the module first and wrap it then",
        name);
  return {};
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerFactory& make, const Parameter& parameter) {
  auto optimizer = make(parameter.name, parameter.tensor);
  MANIPLE_REQUIRE(optimizer != nullptr, "DistributedDataParallel: no optimizer was made for parameter {}",
                  parameter.name);
  MANIPLE_REQUIRE(std::dynamic_pointer_cast<torch::optim::LBFGS>(optimizer) == nullptr,
                  "DistributedDataParallel: LBFGS evaluates the loss in its step, so it cannot be applied in backward; "
                  "call its step() after backward");
  std::size_t count = 0;
  for (const auto& group : optimizer->param_groups()) {
    for (const auto& one : group.params()) count += one.is_same(parameter.tensor) ? 1 : 2;
  }
  MANIPLE_REQUIRE(count == 1,
                  "DistributedDataParallel: the optimizer made for parameter {} must hold that parameter and no other",
                  parameter.name);
  return optimizer;
}

void exchange_used(ProcessGroup& group, std::span<Parameter> parameters, const std::vector<bool>& used_here) {
  std::vector<std::uint8_t> used(used_here.begin(), used_here.end());
  group.all_reduce(buffer_of(used), ReduceOp::max, {}, public_place());
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].used = used[i] != 0;
}

std::string names_of(const std::vector<const Parameter*>& parameters) {
  constexpr std::size_t kMax = 10;
  std::string text;
  for (std::size_t i = 0; i < std::min(kMax, parameters.size()); ++i) {
    text += format_text("{}{}", i == 0 ? "" : ", ", parameters[i]->name);
  }
  if (parameters.size() > kMax) text += format_text(" and {} more", parameters.size() - kMax);
  return text;
}

namespace {

constexpr std::size_t kSmall = 256 * 1024;  // tensors below this size, in bytes, are packed
constexpr Argument kArgument{"DistributedDataParallel", "tensor"};

}  // namespace

Replicator::Replicator(std::shared_ptr<ProcessGroup> group, std::vector<torch::Tensor> tensors)
    : group_(std::move(group)), tensors_(std::move(tensors)) {}

// Allocates one block of registered memory per device; tensors of one dtype are adjacent.
void Replicator::lay_out() {
  laid_out_ = true;
  std::map<std::string, std::map<torch::ScalarType, Pack>> by_device;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const torch::Tensor& tensor = tensors_[i];
    if (!is_dense(tensor) || tensor.nbytes() > kSmall) {
      single_.push_back(i);
    } else if (tensor.numel() != 0) {
      Pack& pack = by_device[tensor.device().str()][tensor.scalar_type()];
      pack.indices.push_back(i);
      pack.tensors.push_back(tensor.detach());
      pack.layout.add(tensor.nbytes());
    }
  }
  for (auto& [name, by_dtype] : by_device) {
    PackedLayout all;
    for (const auto& [dtype, pack] : by_dtype) all.add(pack.layout.bytes());
    const Device device = device_of(by_dtype.begin()->second.tensors.front(), kArgument);
    const RegisteredMemory memory = allocate_for(*group_, all.bytes(), device);
    std::size_t next = 0;
    for (auto& [dtype, pack] : by_dtype) {
      const std::size_t begin = all.offset(next++);
      for (std::size_t i = 0; i < pack.tensors.size(); ++i)
        pack.places.push_back(pack.layout.view(memory, begin, i, pack.tensors[i]));
      pack.all = {static_cast<std::byte*>(memory.data()) + begin, pack.layout.bytes(), DType::uint8, device};
      packs_.push_back(std::move(pack));
    }
  }
}

// Loading and set_data replace the memory of tensors.
void Replicator::find_memory() {
  for (Pack& pack : packs_) {
    for (std::size_t i = 0; i < pack.indices.size(); ++i) {
      const torch::Tensor &now = tensors_[pack.indices[i]], &before = pack.tensors[i];
      if (now.data_ptr() == before.data_ptr()) continue;
      MANIPLE_REQUIRE(
          now.sizes() == before.sizes() && now.strides() == before.strides() && now.dtype() == before.dtype() &&
              now.device() == before.device(),
          "DistributedDataParallel: a buffer was {} [{}] on {} when the module was wrapped, and is {} [{}] on "
          "{} now; load and convert the module first and wrap it then, or set broadcast_buffers = false",
          c10::toString(before.scalar_type()), joined(before.sizes()), before.device().str(),
          c10::toString(now.scalar_type()), joined(now.sizes()), now.device().str());
      pack.tensors[i] = now.detach();
    }
  }
}

void Replicator::copy_from(int root) {
  if (tensors_.empty()) return;
  const torch::NoGradGuard no_grad;
  if (!laid_out_) lay_out();
  find_memory();
  for (const std::size_t index : single_) {
    const torch::Tensor& tensor = tensors_[index];
    const Device device = device_of(tensor, kArgument);
    const CallOptions call{.stream = current_stream_on(device)};
    if (is_dense(tensor)) {
      group_->broadcast({tensor.data_ptr(), tensor.nbytes(), DType::uint8, device}, root, call, public_place());
    } else {
      const Staged staged(tensor, Access::read_write, kArgument);
      group_->broadcast(staged.buffer(), root, call, public_place());
      staged.write_back();
    }
  }
  const bool here = group_->rank() == root;
  for (const Pack& pack : packs_) {
    if (here) copy_all(pack.places, pack.tensors);
    group_->broadcast(pack.all, root, {.stream = current_stream_on(pack.all.device)}, public_place());
    if (!here) copy_all(pack.tensors, pack.places);
  }
}

bool Replicator::replace(const std::vector<torch::Tensor>& tensors) {
  if (tensors.size() != tensors_.size()) return false;
  bool same = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const torch::Tensor &now = tensors[i], &before = tensors_[i];
    if (now.sizes() != before.sizes() || now.strides() != before.strides() || now.dtype() != before.dtype() ||
        now.device() != before.device()) {
      return false;
    }
    same = same && now.is_same(before);
  }
  if (same) return true;
  tensors_ = tensors;
  for (Pack& pack : packs_) {
    for (std::size_t i = 0; i < pack.indices.size(); ++i) pack.tensors[i] = tensors_[pack.indices[i]].detach();
  }
  return true;
}

}  // namespace maniple
