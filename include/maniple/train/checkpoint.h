// Checkpoints hold everything that a training run needs to resume as if it had not been interrupted.
//
//   maniple::Checkpoint checkpoint({.folder = "runs/7", .keep_last = 3});
//   checkpoint.add("model", *net).add("optimizer", optimizer).add("scheduler", scheduler).add("sampler", sampler);
//   std::int64_t step = checkpoint.load().value_or(0);     // the newest complete one; none: nothing changes
//   for (; step < steps; ++step) {
//     ...
//     if ((step + 1) % 100 == 0) checkpoint.save(step + 1);  // finished steps; written in the background
//   }
//
// Contents        Everything that was added, and the state of every rank's random generators: of the CPU, and of the
//                 GPUs visible to the rank. In a group save() and load() are collectives: every rank calls them. In a
//                 data-parallel job the added parts are the same on all ranks, so rank 0 writes them. Every rank reads
//                 them, from a folder visible to all ranks.
// Files           FOLDER/step-000000000120/ holds one safetensors file for each part (readable by other tools) and
//                 manifest.json with file lengths and SHA-256. The files contain no executable code.
// Atomic          A checkpoint is written under another name, synced, and renamed. After a kill at any moment the
//                 newest complete checkpoint loads. Damaged files (truncated, changed, missing, hostile) are detected
//                 and named, and the previous checkpoint is used.
// Retention       The newest `keep_last` complete checkpoints are kept, and always the one just saved; older ones are
//                 removed. Checkpoints newer than the one that the run resumed from (because they are damaged, or
//                 LoadOptions::step chose an older one) belong to another run: the first save renames them to
//                 aside-step-..., which is never loaded and never removed. last_pruned() reports each action and its
//                 reason.
// Disk full       The previous checkpoint stays intact, training continues, a warning is logged, and last_error()
//                 returns the cause. The next save tries again.
// Resharding      Another number of ranks may load a checkpoint: neither the parts nor a sampler's cursor depend on the
//                 number of ranks. The rest of the epoch is divided anew. Ranks that existed before restore their
//                 random state; new ranks keep theirs.
// Exact           10 steps in one run equal 5 steps, save, new processes, load, 5 steps: bit for bit.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/amp.h>
#include <maniple/train/sampler.h>
#include <maniple/train/sharded_checkpoint.h>

namespace MANIPLE_API maniple {

struct CheckpointOptions {
  std::string folder = {};  ///< created if missing; it is an error if it exists and is not a directory
  bool in_memory = false;   ///< without a folder: only copy_from() can be used
  int keep_last = 3;        ///< older ones are removed after each save; at least 1. Damaged ones do not count
  bool background = true;   ///< false: save() returns when the checkpoint is on the disk
  /// Every rank writes its own part, instead of rank 0 writing everything: see sharded_checkpoint.h. A checkpoint loads
  /// with either setting, except into modules divided over the ranks, which need `sharded`.
  bool sharded = false;
  /// The ranks that save and load together. Null: the default group; without one, this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

struct LoadOptions {
  std::optional<std::int64_t> step = {};  ///< load exactly this step; default: the newest complete checkpoint
  std::optional<torch::Device> map_location =
      {};              ///< device of tensors that were added as plain tensors; default: their current device
  bool strict = true;  ///< false: parameters missing from the file, or only in the file, are skipped with a warning
};

class Checkpoint {
 public:
  explicit Checkpoint(CheckpointOptions options);
  ~Checkpoint();  ///< waits for a save in progress
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // ---- Contents. Added objects must outlive this one. Names are file names: letters, digits, "_", "-", ".". ----
  Checkpoint& add(const std::string& name, torch::nn::Module& module);   ///< parameters and buffers
  Checkpoint& add(const std::string& name, torch::jit::Module& module);  ///< the same for a scripted model
  /// SGD, Adam, AdamW, RMSprop, Adagrad, and the optimizers of optim.h: options of each group, state of each parameter.
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer);
  Checkpoint& add(const std::string& name, torch::optim::LRScheduler& scheduler);
  Checkpoint& add(const std::string& name, GradScaler& scaler);
  /// The position in the epoch; see "in the middle of an epoch" in sampler.h. Copies of a sampler share their state.
  Checkpoint& add(const std::string& name, DistributedSampler sampler);
  /// The same for a DataLoader, or any object with cursor_text() and load_cursor().
  template <class Loader>
    requires requires(Loader& loader, const std::string& text) {
      loader.cursor_text();
      loader.load_cursor(text);
    }
  Checkpoint& add(const std::string& name, Loader& loader) {
    return add(
        name, [&loader] { return loader.cursor_text(); },
        [&loader](const std::string& text) { loader.load_cursor(text); });
  }
  Checkpoint& add(const std::string& name, torch::Tensor& tensor);
  Checkpoint& add(const std::string& name, std::int64_t& number);
  Checkpoint& add(const std::string& name, double& number);
  Checkpoint& add(const std::string& name, std::string& text);
  /// Anything with `std::string state_dict() const` and `load_state_dict(const std::string&)`: LrScheduler,
  /// EarlyStopping.
  template <class T>
    requires requires(T& part, const std::string& text) {
      { part.state_dict() } -> std::convertible_to<std::string>;
      part.load_state_dict(text);
    }
  Checkpoint& add(const std::string& name, T& part) {
    return add(
        name, [&part] { return part.state_dict(); }, [&part](const std::string& text) { part.load_state_dict(text); });
  }
  /// Anything that can be saved as text.
  Checkpoint& add(const std::string& name, std::function<std::string()> save,
                  std::function<void(const std::string&)> load);
  /// Anything that is divided over the ranks; see sharded_checkpoint.h.
  Checkpoint& add(const std::string& name, std::function<ShardedState()> save,
                  std::function<void(const SavedPart&)> load);
  /// Anything that describes its parts as ShardOf and re-creates them before they are read. A sharded optimizer is
  /// added like any other optimizer; without `sharded` its state is gathered on rank 0.
  template <class T>
    requires(!std::derived_from<T, torch::optim::Optimizer>) &&
            requires(T& part, const std::map<std::string, std::string>& texts, const std::set<std::string>& names) {
              { part.shards() } -> std::convertible_to<std::vector<ShardOf>>;
              { part.state_texts() } -> std::convertible_to<std::map<std::string, std::string>>;
              { part.begin_load(texts, names) } -> std::convertible_to<std::vector<ShardOf>>;
            }
  Checkpoint& add(const std::string& name, T& part) {
    return add_shards(name, part);
  }

  /// Copies everything, and writes it. Waits for an earlier save that is still being written. Throws for invalid
  /// arguments (a negative step) and lost ranks, but not for a disk that is full or not writable: see last_error().
  void save(std::int64_t step, const SourceLocation& where = SourceLocation::current());

  /// Returns the step of the loaded checkpoint; nullopt if the folder holds no checkpoint. Throws if there are
  /// checkpoints but none is usable, naming the file and the defect of each, or if the saved parts do not fit the added
  /// ones.
  std::optional<std::int64_t> load(const LoadOptions& options = {},
                                   const SourceLocation& where = SourceLocation::current());

  /// In memory, without files: all ranks get the parts that rank `source` of the group has. Collective. For parts that
  /// are alike on all ranks; throws Unsupported with `sharded`. If the parts do not fit on one rank, all ranks throw.
  void copy_from(int source, const SourceLocation& where = SourceLocation::current());

  /// The ranks that save and load together from now on, as in CheckpointOptions. Waits for a save in progress.
  void use_group(std::shared_ptr<ProcessGroup> group);

  /// Waits until nothing is being written.
  void wait();
  /// Why the latest save failed; empty if it succeeded or is still being written.
  std::string last_error() const;
  /// What the latest save did with other checkpoints, and why, one line for each: "step-000000000100 was removed: ...",
  /// "step-000000000300 was set aside as aside-step-000000000300: ...". Only on the rank that writes, rank 0.
  std::string last_pruned() const;

 private:
  template <class T>
  Checkpoint& add_shards(const std::string& name, T& part) {
    return add(
        name,
        [&part] {
          ShardedState state{.texts = part.state_texts()};
          for (const ShardOf& shard : part.shards()) state.tensors.push_back(TensorShard::flat(shard));
          return state;
        },
        [&part](const SavedPart& saved) {
          std::set<std::string> names;
          for (const auto& entry : saved.tensors()) names.insert(entry.first);
          for (const ShardOf& shard : part.begin_load(saved.texts(), names)) saved.read(shard);
        });
  }

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
