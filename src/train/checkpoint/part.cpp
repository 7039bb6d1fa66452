#include "train/checkpoint/part.h"

#include "base/check.h"
#include "base/log.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/saved_checkpoint.h"

namespace maniple {
namespace {

constexpr const char* kValue = "value";

struct ModuleTensors {
  std::map<std::string, torch::Tensor> parameters, buffers;
};

ModuleTensors tensors_of(torch::nn::Module& module) {
  ModuleTensors tensors;
  for (const auto& entry : module.named_parameters()) tensors.parameters[entry.key()] = entry.value();
  for (const auto& entry : module.named_buffers()) tensors.buffers[entry.key()] = entry.value();
  return tensors;
}

ModuleTensors tensors_of(torch::jit::Module& module) {
  ModuleTensors tensors;
  for (const auto& entry : module.named_parameters()) tensors.parameters[entry.name] = entry.value;
  for (const auto& entry : module.named_buffers()) tensors.buffers[entry.name] = entry.value;
  return tensors;
}

/// Calls f(name, tensor, shard) for the parameters that are shards.
template <class F>
void for_each_shard(torch::nn::Module& module, const std::string& prefix, const F& f) {
  if (const auto* divided = dynamic_cast<const ShardedModule*>(&module)) {
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      if (auto shard = divided->shard_of(entry.key())) f(prefix + entry.key(), entry.value(), *shard);
    }
  }
  for (const auto& child : module.named_children()) for_each_shard(*child.value(), prefix + child.key() + ".", f);
}
template <class F>
void for_each_shard(torch::jit::Module&, const std::string&, const F&) {}  // scripted models are not divided

TensorShard shard_with(const Layouts* layouts, const std::string& name, const torch::Tensor& parameter,
                       const torch::Tensor& local) {
  if (layouts != nullptr) {
    if (const auto found = layouts->find(parameter.unsafeGetTensorImpl()); found != layouts->end()) {
      TensorShard shard = found->second;
      shard.name = name;
      shard.local = local;
      return shard;
    }
  }
  return TensorShard::whole(name, local);
}

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
void load_module(Module& module, const SavedPart& saved, const LoadOptions& options, const Layouts* layouts) {
  std::map<std::string, TensorShard> here;
  for (PartState::Tensor& tensor : save_module(module, layouts).tensors)
    here[tensor.shard.name] = std::move(tensor.shard);
  std::vector<std::string> missing, surplus;
  for (const auto& [name, shard] : here) {
    if (saved.tensors().count(name) == 0) missing.push_back(name);
  }
  for (const auto& [name, tensor] : saved.tensors()) {
    if (here.count(name) == 0) surplus.push_back(name);
  }
  if (!missing.empty() || !surplus.empty()) {
    const std::string text =
        format_text("not in the checkpoint: [{}]; not in the module: [{}]", joined(missing), joined(surplus));
    MANIPLE_REQUIRE(!options.strict, "{} (strict = false loads the rest)", text);
    log_warning("checkpoint: {}", text);
  }
  // Everything is looked at before anything is changed.
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
void add_module_layouts(Module& module, Layouts& layouts) {
  for (const auto& [name, tensor] : tensors_of(module).parameters)
    layouts.emplace(tensor.unsafeGetTensorImpl(), TensorShard::whole(name, tensor));
  for_each_shard(module, "", [&](const std::string& name, const torch::Tensor& tensor, TensorShard shard) {
    shard.name = name;
    shard.local = tensor;
    box_of(shard);  // throws if it cannot be
    layouts[tensor.unsafeGetTensorImpl()] = std::move(shard);
  });
  for (auto& [tensor, shard] : layouts) shard.local = torch::Tensor();
}

template <class Module>
Part any_module_part(const std::string& name, Module& module) {
  return {name, [&module](const Layouts* layouts) { return save_module(module, layouts); },
          [&module](const SavedPart& saved, const LoadOptions& options, const Layouts* layouts) {
            load_module(module, saved, options, layouts);
          },
          [&module](Layouts& layouts) { add_module_layouts(module, layouts); }};
}

/// LibTorch keeps the count of steps to itself; a derived class may name it.
struct SchedulerSteps : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&SchedulerSteps::step_count_); }
};

const std::string& text_in(const SavedPart& saved) {
  const auto found = saved.texts().find(kValue);
  if (found == saved.texts().end()) throw ProtocolError("it holds no value");
  return found->second;
}

/// Of a tensor of the optimizer's state: as its parameter, if it has its shape.
TensorShard shard_of_state(torch::optim::Optimizer& optimizer, const std::string& name, const torch::Tensor& local,
                           const Layouts& layouts) {
  const torch::Tensor parameter = parameter_of_state(optimizer, name);
  if (!parameter.defined()) return TensorShard::whole(name, local);
  MANIPLE_REQUIRE(
      layouts.count(parameter.unsafeGetTensorImpl()) != 0,
      "{} belongs to a parameter of [{}] that is in none of the modules that were added: add its module, so that "
      "it is known how the ranks divide it",
      name, joined(parameter.sizes()));
  if (parameter.sizes() != local.sizes()) return TensorShard::whole(name, local);
  return shard_with(&layouts, name, parameter, local);
}

}  // namespace

// ---- sharded_checkpoint.h --------------------------------------------------------------------------------------------

ShardedModule::~ShardedModule() = default;

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
  shard.shape[static_cast<std::size_t>(dim)] = extent;
  shard.offset[static_cast<std::size_t>(dim)] = offset;
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
    throw ProtocolError(format_text("{}: the checkpoint has no such part", checkpoint.place_of(name)));
  }
  for (const auto& [key, tensor] : found->second.tensors)
    tensors_[key] = {scalar_type_of(tensor.dtype, key), tensor.shape};
}

const std::map<std::string, std::string>& SavedPart::texts() const {
  return checkpoint_->index().parts.at(name_).texts;
}

torch::Tensor SavedPart::read(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  MANIPLE_REQUIRE(found != tensors_.end(), "the checkpoint has no tensor \"{}\"", tensor);
  torch::Tensor result = torch::empty(found->second.shape, found->second.dtype);
  checkpoint_->read(checkpoint_->index().parts.at(name_).tensors.at(tensor), TensorBox::whole(found->second.shape),
                    result.data_ptr());
  return result;
}

void SavedPart::read(const TensorShard& shard) const {
  const TensorBox box = box_of(shard);
  const auto found = tensors_.find(shard.name);
  MANIPLE_REQUIRE(found != tensors_.end(), "the checkpoint has no tensor \"{}\"", shard.name);
  MANIPLE_REQUIRE(found->second.shape == shard.shape, "{} has shape [{}] in the checkpoint and [{}] here", shard.name,
                  joined(found->second.shape), joined(shard.shape));
  const torch::Tensor read = torch::empty(box.size, found->second.dtype);
  checkpoint_->read(checkpoint_->index().parts.at(name_).tensors.at(shard.name), box, read.data_ptr());
  const torch::NoGradGuard no_grad;
  torch::Tensor local = shard.local;
  local.copy_(read);
}

void SavedPart::read(const ShardOf& shard) const {
  if (!shard.local.defined() || shard.local.is_contiguous()) return read(TensorShard::flat(shard));
  MANIPLE_REQUIRE(shard.local.sizes() == shard.shape, "\"{}\": a range of {} elements needs a contiguous tensor",
                  shard.name, shard.count);
  read(TensorShard::whole(shard.name, shard.local));
}

// ---- The kinds of parts ----------------------------------------------------------------------------------------------

Part module_part(const std::string& name, torch::nn::Module& module) { return any_module_part(name, module); }
Part module_part(const std::string& name, torch::jit::Module& module) { return any_module_part(name, module); }

Part optimizer_part(const std::string& name, torch::optim::Optimizer& optimizer) {
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
            return state;
          },
          [&optimizer](const SavedPart& saved, const LoadOptions&, const Layouts* layouts) {
            NamedState state;
            state.texts = saved.texts();
            for (const auto& [key, tensor] : saved.tensors()) {
              const torch::Tensor parameter = parameter_of_state(optimizer, key);
              if (layouts == nullptr || !parameter.defined()) {
                state.tensors[key] = saved.read(key);
                continue;
              }
              const TensorShard like =
                  shard_of_state(optimizer, key, torch::empty(parameter.sizes(), tensor.dtype), *layouts);
              if (like.shape == tensor.shape) {
                saved.read(like);
                state.tensors[key] = like.local;
              } else {
                state.tensors[key] = saved.read(key);
              }
            }
            restore(optimizer, state);
          },
          {},
          dynamic_cast<ShardedOptimizerBase*>(&optimizer)};
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
      [load = std::move(load)](const SavedPart& saved, const LoadOptions&, const Layouts*) { load(text_in(saved)); }};
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
          [&tensor](const SavedPart& saved, const LoadOptions& options, const Layouts*) {
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
        "tensor \"{}\" of part \"{}\" is a shard of [{}]; CheckpointOptions::sharded saves those of all ranks",
        tensor.shard.name, part, joined(tensor.shard.shape));
    named.tensors[tensor.shard.name] = tensor.shard.view.empty() || !tensor.shard.local.defined()
                                           ? tensor.shard.local
                                           : tensor.shard.local.reshape(tensor.shard.shape);
  }
  return named;
}

std::string first_shard_in(torch::nn::Module& module) {
  std::string first;
  for_each_shard(module, "", [&](const std::string& name, const torch::Tensor& tensor, const TensorShard& shard) {
    if (first.empty() && tensor.sizes().vec() != shard.shape) first = name;
  });
  return first;
}

}  // namespace maniple
