// A checkpoint is a list of parts; each knows how to describe itself as a NamedState and how to take one back.
#include <maniple/train/checkpoint.h>

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>

#include "base/check.h"
#include "base/log.h"
#include "tensor/device.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/named_state.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/shard/sharded_state.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

constexpr const char* kRandomPart = "random";
constexpr const char* kValue = "value";

struct Part {
  std::string name;
  std::function<NamedState()> save;
  std::function<void(const NamedState&, const LoadOptions&)> load;
  ShardedOptimizerBase* sharded = nullptr;  // then save is collective, and its result is a copy already
};

NamedState state_of(torch::nn::Module& module) {
  NamedState state;
  for (const auto& entry : module.named_parameters()) state.tensors[entry.key()] = entry.value();
  for (const auto& entry : module.named_buffers()) state.tensors[entry.key()] = entry.value();
  return state;
}

NamedState state_of(torch::jit::Module& module) {
  NamedState state;
  for (const auto& entry : module.named_parameters()) state.tensors[entry.name] = entry.value;
  for (const auto& entry : module.named_buffers()) state.tensors[entry.name] = entry.value;
  return state;
}

/// Into the tensors of a module, which are `here`.
void restore(NamedState here, const NamedState& saved, bool strict) {
  std::vector<std::string> missing, surplus;
  for (const auto& [name, tensor] : here.tensors) {
    if (saved.tensors.count(name) == 0) missing.push_back(name);
  }
  for (const auto& [name, tensor] : saved.tensors) {
    if (here.tensors.count(name) == 0) surplus.push_back(name);
  }
  if (!missing.empty() || !surplus.empty()) {
    const std::string text =
        format_text("not in the checkpoint: [{}]; not in the module: [{}]", joined(missing), joined(surplus));
    MANIPLE_REQUIRE(!strict, "{} (strict = false loads the rest)", text);
    log_warning("checkpoint: {}", text);
  }
  // Everything is looked at before anything is changed.
  for (const auto& [name, tensor] : here.tensors) {
    const auto found = saved.tensors.find(name);
    if (found == saved.tensors.end()) continue;
    MANIPLE_REQUIRE(found->second.sizes() == tensor.sizes(), "{} has shape [{}] in the checkpoint and [{}] here", name,
                    joined(found->second.sizes()), joined(tensor.sizes()));
  }
  const torch::NoGradGuard no_grad;
  for (auto& [name, tensor] : here.tensors) {
    if (const auto found = saved.tensors.find(name); found != saved.tensors.end()) tensor.copy_(found->second);
  }
}

/// LibTorch keeps the count of steps to itself; a derived class may name it.
struct SchedulerSteps : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&SchedulerSteps::step_count_); }
};

NamedState text_state(std::string text) {
  NamedState state;
  state.texts[kValue] = std::move(text);
  return state;
}

const std::string& text_in(const NamedState& state) {
  const auto found = state.texts.find(kValue);
  if (found == state.texts.end()) throw ProtocolError("it holds no value");
  return found->second;
}

torch::Tensor random_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state().clone();
}

void set_random_state(at::Generator generator, const torch::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Only what waiting cannot fix is an error here; what cannot be read or made is an error of load and save.
void require_directory(const std::string& folder) {
  struct stat status{};
  const bool found = ::stat(folder.c_str(), &status) == 0;
  MANIPLE_REQUIRE(found ? S_ISDIR(status.st_mode) : errno != ENOTDIR,
                  "checkpoints cannot be kept in {}: it is not a directory, or lies below something that is none",
                  folder);
}

/// What a run can go on from after a save has failed.
std::string what_is_left(const std::string& folder) {
  try {
    const auto steps = list_checkpoints(folder);
    if (steps.empty()) return "there is no checkpoint yet";
    return format_text("the newest one is still that of step {}", steps.front());
  } catch (const Error& error) {
    return error.what();
  }
}

std::string random_name(int rank) { return format_text("rank.{}", rank); }
std::string device_random_name(int rank) { return format_text("rank.{}.cuda", rank); }

}  // namespace

struct Checkpoint::Impl {
  CheckpointOptions options;
  std::vector<Part> parts;
  std::set<std::string> names = {kRandomPart, "manifest"};

  std::thread writer;                  // of the save under way
  std::optional<std::int64_t> loaded;  // since the latest save: where the run went on from
  mutable std::mutex mutex;
  std::string error;
  std::string pruned;

  std::shared_ptr<ProcessGroup> group() const {
    if (options.group) return options.group;
    return is_initialized() ? get_default_group() : nullptr;
  }

  void add(Part part) {
    const bool plain = !part.name.empty() && part.name.size() <= 200 && part.name.front() != '.' &&
                       std::all_of(part.name.begin(), part.name.end(), [](unsigned char c) {
                         return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
                       });
    MANIPLE_REQUIRE(plain,
                    "a part of a checkpoint is called \"{}\"; letters, digits, \"_\", \"-\" and \".\" may be used",
                    part.name);
    MANIPLE_REQUIRE(names.insert(part.name).second, "a checkpoint has two parts called \"{}\"", part.name);
    parts.push_back(std::move(part));
  }

  void wait() {
    if (writer.joinable()) writer.join();
  }

  // ---- Saving --------------------------------------------------------------------------------------------------

  /// Of all ranks, on rank 0.
  NamedState random_states(ProcessGroup* ranks) const {
    NamedState state;
    const torch::Tensor mine = random_state(at::detail::getDefaultCPUGenerator());
    add_device_states(ranks, state);
    if (ranks == nullptr || ranks->size() == 1) {
      state.tensors[random_name(0)] = mine;
      return state;
    }
    const auto bytes = static_cast<std::size_t>(mine.numel());
    const std::int64_t n = ranks->rank() == 0 ? ranks->size() : 0;
    const torch::Tensor all = torch::empty({n, mine.numel()}, torch::kUInt8);
    ranks->gather(ConstBuffer{mine.data_ptr(), bytes, DType::uint8},
                  Buffer{all.data_ptr(), bytes * static_cast<std::size_t>(n), DType::uint8}, 0);
    for (std::int64_t r = 0; r < n; ++r) state.tensors[random_name(static_cast<int>(r))] = all[r];
    return state;
  }

  /// Of the GPUs that each rank sees, one after the other. A rank may see none.
  static void add_device_states([[maybe_unused]] ProcessGroup* ranks, [[maybe_unused]] NamedState& state) {
#ifdef MANIPLE_TORCH_CUDA
    std::string mine;
    for (const at::Generator& generator : device_generators()) {
      const torch::Tensor bytes = random_state(generator);
      mine.append(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes());
    }
    const bool alone = ranks == nullptr || ranks->size() == 1;
    const std::vector<std::string> all = alone ? std::vector{mine} : ranks->all_gather_objects(mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].empty()) continue;
      torch::Tensor& bytes = state.tensors[device_random_name(static_cast<int>(r))];
      bytes = torch::empty({static_cast<std::int64_t>(all[r].size())}, torch::kUInt8);
      std::memcpy(bytes.data_ptr(), all[r].data(), all[r].size());
    }
#endif
  }

  /// As far as this rank sees as many as it did.
  static void set_device_states(const NamedState& random, int rank) {
    const auto saved = random.tensors.find(device_random_name(rank));
    if (saved == random.tensors.end()) return;
    std::int64_t at = 0;
    for (const at::Generator& generator : device_generators()) {
      const std::int64_t bytes = random_state(generator).numel();
      if (at + bytes > saved->second.numel()) return;
      set_random_state(generator, saved->second.narrow(0, at, bytes).clone());
      at += bytes;
    }
  }

  void write(std::int64_t step, const std::map<std::string, NamedState>& states) {
    std::string trouble;
    std::vector<std::string> notes;
    bool saved = false;
    try {
      PendingCheckpoint pending(options.folder, step);
      for (const auto& [name, state] : states) {
        const std::string file = name + ".safetensors";
        pending.add(file, write_state(pending.path_of(file), state));
      }
      notes = pending.commit(loaded);
      saved = true;
      loaded.reset();
      for (std::string& note : prune_checkpoints(options.folder, options.keep_last, step))
        notes.push_back(std::move(note));
    } catch (const std::exception& failure) {
      trouble = format_text("checkpoint of step {} in {} was {}: {}", step, options.folder,
                            saved ? "saved, but older ones were not removed" : "not saved", failure.what());
      log_warning("{}; training goes on, {}", trouble, what_is_left(options.folder));
    }
    const std::lock_guard lock(mutex);
    error = std::move(trouble);
    pruned = joined(notes, "\n");
  }

  void save(std::int64_t step) {
    MANIPLE_REQUIRE(step >= 0, "a checkpoint of step {}: steps begin with 0", step);
    const auto ranks = group();
    const NamedState random = random_states(ranks.get());
    std::map<std::string, NamedState> states;
    for (const Part& part : parts)
      if (part.sharded != nullptr) states[part.name] = part.save();
    if (ranks && ranks->rank() != 0) return;
    wait();
    for (const Part& part : parts) {
      if (part.sharded == nullptr) states[part.name] = snapshot_of(part.save());
      MANIPLE_REQUIRE(part.sharded == nullptr || part.sharded->process_group()->rank() == 0,
                      "{} is gathered on rank 0 of its group, here rank {} writes; give CheckpointOptions that group",
                      part.name, part.sharded->process_group()->rank());
    }
    states[kRandomPart] = snapshot_of(random);
    if (!options.background) return write(step, states);
    writer = std::thread([this, step, states = std::move(states)] { write(step, states); });
  }

  // ---- Loading -------------------------------------------------------------------------------------------------

  /// The newest that is whole, -1 when there is none. Throws when there are some, but none can be used.
  std::int64_t choose(const LoadOptions& load) const {
    restore_replaced(options.folder);
    if (load.step) {
      verify_checkpoint(options.folder, *load.step);
      return *load.step;
    }
    std::vector<std::string> troubles;
    for (const std::int64_t step : list_checkpoints(options.folder)) {
      try {
        verify_checkpoint(options.folder, step);
        return step;
      } catch (const Error& failure) {
        log_warning("{}; trying the one before it", failure.what());
        troubles.emplace_back(failure.what());
      }
    }
    if (!troubles.empty()) {
      throw ProtocolError(format_text("no checkpoint in {} can be used: {}", options.folder, joined(troubles, "; ")));
    }
    return -1;
  }

  void read(std::int64_t step, const LoadOptions& load, int rank) {
    const std::string path = options.folder + "/" + checkpoint_name(step) + "/";
    std::map<std::string, NamedState> states;
    for (const Part& part : parts) states[part.name] = read_state(path + part.name + ".safetensors");
    const NamedState random = read_state(path + kRandomPart + ".safetensors");
    for (const Part& part : parts) {
      try {
        part.load(states[part.name], load);
      } catch (const InvalidArgument& failure) {
        throw InvalidArgument(format_text("{}{}.safetensors: {}", path, part.name, failure.what()));
      } catch (const ProtocolError& failure) {
        throw ProtocolError(format_text("{}{}.safetensors: {}", path, part.name, failure.what()));
      }
    }
    if (const auto mine = random.tensors.find(random_name(rank)); mine != random.tensors.end())
      set_random_state(at::detail::getDefaultCPUGenerator(), mine->second);
    set_device_states(random, rank);
  }

  std::optional<std::int64_t> load(const LoadOptions& load) {
    wait();
    const auto ranks = group();
    if (!ranks || ranks->size() == 1) {
      const std::int64_t step = choose(load);
      if (step < 0) return std::nullopt;
      read(step, load, 0);
      return loaded = step;
    }
    // Rank 0 chooses, so that all take the same one; a failure anywhere is an error everywhere, or the others would wait for
    // this rank in their next collective.
    constexpr std::int64_t kFailed = -2;
    std::int64_t step = kFailed;
    std::exception_ptr failure;
    if (ranks->rank() == 0) {
      try {
        step = choose(load);
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }
    ranks->broadcast(buffer_of(step), 0);
    if (step == -1) return std::nullopt;
    if (step >= 0) {
      try {
        read(step, load, ranks->rank());
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
    }
    std::int64_t first_failed = failure ? ranks->rank() : ranks->size();
    ranks->all_reduce(buffer_of(first_failed), ReduceOp::min);
    if (failure) std::rethrow_exception(failure);
    if (first_failed < ranks->size()) {
      throw ProtocolError(format_text("rank {} could not load the checkpoint from {}; its own error says why",
                                      first_failed, options.folder));
    }
    return loaded = step;
  }
};

Checkpoint::Checkpoint(CheckpointOptions options) : impl_(std::make_unique<Impl>()) {
  MANIPLE_REQUIRE(!options.folder.empty(), "a checkpoint needs a folder");
  MANIPLE_REQUIRE(options.keep_last >= 1, "keep_last is {}; at least 1 checkpoint is kept", options.keep_last);
  if (options.group) options.group->require_member("Checkpoint");
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  require_directory(options.folder);
  impl_->options = std::move(options);
}

Checkpoint::~Checkpoint() { impl_->wait(); }

Checkpoint& Checkpoint::add(const std::string& name, torch::nn::Module& module) {
  impl_->add(
      {name, [&module] { return state_of(module); },
       [&module](const NamedState& state, const LoadOptions& load) { restore(state_of(module), state, load.strict); }});
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::jit::Module& module) {
  impl_->add(
      {name, [&module] { return state_of(module); },
       [&module](const NamedState& state, const LoadOptions& load) { restore(state_of(module), state, load.strict); }});
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer) {
  impl_->add({name, [&optimizer] { return state_of(optimizer); },
              [&optimizer](const NamedState& state, const LoadOptions&) { restore(optimizer, state); },
              dynamic_cast<ShardedOptimizerBase*>(&optimizer)});
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::LRScheduler& scheduler) {
  impl_->add({name, [&scheduler] { return text_state(std::to_string(SchedulerSteps::of(scheduler))); },
              [&scheduler](const NamedState& state, const LoadOptions&) {
                SchedulerSteps::of(scheduler) = static_cast<unsigned>(integer_of(text_in(state)));
              }});
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, GradScaler& scaler) {
  return add(
      name, [&scaler] { return scaler.state(); }, [&scaler](const std::string& text) { scaler.load_state(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, DistributedSampler sampler) {
  return add(
      name, [sampler] { return sampler.cursor_text(); },
      [sampler](const std::string& text) mutable { sampler.load_cursor(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, torch::Tensor& tensor) {
  impl_->add({name,
              [&tensor] {
                NamedState state;
                state.tensors[kValue] = tensor;
                return state;
              },
              [&tensor](const NamedState& state, const LoadOptions& load) {
                const auto found = state.tensors.find(kValue);
                if (found == state.tensors.end()) throw ProtocolError("it holds no value");
                const torch::Device device = load.map_location  ? *load.map_location
                                             : tensor.defined() ? tensor.device()
                                                                : torch::Device(torch::kCPU);
                tensor = found->second.to(device).set_requires_grad(tensor.defined() && tensor.requires_grad());
              }});
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::int64_t& number) {
  return add(
      name, [&number] { return text_of(number); }, [&number](const std::string& text) { number = integer_of(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, double& number) {
  return add(
      name, [&number] { return text_of(number); }, [&number](const std::string& text) { number = real_of(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, std::string& text) {
  return add(name, [&text] { return text; }, [&text](const std::string& saved) { text = saved; });
}

Checkpoint& Checkpoint::add(const std::string& name, std::function<std::string()> save,
                            std::function<void(const std::string&)> load) {
  impl_->add({name, [save = std::move(save)] { return text_state(save()); },
              [load = std::move(load)](const NamedState& state, const LoadOptions&) { load(text_in(state)); }});
  return *this;
}

void Checkpoint::save(std::int64_t step) { impl_->save(step); }
std::optional<std::int64_t> Checkpoint::load(const LoadOptions& options) { return impl_->load(options); }
void Checkpoint::wait() { impl_->wait(); }

std::string Checkpoint::last_error() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->error;
}

std::string Checkpoint::last_pruned() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->pruned;
}

}  // namespace maniple
