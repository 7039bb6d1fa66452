// The parts of DataLoader that are not templates: the assignment of samples to batches, and the fetching threads. Only
// LoaderOptions and DataError are for users.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/sampler.h>
#include <maniple/train/streaming.h>

namespace MANIPLE_API maniple {

struct LoaderOptions {
  std::size_t batch_size = 1;
  std::size_t workers = 0;   ///< threads that fetch; 0: the loop itself fetches
  std::size_t prefetch = 2;  ///< batches per worker that are ready or in progress
  bool drop_last = false;    ///< leave out the last batch of a pass if it is smaller than the others
  bool pin_memory = false;   ///< put batches in page-locked memory, for faster copies to a GPU; ignored without CUDA
  std::uint64_t seed = 0;    ///< seed of SampleRandom and of the loader's own sampler
  bool shuffle = true;       ///< for the loader's own sampler; streams have options of their own
  SamplerMode mode = SamplerMode::training;  ///< same; evaluation: every sample once, over all ranks
};

/// Thrown when a dataset, a decode function or a collate function has thrown. The text names the sample and quotes the
/// error; std::rethrow_if_nested(error) throws the original.
struct DataError : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

namespace detail {

/// The samples of one batch.
struct BatchTask {
  std::vector<std::size_t> indices = {};  ///< for a dataset with get()
  std::vector<RawSample> raw = {};        ///< for a stream
  std::size_t epoch = 0;

  std::size_t size() const noexcept { return indices.empty() ? raw.size() : indices.size(); }
  std::uint64_t number(std::size_t i) const;  ///< identifies the sample, for its random numbers
  std::string name(std::size_t i) const;      ///< names the sample, for errors
};

/// Thrown in a worker that must stop; caught internally.
struct StoppedEarly : std::exception {};

/// Call it in a catch block: throws a DataError with the current exception nested.
[[noreturn]] void rethrow_as_data_error(const std::string& name);

/// Assigns samples to this rank's batches and tracks the position of the loop. Used by the loop's thread only, except
/// for next() of streams.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual void begin() = 0;                     ///< begins a pass
  virtual std::optional<BatchTask> next() = 0;  ///< nothing at the end of the pass
  virtual bool is_slow() const noexcept = 0;    ///< true if next() reads files and therefore runs in its own thread
  virtual void taken() = 0;                     ///< the loop has received one more batch
  virtual void ended() = 0;                     ///< the loop has finished
  virtual void failed() = 0;                    ///< making the next batch failed; the next pass begins with it
  virtual void set_epoch(std::size_t epoch) = 0;
  virtual std::size_t epoch() const = 0;
  virtual std::size_t batches() const = 0;  ///< 0: unknown
  virtual std::string cursor_text() const = 0;
  virtual void load_cursor(const std::string& text) = 0;
  virtual void divide(const VirtualRanks& ranks) = 0;  ///< see DistributedSampler::divide
};

std::shared_ptr<BatchSource> sampled_batches(DistributedSampler sampler, std::size_t size,
                                             const LoaderOptions& options);
std::shared_ptr<BatchSource> sampled_batches(std::size_t size, const LoaderOptions& options);
std::shared_ptr<BatchSource> stream_batches(std::shared_ptr<const ShardSet> shards, const LoaderOptions& options);

/// Page-locks tensors, on the CUDA device that was current at construction.
class MemoryPinning {
 public:
  explicit MemoryPinning(bool asked);
  bool wanted() const noexcept { return device_.has_value(); }
  std::vector<torch::Tensor> pinned(std::vector<torch::Tensor> tensors) const;

 private:
  std::optional<torch::Device> device_;
};

/// Threads that make batches and deliver them in task order; for one pass.
class BatchThreads {
 public:
  using Make = std::function<std::shared_ptr<void>(std::size_t worker, BatchTask& task, const std::atomic<bool>& stop)>;
  BatchThreads(const LoaderOptions& options, std::shared_ptr<BatchSource> source, Make make);
  ~BatchThreads();
  /// Waits for the next batch and returns it; null after the last. Rethrows errors from making it.
  std::shared_ptr<void> next();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail
}  // namespace maniple
