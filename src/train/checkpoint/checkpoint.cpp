// A checkpoint is a list of parts (part.h). Rank 0 writes it (pending_checkpoint.h), or all ranks do (sharded_save.h).
// Both forms are read as a SavedCheckpoint.
#include <maniple/train/checkpoint.h>

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <sstream>
#include <thread>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "train/checkpoint/broadcast_state.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/choose_checkpoint.h"
#include "train/checkpoint/named_state.h"
#include "train/checkpoint/part.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/checkpoint/random_states.h"
#include "train/checkpoint/saved_checkpoint.h"
#include "train/checkpoint/sharded_save.h"
#include "train/sharded_optimizer/sharded_state.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

constexpr const char* kRandomPart = "random";
constexpr const char* kSave = "Checkpoint::save, which all ranks call";

/// Refuses only what waiting cannot fix; a folder that cannot be read or created is an error of load() and save().
void require_directory(const std::string& folder) {
  struct stat status{};
  const bool found = ::stat(folder.c_str(), &status) == 0;
  MANIPLE_REQUIRE(found ? S_ISDIR(status.st_mode) : errno != ENOTDIR,
                  "checkpoints cannot be kept in {}: it is not a directory, or lies below something that is none",
                  folder);
}

/// Describes the checkpoints that remain after a save has failed.
std::string what_is_left(const std::string& folder) {
  try {
    const auto steps = list_checkpoints(folder);
    if (steps.empty()) return "there is no checkpoint yet";
    return format_text("the newest one is still from step {}", steps.front());
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

struct Checkpoint::Impl {
  CheckpointOptions options;
  std::vector<Part> parts;
  std::set<std::string> names = {kRandomPart, "manifest"};

  ForkGuard guard;
  std::thread writer;                  // of the save in progress
  ShardedSave sharded;                 // used with options.sharded
  std::optional<std::int64_t> loaded;  // the step from which the run continued; reset by the next save
  mutable Mutex mutex;
  std::string error MANIPLE_GUARDED_BY(mutex);
  std::string pruned MANIPLE_GUARDED_BY(mutex);

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

  /// Ends a save, successful or not.
  void report(std::int64_t step, ShardedSave::Outcome outcome) {
    if (outcome.saved) loaded.reset();
    if (!outcome.error.empty()) {
      outcome.error =
          format_text("checkpoint of step {} in {} was {}: {}", step, options.folder,
                      outcome.saved ? "saved, but older ones were not removed" : "not saved", outcome.error);
      log_warning("{}; training goes on, {}", outcome.error, what_is_left(options.folder));
    }
    const MutexLock lock(mutex);
    error = std::move(outcome.error);
    pruned = joined(outcome.notes, "\n");
  }

  void write(std::int64_t step, const std::map<std::string, NamedState>& states) {
    ShardedSave::Outcome outcome;
    try {
      PendingCheckpoint pending(options.folder, step);
      for (const auto& [name, state] : states) {
        const std::string file = name + ".safetensors";
        pending.add(file, write_state(pending.path_of(file), state));
      }
      outcome.notes = pending.commit(loaded);
      outcome.saved = true;
      for (std::string& note : prune_checkpoints(options.folder, options.keep_last, step))
        outcome.notes.push_back(std::move(note));
    } catch (const std::exception& failure) {
      outcome.error = failure.what();
    }
    report(step, std::move(outcome));
  }

  void write_shards(std::int64_t step) {
    ShardedSave::Outcome outcome;
    try {
      outcome = sharded.write(options.folder, step, options.keep_last, loaded);
    } catch (const std::exception& failure) {
      outcome.error = failure.what();
    }
    report(step, std::move(outcome));
  }

  Layouts layouts() const {
    Layouts all;
    for (const Part& part : parts) {
      if (part.add_layouts) part.add_layouts(all);
    }
    return all;
  }

  void save_shards(std::int64_t step) {
    wait();
    const auto ranks = group();
    sharded.prepare(ranks, [&] {
      const Layouts divided = layouts();
      PartStates states;
      for (const Part& part : parts) states.emplace_back(part.name, part.save(&divided));
      states.emplace_back(kRandomPart, own_random_state(ranks ? ranks->rank() : 0));
      return states;
    });
    if (!options.background) return write_shards(step);
    writer = std::thread([this, step] {
      const PublicCall call(kSave);
      write_shards(step);
    });
  }

  void save(std::int64_t step) {
    require_folder("Checkpoint::save");
    MANIPLE_REQUIRE(step >= 0, "a checkpoint of step {}: steps begin with 0", step);
    if (options.sharded) return save_shards(step);
    const auto ranks = group();
    const NamedState random = random_states(ranks.get());
    const Layouts divided = layouts();
    const auto whole_of = [&](const Part& part) {
      PartState state = part.save(nullptr);
      if (part.annotate) part.annotate(state, divided);
      return whole_state(state, part.name);
    };
    std::map<std::string, NamedState> states;
    for (const Part& part : parts) {
      if (part.divided != nullptr) states[part.name] = whole_of(part);  // already a copy
    }
    if (ranks && ranks->rank() != 0) return loaded.reset();  // it may write the next one (Trainer in an elastic job)
    wait();
    for (const Part& part : parts) {
      if (part.divided == nullptr) states[part.name] = snapshot_of(whole_of(part));
      MANIPLE_REQUIRE(part.divided == nullptr || part.divided->group()->rank() == 0,
                      "{} is gathered on rank 0 of its group, here rank {} writes; give CheckpointOptions that group",
                      part.name, part.divided->group()->rank());
    }
    states[kRandomPart] = snapshot_of(random);
    if (!options.background) return write(step, states);
    writer = std::thread([this, step, states = std::move(states)] { write(step, states); });
  }

  // ---- Loading -------------------------------------------------------------------------------------------------

  void read(std::int64_t step, const LoadOptions& load, int rank) {
    SavedCheckpoint saved(options.folder + "/" + checkpoint_name(step), read_manifest(options.folder, step));
    std::vector<SavedPart> states;
    for (const Part& part : parts) states.emplace_back(saved, part.name);
    const SavedPart random(saved, kRandomPart);
    const Layouts divided = layouts();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string place = saved.place_of(parts[i].name);
      try {
        parts[i].load(states[i], load, divided);
      } catch (const InvalidArgument& failure) {
        throw InvalidArgument(format_text("{}: {}", place, failure.what()));
      } catch (const ProtocolError& failure) {
        throw ProtocolError(format_text("{}: {}", place, failure.what()));
      }
    }
    set_random_states(random, rank);
  }

  void require_folder(const char* operation) const {
    MANIPLE_REQUIRE(!options.in_memory, "{}: this checkpoint was made with in_memory, without a folder", operation);
  }

  // ---- In memory -----------------------------------------------------------------------------------------------

  void copy_from(int source) {
    if (options.sharded) throw Unsupported("Checkpoint::copy_from: the parts are divided over the ranks (sharded)");
    const auto ranks = group();
    const int size = ranks ? ranks->size() : 1;
    MANIPLE_REQUIRE(source >= 0 && source < size, "Checkpoint::copy_from: rank {} in a group of {}", source, size);
    if (size == 1) return;
    wait();
    const bool gives = ranks->rank() == source;
    const Layouts divided = layouts();
    std::vector<std::string> part_names;
    for (const Part& part : parts) part_names.push_back(part.name);
    const std::string own = joined(part_names);
    std::vector<NamedState> states(parts.size());
    std::vector<std::string> descriptions(parts.size());
    std::exception_ptr failure;
    try {
      const std::string theirs = ranks->broadcast_object(own, source, {}, public_place());
      MANIPLE_REQUIRE(theirs == own, "rank {} copies the parts {}, and this rank has {}", source, theirs, own);
      for (std::size_t i = 0; i < parts.size() && gives; ++i) {
        states[i] = whole_state(parts[i].save(nullptr), parts[i].name);
        descriptions[i] = description_of(states[i]);
      }
    } catch (const InvalidArgument&) {
      failure = std::current_exception();
    }
    throw_on_all(failure, *ranks, "could not copy the parts");
    // All parts or none: nothing communicates while they are loaded.
    for (std::size_t i = 0; i < parts.size(); ++i) broadcast_state(states[i], descriptions[i], source, *ranks);
    try {
      for (std::size_t i = 0; i < parts.size() && !gives; ++i) {
        parts[i].load(SavedPart(states[i]), {}, divided);
        states[i] = {};
      }
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    throw_on_all(failure, *ranks, format_text("could not take over the parts of rank {}", source));
  }

  /// A failure on any rank is an error on all: otherwise the others would wait for it in their next collective.
  static void throw_on_all(const std::exception_ptr& failure, ProcessGroup& ranks, const std::string& what) {
    std::int64_t first_failed = failure ? ranks.rank() : ranks.size();
    ranks.all_reduce(buffer_of(first_failed), ReduceOp::min, {}, public_place());
    if (failure) std::rethrow_exception(failure);
    if (first_failed == ranks.size()) return;
    throw_failed_on<ProtocolError>(ranks, static_cast<int>(first_failed),
                                   format_text("rank {} {}; its own error says why", first_failed, what));
  }

  std::optional<std::int64_t> load(const LoadOptions& load) {
    require_folder("Checkpoint::load");
    wait();
    const auto ranks = group();
    if (!ranks || ranks->size() == 1) {
      const std::int64_t step = choose_checkpoint(options.folder, load);
      if (step < 0) return std::nullopt;
      read(step, load, 0);
      return loaded = step;
    }
    // Rank 0 chooses, so that all ranks load the same step.
    constexpr std::int64_t kFailed = -2;
    std::int64_t step = kFailed;
    std::exception_ptr failure;
    if (options.sharded) {
      step = choose_checkpoint_together(options.folder, load, *ranks);  // throws on all ranks
    } else if (ranks->rank() == 0) {
      try {
        step = choose_checkpoint(options.folder, load);
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }
    if (!options.sharded) ranks->broadcast(buffer_of(step), 0, {}, public_place());
    if (step == -1) return std::nullopt;
    if (step >= 0) {
      try {
        read(step, load, ranks->rank());
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
    }
    throw_on_all(failure, *ranks, format_text("could not load the checkpoint from {}", options.folder));
    return loaded = step;
  }
};

Checkpoint::Checkpoint(CheckpointOptions options) : impl_(std::make_unique<Impl>()) {
  MANIPLE_REQUIRE(options.in_memory || !options.folder.empty(), "a checkpoint needs a folder");
  MANIPLE_REQUIRE(options.keep_last >= 1, "keep_last is {}; at least 1 checkpoint is kept", options.keep_last);
  if (options.group) options.group->require_member("Checkpoint");
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  if (!options.in_memory) require_directory(options.folder);
  impl_->options = std::move(options);
}

Checkpoint::~Checkpoint() {
  if (impl_->guard.owned()) {
    impl_->wait();
  } else {
    abandon(impl_);
  }
}

Checkpoint& Checkpoint::add(const std::string& name, torch::nn::Module& module) {
  const std::string shard = impl_->options.sharded ? "" : first_held_elsewhere(module, impl_->group().get());
  MANIPLE_REQUIRE(
      shard.empty(),
      "part \"{}\" of a checkpoint: {} is divided over the ranks, and one rank cannot save the others' shards; set "
      "CheckpointOptions::sharded",
      name, shard);
  impl_->add(module_part(name, module));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::jit::Module& module) {
  impl_->add(module_part(name, module));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer) {
  auto* const divided = dynamic_cast<ShardedOptimizerBase*>(&optimizer);
  impl_->add(divided != nullptr && impl_->options.sharded ? sharded_optimizer_part(name, *divided)
                                                          : optimizer_part(name, optimizer));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::LRScheduler& scheduler) {
  impl_->add(scheduler_part(name, scheduler));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, GradScaler& scaler) {
  return add(
      name, [&scaler] { return scaler.state_dict(); },
      [&scaler](const std::string& text) { scaler.load_state_dict(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, DistributedSampler sampler) {
  return add(
      name, [sampler] { return sampler.cursor_text(); },
      [sampler](const std::string& text) mutable { sampler.load_cursor(text); });
}

Checkpoint& Checkpoint::add(const std::string& name, torch::Tensor& tensor) {
  impl_->add(tensor_part(name, tensor));
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
  impl_->add(text_part(name, std::move(save), std::move(load)));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::function<ShardedState()> save,
                            std::function<void(const SavedPart&)> load) {
  const auto ranks = impl_->group();
  MANIPLE_REQUIRE(impl_->options.sharded || !ranks || ranks->size() == 1,
                  "part \"{}\" of a checkpoint is divided over {} ranks; set CheckpointOptions::sharded", name,
                  ranks->size());
  impl_->add({name,
              [save = std::move(save)](const Layouts*) {
                ShardedState held = save();
                PartState state;
                state.texts = std::move(held.texts);
                state.kind = PartState::Texts::united;
                for (TensorShard& shard : held.tensors) state.tensors.push_back({std::move(shard)});
                return state;
              },
              [load = std::move(load)](const SavedPart& saved, const LoadOptions&, const Layouts&) { load(saved); }});
  return *this;
}

void Checkpoint::save(std::int64_t step, const SourceLocation& where) {
  const PublicCall call(kSave, where);
  impl_->save(step);
}
std::optional<std::int64_t> Checkpoint::load(const LoadOptions& options, const SourceLocation& where) {
  const PublicCall call("Checkpoint::load, which all ranks call", where);
  return impl_->load(options);
}
void Checkpoint::copy_from(int source, const SourceLocation& where) {
  const PublicCall call("Checkpoint::copy_from, which all ranks call", where);
  impl_->copy_from(source);
}
void Checkpoint::use_group(std::shared_ptr<ProcessGroup> group) {
  if (group) group->require_member("Checkpoint::use_group");
  impl_->wait();
  impl_->options.group = std::move(group);
}
void Checkpoint::wait() { impl_->wait(); }

std::string Checkpoint::last_error() const {
  const MutexLock lock(impl_->mutex);
  return impl_->error;
}

std::string Checkpoint::last_pruned() const {
  const MutexLock lock(impl_->mutex);
  return impl_->pruned;
}

}  // namespace maniple
