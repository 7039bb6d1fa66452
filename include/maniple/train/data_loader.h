// Batches of a dataset, fetched ahead of the loop by worker threads.
//
//   maniple::DataLoader loader(digits, {.batch_size = 64, .workers = 4, .seed = 7});
//   checkpoint.add("model", *net).add("loader", loader);
//   auto step = checkpoint.load().value_or(0);
//   for (std::size_t epoch = loader.epoch(); epoch < epochs; ++epoch) {
//     loader.set_epoch(epoch);                                 // a new order in every epoch, the same on all ranks
//     for (auto& batch : loader) {                             // batch.data, batch.target
//       ...
//       if (++step % 100 == 0) checkpoint.save(step);
//     }
//     checkpoint.save(step);                                   // after the loop: a restart begins with the next epoch
//   }
//
// Dataset     An object with `get(index)` and `size()`: a class of your own or a torch::data dataset; or with
//             `get_batch(indices)`, such as the result of torch's map(); or a ShardStream (streaming.h). get() may take
//             a second parameter, SampleRandom&.
// Ranks       A DistributedSampler divides the samples over the ranks: the given one, or one that the loader makes for
//             the default group (without a group, for this process alone). Every rank gets the same number of samples;
//             with SamplerMode::evaluation every sample is used once. Streams divide their shards themselves.
// Threads     Each of `workers` threads fetches whole batches, and the loop receives the batches in order. At most
//             workers * prefetch batches are ready or in progress. With 0 workers the loop itself fetches. Streams use
//             one more thread, which reads the files. Workers share a dataset whose get() is const; otherwise each
//             worker has a copy, as in torch::data. Workers compute with one intra-op thread each.
// Collating   A function makes a batch from samples. The default stacks them: tensors get a new first dimension,
//             numbers become a 1-D tensor; Example, tuples, pairs, arrays, vectors (of equal lengths) and maps are
//             collated member by member; anything else becomes a std::vector.
// Cursor      Counts the batches that the loop has received, not the batches fetched ahead. The rules of sampler.h
//             for resuming in the middle of an epoch apply. A restart may use another number of ranks and another batch
//             size (streams: the same number of ranks).
// Errors      An exception from get(), the decode function or the collate function reaches the loop as a DataError, at
//             the batch concerned. Its text names the sample and quotes the error; std::rethrow_if_nested throws the
//             original. The loader stays usable: the next loop resumes with the batch that failed, or at the position
//             given by set_epoch() or load_cursor().
//
// Threads: a loader belongs to one thread. It may be destroyed at any time; the destructor waits for running calls of
// get().
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/batch_source.h>
#include <maniple/train/collate.h>
#include <maniple/train/sample_random.h>
#include <maniple/train/sampler.h>
#include <maniple/train/streaming.h>

namespace MANIPLE_API maniple {

namespace detail {

template <class Dataset>
concept StreamDataset = requires(const Dataset& dataset, RawSample& raw, SampleRandom& random) {
  dataset.decode(raw, random);
  { dataset.shards() } -> std::convertible_to<std::shared_ptr<const ShardSet>>;
};
template <class Dataset>
concept GetsWithRandom = requires(Dataset& dataset, SampleRandom& random) { dataset.get(std::size_t{0}, random); };
template <class Dataset>
concept Gets = GetsWithRandom<Dataset> || requires(Dataset& dataset) { dataset.get(std::size_t{0}); };
template <class Dataset>
concept GetsBatches =
    requires(Dataset& dataset, const std::vector<std::size_t>& indices) { dataset.get_batch(indices); };

template <Gets Dataset>
decltype(auto) get_sample(Dataset& dataset, std::size_t index, [[maybe_unused]] SampleRandom& random) {
  if constexpr (GetsWithRandom<Dataset>) {
    return dataset.get(index, random);
  } else {
    return dataset.get(index);
  }
}

template <class Size>
std::size_t known_size(const Size& size) {
  if constexpr (std::is_convertible_v<Size, std::size_t>) {
    return static_cast<std::size_t>(size);
  } else {
    if (!size)
      throw InvalidArgument(
          "DataLoader: the dataset does not know its size; make it a ShardStream to read it as a stream");
    return *size;
  }
}

/// Makes the batch of a task; runs in a worker. The workers of a loader share one BatchMaker.
template <class Dataset, class Collate>
class BatchMaker {
 public:
  static constexpr bool kStreams = StreamDataset<Dataset>;
  static constexpr bool kShared = kStreams || Gets<const Dataset>;
  static_assert(
      kStreams || Gets<Dataset> || GetsBatches<Dataset>,
      "a dataset has get(index), or get(index, SampleRandom&), or get_batch(indices); or it is a ShardStream");

  BatchMaker(Dataset dataset, Collate collate, const LoaderOptions& options)
      : collate_(std::move(collate)), seed_(options.seed), pin_(options.pin_memory) {
    datasets_.reserve(1 + options.workers);
    datasets_.push_back(std::move(dataset));
    if constexpr (!kShared && std::copy_constructible<Dataset>) {
      for (std::size_t i = 1; i < options.workers; ++i) datasets_.push_back(datasets_.front());
    } else if (!kShared && options.workers > 1) {
      throw InvalidArgument(
          "DataLoader: the dataset cannot be copied, and its get() is not const, so several workers cannot use it; "
          "make "
          "get() const if threads may call it together, or take one worker");
    }
  }

  auto make(std::size_t worker, BatchTask& task, [[maybe_unused]] const std::atomic<bool>& stop) {
    Dataset& dataset = datasets_[kShared ? 0 : worker];
    if constexpr (kStreams || Gets<Dataset>) {
      std::vector<decltype(sample(dataset, task, 0))> samples;
      samples.reserve(task.size());
      for (std::size_t i = 0; i < task.size(); ++i) {
        if (stop) throw StoppedEarly();
        try {
          samples.push_back(sample(dataset, task, i));
        } catch (...) {
          rethrow_as_data_error(task.name(i));
        }
      }
      try {
        return pinned(collate_(std::move(samples)));
      } catch (...) {
        rethrow_as_data_error("the batch that begins with " + task.name(0));
      }
    } else {
      try {
        return pinned(dataset.get_batch(task.indices));
      } catch (...) {
        rethrow_as_data_error("the batch that begins with " + task.name(0));
      }
    }
  }

  Dataset& dataset() { return datasets_.front(); }

 private:
  auto sample(Dataset& dataset, BatchTask& task, std::size_t i) {
    SampleRandom random(seed_, task.epoch, task.number(i));
    if constexpr (kStreams) {
      return dataset.decode(task.raw[i], random);
    } else if constexpr (Gets<const Dataset>) {
      return get_sample(std::as_const(dataset), task.indices[i], random);
    } else {
      return get_sample(dataset, task.indices[i], random);
    }
  }
  template <class Batch>
  Batch pinned(Batch batch) {
    if (!pin_.wanted()) return batch;
    return with_tensors(batch, pin_.pinned(tensors_in(batch)));
  }

  std::vector<Dataset> datasets_;  ///< one, or one per worker
  Collate collate_;
  std::uint64_t seed_;
  MemoryPinning pin_;
};

}  // namespace detail

template <class Dataset, class Collate = StackCollate>
class DataLoader {
  using Maker = detail::BatchMaker<Dataset, Collate>;

 public:
  using Batch =
      decltype(std::declval<Maker&>().make(0, std::declval<detail::BatchTask&>(), std::declval<std::atomic<bool>&>()));

  explicit DataLoader(Dataset dataset, const LoaderOptions& options = {}, Collate collate = {})
      : maker_(std::make_shared<Maker>(std::move(dataset), std::move(collate), options)), options_(options) {
    if constexpr (Maker::kStreams) {
      source_ = detail::stream_batches(maker_->dataset().shards(), options);
    } else {
      source_ = detail::sampled_batches(detail::known_size(maker_->dataset().size()), options);
    }
  }
  DataLoader(Dataset dataset, DistributedSampler sampler, const LoaderOptions& options = {}, Collate collate = {})
    requires(!Maker::kStreams)
      : maker_(std::make_shared<Maker>(std::move(dataset), std::move(collate), options)), options_(options) {
    source_ = detail::sampled_batches(std::move(sampler), detail::known_size(maker_->dataset().size()), options);
  }

  /// Iterates over the current pass; a loader has one pass at a time.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;
    explicit Iterator(DataLoader* loader) : loader_(loader) {}
    Batch& operator*() const { return *loader_->current_; }
    Batch* operator->() const { return &*loader_->current_; }
    Iterator& operator++() {
      loader_->advance();
      return *this;
    }
    void operator++(int) { loader_->advance(); }
    bool operator==(std::default_sentinel_t) const { return !loader_->current_.has_value(); }

   private:
    DataLoader* loader_;
  };

  /// Begins a pass over the epoch, or over its remainder after load_cursor().
  Iterator begin() {
    stop();
    source_->begin();
    threads_ = std::make_unique<detail::BatchThreads>(
        options_, source_,
        [maker = maker_](std::size_t worker, detail::BatchTask& task, const std::atomic<bool>& stop) {
          return std::static_pointer_cast<void>(std::make_shared<Batch>(maker->make(worker, task, stop)));
        });
    advance();
    return Iterator(this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// Call it before each pass, with the same number on all ranks; otherwise every epoch has the same order.
  void set_epoch(std::size_t epoch) {
    if (epoch != source_->epoch()) stop();
    source_->set_epoch(epoch);
  }
  std::size_t epoch() const { return source_->epoch(); }
  /// Batches that this rank takes in the current or next pass, for Progress. 0: unknown (streams).
  std::size_t batches() const { return source_->batches(); }

  /// The position in the training, as text; Checkpoint::add saves it.
  std::string cursor_text() const { return source_->cursor_text(); }
  /// The next pass begins at that position. Throws InvalidArgument if the text was saved with other data.
  void load_cursor(const std::string& text) {
    stop();
    source_->load_cursor(text);
  }
  /// See DistributedSampler::divide. Throws InvalidArgument for streams.
  void divide(const VirtualRanks& ranks) {
    stop();
    source_->divide(ranks);
  }

 private:
  void stop() {
    threads_.reset();
    current_.reset();
  }
  void advance() {
    current_.reset();
    if (threads_ == nullptr) return;
    std::shared_ptr<void> next;
    try {
      next = threads_->next();
    } catch (...) {
      threads_.reset();
      source_->failed();
      throw;
    }
    if (next == nullptr) {
      threads_.reset();
      source_->ended();
      return;
    }
    source_->taken();
    current_.emplace(std::move(*static_cast<Batch*>(next.get())));
  }

  std::shared_ptr<Maker> maker_;
  LoaderOptions options_;
  std::shared_ptr<detail::BatchSource> source_;
  std::optional<Batch> current_;
  std::unique_ptr<detail::BatchThreads> threads_;  ///< declared last: its threads use the other members
};

/// A dataset whose samples pass through a function of the sample, or of the sample and a SampleRandom&.
template <class Dataset, class Transform>
class TransformedDataset {
 public:
  TransformedDataset(Dataset dataset, Transform transform)
      : dataset_(std::move(dataset)), transform_(std::move(transform)) {}

  auto get(std::size_t index, SampleRandom& random) { return through(dataset_, index, random); }
  auto get(std::size_t index, SampleRandom& random) const
    requires detail::Gets<const Dataset>
  {
    return through(dataset_, index, random);
  }
  auto size() const { return dataset_.size(); }

 private:
  template <class Any>
  auto through(Any& dataset, std::size_t index, SampleRandom& random) const {
    auto sample = detail::get_sample(dataset, index, random);
    if constexpr (std::invocable<const Transform&, decltype(sample), SampleRandom&>) {
      return transform_(std::move(sample), random);
    } else {
      return transform_(std::move(sample));
    }
  }

  Dataset dataset_;
  Transform transform_;
};

template <class Dataset, class Transform>
TransformedDataset<Dataset, Transform> transformed(Dataset dataset, Transform transform) {
  return {std::move(dataset), std::move(transform)};
}

}  // namespace maniple
