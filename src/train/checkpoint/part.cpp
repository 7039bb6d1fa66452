#include "train/checkpoint/part.h"

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/saved_checkpoint.h"
#include "train/state_key.h"

namespace maniple {
namespace {

constexpr const char* kValue = "value";

struct ModuleTensors {
  std::map<std::string, torch::Tensor> parameters, buffers;
  std::set<std::string> of_all_ranks;  // names in modules whose ranks hold different tensors
};

void add_tensors(const torch::nn::Module& module, const std::string& prefix, ModuleTensors& tensors) {
  const auto* const partial = dynamic_cast<const PartialModule*>(&module);
  const bool with_children = partial != nullptr;
  const auto name_of = [&](const std::string& name) {
    return dotted(prefix, partial == nullptr ? name : partial->checkpoint_name(name));
  };
  for (const auto& entry : module.named_parameters(with_children))
    tensors.parameters[name_of(entry.key())] = entry.value();
  for (const auto& entry : module.named_buffers(with_children)) tensors.buffers[name_of(entry.key())] = entry.value();
  if (partial != nullptr) {
    for (const std::string& name : partial->names_of_all_ranks()) tensors.of_all_ranks.insert(dotted(prefix, name));
    return;
  }
  for (const auto& child : module.named_children()) add_tensors(*child.value(), dotted(prefix, child.key()), tensors);
}

ModuleTensors tensors_of(const torch::nn::Module& module) {
  ModuleTensors tensors;
  add_tensors(module, "", tensors);
  return tensors;
}

ModuleTensors tensors_of(torch::jit::Module& module) {
  ModuleTensors tensors;
  for (const auto& entry : module.named_parameters()) tensors.parameters[entry.name] = entry.value;
  for (const auto& entry : module.named_buffers()) tensors.buffers[entry.name] = entry.value;
  return tensors;
}

/// Calls f(name, tensor, shard) for the parameters that are shards. Visits children first: a module that also divides
/// its children's parameters comes later, and its shards prevail.
template <class F>
void for_each_shard(torch::nn::Module& module, const std::string& prefix, const F& f) {
  for (const auto& child : module.named_children()) for_each_shard(*child.value(), dotted(prefix, child.key()), f);
  if (const auto* divided = dynamic_cast<const ShardedModule*>(&module)) {
    for (const auto& entry : module.named_parameters()) {
      if (auto shard = divided->shard_of(entry.key())) f(dotted(prefix, entry.key()), entry.value(), *shard);
    }
  }
}
template <class F>
void for_each_shard(torch::jit::Module&, const std::string&, const F&) {}  // scripted models are never divided

template <class Module>
PartState save_module(Module& module, const Layouts* layouts) {
  PartState state;
  const ModuleTensors tensors = tensors_of(module);
  for (const auto& [name, tensor] : tensors.parameters)
    state.tensors.push_back({shard_with(layouts, name, tensor, tensor)});
  for (const auto& [name, tensor] : tensors.buffers) {
    if (tensors.parameters.count(name) == 0) state.tensors.push_back({TensorShard::whole(name, tensor), true});
  }
  return state;
}

template <class Module>
void load_module(Module& module, const SavedPart& saved, const LoadOptions& options, const Layouts& layouts) {
  std::map<std::string, TensorShard> here;
  for (PartState::Tensor& tensor : save_module(module, &layouts).tensors)
    here[tensor.shard.name] = std::move(tensor.shard);
  const std::set<std::string> of_all_ranks = tensors_of(module).of_all_ranks;
  std::vector<std::string> missing, surplus;
  for (const auto& [name, shard] : here) {
    if (saved.tensors().count(name) == 0) missing.push_back(name);
  }
  for (const auto& [name, tensor] : saved.tensors()) {
    if (here.count(name) == 0 && of_all_ranks.count(name) == 0) surplus.push_back(name);
  }
  if (!missing.empty() || !surplus.empty()) {
    const std::string text =
        format_text("not in the checkpoint: [{}]; not in the module: [{}]", joined(missing), joined(surplus));
    MANIPLE_REQUIRE(!options.strict, "{} (strict = false loads the rest)", text);
    log_warning("checkpoint: {}", text);
  }
  // Everything is checked before anything is changed.
  for (const auto& [name, shard] : here) {
    const auto found = saved.tensors().find(name);
    if (found == saved.tensors().end()) continue;
    MANIPLE_REQUIRE(found->second.shape == shard.shape, "{} has shape [{}] in the checkpoint and [{}] here", name,
                    joined(found->second.shape), joined(shard.shape));
  }
  for (const auto& [name, shard] : here) {
    if (saved.tensors().count(name) != 0) saved.read(shard);
  }
}

template <class Module>
void add_module_layouts(const std::string& part, Module& module, Layouts& layouts) {
  const ModuleTensors tensors = tensors_of(module);
  layouts.partial = layouts.partial || !tensors.of_all_ranks.empty();
  for (const auto& [name, tensor] : tensors.parameters) {
    Layouts::Parameter& known = layouts.of[tensor.unsafeGetTensorImpl()];
    if (known.names.empty()) known.shard = TensorShard::whole(name, tensor);
    known.names.push_back(name_in_part(part, name));
  }
  for_each_shard(module, "", [&](const std::string& name, const torch::Tensor& tensor, TensorShard shard) {
    shard.name = name;
    shard.local = tensor;
    box_of(shard);  // throws for an inconsistent shard
    layouts.of[tensor.unsafeGetTensorImpl()].shard = std::move(shard);
  });
  for (auto& [tensor, known] : layouts.of) known.shard.local = torch::Tensor();
}

template <class Module>
Part any_module_part(const std::string& name, Module& module) {
  return {name, [&module](const Layouts* layouts) { return save_module(module, layouts); },
          [&module](const SavedPart& saved, const LoadOptions& options, const Layouts& layouts) {
            load_module(module, saved, options, layouts);
          },
          [name, &module](Layouts& layouts) { add_module_layouts(name, module, layouts); }};
}

/// LibTorch keeps the step count protected; a derived class can access it.
struct SchedulerSteps : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&SchedulerSteps::step_count_); }
};

const std::string& text_in(const SavedPart& saved) {
  const auto found = saved.texts().find(kValue);
  if (found == saved.texts().end()) throw ProtocolError("it holds no value");
  return found->second;
}

/// The name of a tensor of the module that another of the saving ranks holds.
std::string name_elsewhere(const torch::nn::Module& module, const Topology& savers) {
  if (const auto* const partial = dynamic_cast<const PartialModule*>(&module)) {
    int both = 0;
    for (const auto& holder : partial->divided_over()->topology().members) {
      for (const auto& saver : savers.members) both += holder.global_rank == saver.global_rank ? 1 : 0;
    }
    const ModuleTensors here = tensors_of(module);
    for (const std::string& name : here.of_all_ranks) {
      if (both > 1 && here.parameters.count(name) == 0 && here.buffers.count(name) == 0) return name;
    }
    return {};
  }
  for (const auto& child : module.named_children()) {
    if (std::string name = name_elsewhere(*child.value(), savers); !name.empty()) return name;
  }
  return {};
}

}  // namespace

// ---- sharded_checkpoint.h -------------------------------------------------------------------------------------------

ShardedModule::~ShardedModule() = default;
PartialModule::~PartialModule() = default;

TensorShard TensorShard::whole(std::string name, torch::Tensor tensor) {
  TensorShard shard;
  shard.name = std::move(name);
  shard.shape = tensor.sizes().vec();
  shard.offset.assign(shard.shape.size(), 0);
  shard.local = std::move(tensor);
  return shard;
}

TensorShard TensorShard::along(std::string name, torch::Tensor local, std::int64_t dim, std::int64_t offset,
                               std::int64_t extent) {
  TensorShard shard = whole(std::move(name), std::move(local));
  MANIPLE_REQUIRE(dim >= 0 && dim < static_cast<std::int64_t>(shard.shape.size()),
                  "\"{}\" is divided along dimension {}; it has {} dimensions", shard.name, dim, shard.shape.size());
  shard.shape[dim] = extent;
  shard.offset[dim] = offset;
  return shard;
}

TensorShard TensorShard::flat(const ShardOf& from) {
  TensorShard shard;
  shard.name = from.name;
  shard.shape = from.shape;
  shard.view = {elements_of(from.shape)};
  shard.offset = {from.offset};
  MANIPLE_REQUIRE(from.local.defined() && from.local.numel() == from.count,
                  "\"{}\": a range of {} elements needs a tensor of as many", from.name, from.count);
  shard.local = from.local.detach().reshape({from.count});
  return shard;
}

TensorBox box_of(const TensorShard& shard) {
  MANIPLE_REQUIRE(shard.local.defined() && shard.local.layout() == torch::kStrided,
                  "\"{}\" cannot be saved: it is undefined or sparse", shard.name);
  const TensorBox box{shard.view.empty() ? shard.shape : shard.view, shard.offset, shard.local.sizes().vec()};
  for (const Extents* extents : {&shard.shape, &box.view}) {
    MANIPLE_REQUIRE(tensor_bytes(*extents, 16), "\"{}\" has shape [{}], which no tensor has", shard.name,
                    joined(*extents));
  }
  MANIPLE_REQUIRE(elements_of(box.view) == elements_of(shard.shape),
                  "\"{}\" has {} elements, but the view that it is divided in has {}", shard.name,
                  elements_of(shard.shape), elements_of(box.view));
  MANIPLE_REQUIRE(lies_inside(box), "\"{}\": a shard of [{}] at [{}] does not lie in [{}]", shard.name,
                  joined(box.size), joined(box.offset), joined(box.view));
  return box;
}

SavedPart::SavedPart(SavedCheckpoint& checkpoint, const std::string& name) : checkpoint_(&checkpoint), name_(name) {
  const auto found = checkpoint.index().parts.find(name);
  if (found == checkpoint.index().parts.end()) {
    throw ProtocolError(format_text("{}: the checkpoint lacks this part", checkpoint.place_of(name)));
  }
  for (const auto& [key, tensor] : found->second.tensors)
    tensors_[key] = {scalar_type_of(tensor.dtype, key), tensor.shape};
}

SavedPart::SavedPart(const NamedState& state) : memory_(&state) {
  for (const auto& [key, tensor] : state.tensors) tensors_[key] = {tensor.scalar_type(), tensor.sizes().vec()};
}

torch::Tensor SavedPart::elements(const std::string& tensor, const TensorBox& box, torch::ScalarType dtype) const {
  if (memory_ != nullptr) {
    torch::Tensor part = memory_->tensors.at(tensor).reshape(box.view);
    for (std::size_t dim = 0; dim < box.view.size(); ++dim)
      part = part.narrow(static_cast<std::int64_t>(dim), box.offset[dim], box.size[dim]);
    return part;
  }
  torch::Tensor part = torch::empty(box.size, dtype);
  checkpoint_->read(checkpoint_->index().parts.at(name_).tensors.at(tensor), box, part.data_ptr());
  return part;
}

const std::map<std::string, std::string>& SavedPart::texts() const {
  if (memory_ != nullptr) return memory_->texts;
  return checkpoint_->index().parts.at(name_).texts;
}

torch::Tensor SavedPart::read(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  MANIPLE_REQUIRE(found != tensors_.end(), "the checkpoint has no tensor \"{}\"", tensor);
  return elements(tensor, TensorBox::whole(found->second.shape), found->second.dtype);
}

void SavedPart::read(const TensorShard& shard) const {
  const TensorBox box = box_of(shard);
  const auto found = tensors_.find(shard.name);
  MANIPLE_REQUIRE(found != tensors_.end(), "the checkpoint has no tensor \"{}\"", shard.name);
  MANIPLE_REQUIRE(found->second.shape == shard.shape, "{} has shape [{}] in the checkpoint and [{}] here", shard.name,
                  joined(found->second.shape), joined(shard.shape));
  const torch::NoGradGuard no_grad;
  torch::Tensor local = shard.local;
  local.copy_(elements(shard.name, box, found->second.dtype));
}

void SavedPart::read(const ShardOf& shard) const {
  if (!shard.local.defined() || shard.local.is_contiguous()) return read(TensorShard::flat(shard));
  MANIPLE_REQUIRE(shard.local.sizes() == shard.shape, "\"{}\": a range of {} elements needs a contiguous tensor",
                  shard.name, shard.count);
  read(TensorShard::whole(shard.name, shard.local));
}

// ---- The kinds of parts ---------------------------------------------------------------------------------------------

Part module_part(const std::string& name, torch::nn::Module& module) { return any_module_part(name, module); }
Part module_part(const std::string& name, torch::jit::Module& module) { return any_module_part(name, module); }

TensorShard shard_with(const Layouts* layouts, const std::string& name, const torch::Tensor& parameter,
                       const torch::Tensor& local) {
  const Layouts::Parameter* const known = layouts == nullptr ? nullptr : layouts->find(parameter);
  if (known == nullptr) return TensorShard::whole(name, local);
  TensorShard shard = known->shard;
  shard.name = name;
  shard.local = local;
  return shard;
}

Part text_part(const std::string& name, std::function<std::string()> save,
               std::function<void(const std::string&)> load) {
  return {
      name,
      [save = std::move(save)](const Layouts*) {
        PartState state;
        state.texts[kValue] = save();
        return state;
      },
      [load = std::move(load)](const SavedPart& saved, const LoadOptions&, const Layouts&) { load(text_in(saved)); }};
}

Part scheduler_part(const std::string& name, torch::optim::LRScheduler& scheduler) {
  return text_part(
      name, [&scheduler] { return std::to_string(SchedulerSteps::of(scheduler)); },
      [&scheduler](const std::string& text) {
        SchedulerSteps::of(scheduler) = static_cast<unsigned>(integer_of(text));
      });
}

Part tensor_part(const std::string& name, torch::Tensor& tensor) {
  return {name,
          [&tensor](const Layouts*) {
            PartState state;
            MANIPLE_REQUIRE(tensor.defined(), "\"{}\" cannot be saved: it is undefined or sparse", kValue);
            state.tensors.push_back({TensorShard::whole(kValue, tensor)});
            return state;
          },
          [&tensor](const SavedPart& saved, const LoadOptions& options, const Layouts&) {
            if (saved.tensors().count(kValue) == 0) throw ProtocolError("it holds no value");
            const torch::Device device = options.map_location ? *options.map_location
                                         : tensor.defined()   ? tensor.device()
                                                              : torch::Device(torch::kCPU);
            tensor = saved.read(kValue).to(device).set_requires_grad(tensor.defined() && tensor.requires_grad());
          }};
}

NamedState whole_state(const PartState& state, const std::string& part) {
  NamedState named;
  named.texts = state.texts;
  for (const PartState::Tensor& tensor : state.tensors) {
    MANIPLE_REQUIRE(
        !tensor.shard.local.defined() || tensor.shard.local.sizes().vec() == tensor.shard.shape,
        "tensor \"{}\" of part \"{}\" is a shard of [{}]; CheckpointOptions::sharded saves the shards of all ranks",
        tensor.shard.name, part, joined(tensor.shard.shape));
    named.tensors[tensor.shard.name] = tensor.shard.view.empty() || !tensor.shard.local.defined()
                                           ? tensor.shard.local
                                           : tensor.shard.local.reshape(tensor.shard.shape);
  }
  return named;
}

std::string first_held_elsewhere(torch::nn::Module& module, const ProcessGroup* ranks) {
  std::string first;
  for_each_shard(module, "", [&](const std::string& name, const torch::Tensor& tensor, const TensorShard& shard) {
    if (first.empty() && tensor.sizes().vec() != shard.shape) first = name;
  });
  return first.empty() && ranks != nullptr ? name_elsewhere(module, ranks->topology()) : first;
}

}  // namespace maniple
