// What DataLoader is made of apart from its templates: which samples make up each batch, and the threads that fetch
// them. Only LoaderOptions and DataError are for users.
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
  std::size_t workers = 0;   ///< threads that fetch; 0: the loop itself
  std::size_t prefetch = 2;  ///< batches for each worker that are held or being made
  bool drop_last = false;    ///< leave out the last batch of a pass when it is smaller than the others
  bool pin_memory =
      false;  ///< batches in page-locked memory, from which copies to a GPU are faster; ignored without CUDA
  std::uint64_t seed = 0;  ///< of SampleRandom, and of the sampler that the loader makes
  bool shuffle = true;     ///< of the sampler that the loader makes; streams have options of their own
  SamplerMode mode = SamplerMode::training;  ///< of that sampler; evaluation: every sample once, over all ranks
};

/// A dataset, a decode or a collate function threw: the text names the sample and quotes the error.
/// std::rethrow_if_nested(error) throws the original.
struct DataError : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

namespace detail {

/// The samples of one batch.
struct BatchTask {
  std::vector<std::size_t> indices = {};  ///< of a dataset with get()
  std::vector<RawSample> raw = {};        ///< of a stream
  std::size_t epoch = 0;

  std::size_t size() const noexcept { return indices.empty() ? raw.size() : indices.size(); }
  std::uint64_t number(std::size_t i) const;  ///< that identifies the sample, for its random numbers
  std::string name(std::size_t i) const;      ///< of the sample, for errors
};

/// Thrown by a worker that is to end; nobody sees it.
struct StoppedEarly : std::exception {};

/// In a catch block: throws a DataError with what is caught inside.
[[noreturn]] void rethrow_as_data_error(const std::string& name);

/// Which samples make up each batch of this rank, and how far the loop is. Belongs to the loop's thread, but for next()
/// of streams.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual void begin() = 0;                     ///< a pass
  virtual std::optional<BatchTask> next() = 0;  ///< nothing: the pass has no more
  virtual bool is_slow() const noexcept = 0;    ///< next() reads files, so it has a thread of its own
  virtual void taken() = 0;                     ///< the loop has one more batch
  virtual void ended() = 0;                     ///< the loop has come to its end
  virtual void failed() = 0;                    ///< the next batch could not be made; the next pass begins with it
  virtual void set_epoch(std::size_t epoch) = 0;
  virtual std::size_t epoch() const = 0;
  virtual std::size_t batches() const = 0;  ///< 0: not known
  virtual std::string cursor_text() const = 0;
  virtual void load_cursor(const std::string& text) = 0;
};

std::shared_ptr<BatchSource> sampled_batches(DistributedSampler sampler, std::size_t size,
                                             const LoaderOptions& options);
std::shared_ptr<BatchSource> sampled_batches(std::size_t size, const LoaderOptions& options);
std::shared_ptr<BatchSource> stream_batches(std::shared_ptr<const ShardSet> shards, const LoaderOptions& options);

/// Page-locks tensors, on the CUDA device that was current where this was made.
class MemoryPinning {
 public:
  explicit MemoryPinning(bool asked);
  bool wanted() const noexcept { return device_.has_value(); }
  std::vector<torch::Tensor> pinned(std::vector<torch::Tensor> tensors) const;

 private:
  std::optional<torch::Device> device_;
};

/// Threads that make batches; they come out in the order of their tasks. For one pass.
class BatchThreads {
 public:
  using Make = std::function<std::shared_ptr<void>(std::size_t worker, BatchTask& task, const std::atomic<bool>& stop)>;
  BatchThreads(const LoaderOptions& options, std::shared_ptr<BatchSource> source, Make make);
  ~BatchThreads();
  /// The next batch, waiting for it if need be; null after the last. Throws what making it has thrown.
  std::shared_ptr<void> next();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail
}  // namespace maniple
