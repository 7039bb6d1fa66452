// Checkpoints: everything a training run needs to go on as if nothing had happened.
//
//   maniple::Checkpoint checkpoint({.folder = "runs/7", .keep_last = 3});
//   checkpoint.add("model", *net).add("optimizer", optimizer).add("scheduler", scheduler).add("sampler", sampler);
//   std::int64_t step = checkpoint.load().value_or(0);     // the newest whole one; none yet: nothing is changed
//   for (; step < steps; ++step) {
//     ...
//     if ((step + 1) % 100 == 0) checkpoint.save(step + 1);  // how many are done; returns at once, written in the
//                                                            // background
//   }
//
// What is saved   Whatever was added, and the state of every rank's random generators: of the CPU, and of the GPUs that
//                 it sees. In a group save() and load() are collectives: every rank calls them. The parts are the same
//                 on all ranks of a data-parallel job, so rank 0 writes; every rank reads, from a folder that all of
//                 them see.
// Files           FOLDER/step-000000000120/ holds one safetensors file for each part (other tools read them) and
//                 manifest.json with their lengths and SHA-256. Nothing in them can execute.
// Never half      A checkpoint is written under another name, synced, and renamed: killed at any moment, the newest
//                 complete one loads. Damaged files (truncated, changed, missing, hostile) are detected and named, and
//                 the one before is used.
// Which are kept  The newest keep_last that are whole, and always the one just saved; older ones are removed. Those
// that are newer than
//                 the one a run went on from (they are damaged, or LoadOptions::step went back) are not of this run:
//                 its first save renames them to aside-step-..., which nothing loads and nothing removes. last_pruned()
//                 says what was done and why.
// Disk full       The previous checkpoint stays as it is, training goes on, a warning says so; last_error() keeps it.
//                 The next save tries again.
// Another number  of ranks may load it: parts do not depend on it, a sampler's cursor neither: the rest of the epoch is
// divided
//                 anew. Ranks that were there get their random state back; new ones keep theirs.
// Exact           10 steps in one go equal 5 steps, save, new processes, load, 5 steps: bit for bit.
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
  std::string folder = {};  ///< made if need be; something else than a directory is an error
  int keep_last = 3;        ///< older ones are removed after each save; at least 1. Damaged ones do not count
  bool background = true;   ///< false: save() returns when the checkpoint is on the disk
  /// Every rank writes what it holds, instead of rank 0 everything: see sharded_checkpoint.h. Loading does not depend
  /// on it, but for modules that are divided over the ranks, which need it.
  bool sharded = false;
  /// Whose ranks save and load together. Null: the default group if there is one, otherwise this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

struct LoadOptions {
  std::optional<std::int64_t> step = {};  ///< this one and no other; otherwise the newest that is whole
  std::optional<torch::Device> map_location =
      {};              ///< where tensors are put that were added as plain tensors; default: where they are now
  bool strict = true;  ///< false: parameters the file has not, or has too many, are left alone (with a warning)
};

class Checkpoint {
 public:
  explicit Checkpoint(CheckpointOptions options);
  ~Checkpoint();  ///< waits for a save under way
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // ---- What belongs to it. All of it must outlive this object. Names are file names: letters, digits, "_", "-", ".".
  // ----
  Checkpoint& add(const std::string& name, torch::nn::Module& module);   ///< parameters and buffers
  Checkpoint& add(const std::string& name, torch::jit::Module& module);  ///< of a scripted model, the same
  /// SGD, Adam, AdamW, RMSprop, Adagrad, and those of optim.h: options of every group, state of every parameter.
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer);
  Checkpoint& add(const std::string& name, torch::optim::LRScheduler& scheduler);
  Checkpoint& add(const std::string& name, GradScaler& scaler);
  /// Where training is in its epoch; see "in the middle of an epoch" in sampler.h. (A copy of a sampler is the same
  /// sampler.)
  Checkpoint& add(const std::string& name, DistributedSampler sampler);
  /// The same of a DataLoader, or of anything else with a cursor_text() and a load_cursor().
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
  /// Anything that can be written as text.
  Checkpoint& add(const std::string& name, std::function<std::string()> save,
                  std::function<void(const std::string&)> load);
  /// Anything that is divided over the ranks; see sharded_checkpoint.h.
  Checkpoint& add(const std::string& name, std::function<ShardedState()> save,
                  std::function<void(const SavedPart&)> load);
  /// Anything that describes its parts as ShardOf and makes them anew before they are read. A sharded optimizer is
  /// added as any other optimizer; without `sharded` its state is gathered on rank 0.
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

  /// Takes a copy of everything, and writes it. Waits for an earlier save that is still being written. Throws for
  /// mistakes (a negative step) and lost ranks, not for a disk that is full or not writable: see last_error().
  void save(std::int64_t step, const SourceLocation& where = SourceLocation::current());

  /// The step it was saved with; nullopt when the folder holds no checkpoint. Throws when there are some but none can
  /// be used, naming the file and what is wrong with each, or when what was saved does not fit what was added.
  std::optional<std::int64_t> load(const LoadOptions& options = {},
                                   const SourceLocation& where = SourceLocation::current());

  /// Returns when nothing is being written.
  void wait();
  /// Why the latest save failed; empty when it did not (or is still being written).
  std::string last_error() const;
  /// What the latest save did with other checkpoints, and why, a line for each: "step-000000000100 was removed: ...",
  /// "step-000000000300 was set aside as aside-step-000000000300: ...". On the rank that writes, rank 0.
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
