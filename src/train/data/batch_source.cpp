#include <maniple/train/batch_source.h>

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "comm/base/check.h"
#include "train/data/cursor_text.h"
#include "train/data/shard_pass.h"
#include "train/data/split_mix.h"
#include <maniple/dist.h>
#include <maniple/train/collate.h>
#include <maniple/train/sample_random.h>

namespace maniple {

SampleRandom::SampleRandom(std::uint64_t seed, std::size_t epoch, std::uint64_t index) noexcept
    : state_(mixed(mixed(mixed(seed + SplitMix::kStep) + epoch + 1) + index + 1)) {}

std::uint64_t SampleRandom::operator()() noexcept { return mixed(state_ += SplitMix::kStep); }
double SampleRandom::unit() noexcept { return static_cast<double>((*this)() >> 11) * 0x1p-53; }
std::uint64_t SampleRandom::below(std::uint64_t bound) noexcept {
  return bound == 0 ? 0 : SplitMix((*this)()).below(bound);
}
at::Generator SampleRandom::generator() { return at::detail::createCPUGenerator((*this)()); }

namespace detail {

torch::Tensor stacked(const std::vector<torch::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    MANIPLE_REQUIRE(tensors[i].defined(), "sample {} of the batch has a tensor that is not defined", i);
    MANIPLE_REQUIRE(
        tensors[i].sizes() == tensors[0].sizes(),
        "samples have tensors of different shapes, [{}] and [{}] (sample {} of the batch); give the loader a "
        "collate function",
        joined(tensors[0].sizes()), joined(tensors[i].sizes()), i);
  }
  return torch::stack(tensors);
}

std::uint64_t BatchTask::number(std::size_t i) const {
  if (!indices.empty()) return indices[i];
  return mixed(raw[i].shard_number + 1) + raw[i].number;
}

std::string BatchTask::name(std::size_t i) const {
  if (!indices.empty()) return format_text("index {}", indices[i]);
  return format_text("sample \"{}\" of {} (offset {})", one_line(raw[i].key), raw[i].shard, raw[i].offset);
}

void rethrow_as_data_error(const std::string& name) {
  const auto raise = [&](const std::string& text) {
    std::throw_with_nested(DataError(format_text("DataLoader: {}: {}", name, text)));
  };
  try {
    throw;
  } catch (const StoppedEarly&) {
    throw;
  } catch (const c10::Error& error) {
    raise(error.what_without_backtrace());
  } catch (const std::exception& error) {
    raise(error.what());
  } catch (...) {
    raise("an exception that is not a std::exception");
  }
  std::terminate();  // unreachable: raise() throws
}

namespace {

void check_options(const LoaderOptions& options) {
  MANIPLE_REQUIRE(options.batch_size > 0, "DataLoader: a batch size of 0");
  MANIPLE_REQUIRE(options.prefetch > 0, "DataLoader: a prefetch of 0; expected 1 or more batches for each worker");
  MANIPLE_REQUIRE(options.workers <= 4096, "DataLoader: {} workers; was a negative number converted?", options.workers);
}

class SampledBatches final : public BatchSource {
 public:
  SampledBatches(DistributedSampler sampler, std::size_t size, const LoaderOptions& options)
      : sampler_(std::move(sampler)), options_(options) {
    check_options(options);
    MANIPLE_REQUIRE(sampler_.dataset_size() == size,
                    "DataLoader: the dataset has {} samples, but its sampler was made for {}", size,
                    sampler_.dataset_size());
  }

  void begin() override {
    sampler_.reset();
    start_ = sampler_.cursor();
    left_ = batches();
    has_taken_ = false;
  }
  std::optional<BatchTask> next() override {
    if (left_ == 0) return std::nullopt;  // a further request would make the sampler end the epoch
    --left_;
    auto indices = sampler_.next(options_.batch_size);
    MANIPLE_ASSERT(indices);
    BatchTask task;
    task.indices = std::move(*indices);
    task.epoch = sampler_.epoch();
    return task;
  }
  bool is_slow() const noexcept override { return false; }
  void taken() override {
    sampler_.batch_done();
    has_taken_ = true;
  }
  void ended() override {
    while (sampler_.next(options_.batch_size)) sampler_.batch_done();  // a last, smaller batch that was dropped
  }
  void failed() override { sampler_.seek(has_taken_ ? sampler_.cursor() : start_); }
  void set_epoch(std::size_t epoch) override { sampler_.set_epoch(epoch); }
  std::size_t epoch() const override { return sampler_.epoch(); }
  std::size_t batches() const override { return sampler_.local_batches(options_.batch_size, options_.drop_last); }
  std::string cursor_text() const override { return sampler_.cursor_text(); }
  void load_cursor(const std::string& text) override { sampler_.load_cursor(text); }
  void divide(const VirtualRanks& ranks) override { sampler_.divide(ranks); }

 private:
  DistributedSampler sampler_;
  LoaderOptions options_;
  DistributedSampler::Cursor start_;
  std::size_t left_ = 0;
  bool has_taken_ = false;
};

class StreamBatches final : public BatchSource {
 public:
  StreamBatches(std::shared_ptr<const ShardSet> shards, const LoaderOptions& options)
      : shards_(std::move(shards)), options_(options) {
    check_options(options);
  }

  void begin() override {
    if (!std::exchange(stays_, false)) start_ = 0;
    taken_ = 0;
    over_ = false;
    pass_ = std::make_unique<ShardPass>(shards_, epoch_, start_);
  }
  std::optional<BatchTask> next() override {
    BatchTask task;
    task.epoch = epoch_;
    task.raw.resize(options_.batch_size);
    std::size_t count = 0;
    while (count < options_.batch_size && pass_->next(task.raw[count])) ++count;
    task.raw.resize(count);
    if (count == 0 || (count < options_.batch_size && options_.drop_last)) return std::nullopt;
    return task;
  }
  bool is_slow() const noexcept override { return true; }
  void taken() override { ++taken_; }
  void ended() override { over_ = true; }
  void failed() override { go_to(epoch_, place()); }
  void set_epoch(std::size_t epoch) override {
    if (epoch == epoch_) return;
    go_to(epoch, 0);
  }
  std::size_t epoch() const override { return epoch_; }
  std::size_t batches() const override {
    if (!shards_->knows_samples()) return 0;
    const std::size_t all = shards_->samples(epoch_);
    const std::size_t left = all - std::min(all, start_);
    return left / options_.batch_size + (left % options_.batch_size != 0 && !options_.drop_last ? 1 : 0);
  }

  std::string cursor_text() const override {
    const auto& options = shards_->options;
    return format_text("epoch {}, {} samples of each of {} ranks, {} shards, shuffle {}, buffer {}, seed {}",
                       over_ ? epoch_ + 1 : epoch_, over_ ? 0 : place(), options.num_replicas, shards_->paths.size(),
                       options.shuffle_shards ? 1 : 0, options.shuffle_buffer, options.seed);
  }
  void load_cursor(const std::string& text) override {
    std::string_view rest = text;
    std::uint64_t epoch = 0, samples = 0, ranks = 0, count = 0, shuffle = 0, buffer = 0, seed = 0;
    const bool whole = take_number(rest, "epoch ", epoch) && take_number(rest, ", ", samples) &&
                       take_number(rest, " samples of each of ", ranks) && take_number(rest, " ranks, ", count) &&
                       take_number(rest, " shards, shuffle ", shuffle) && take_number(rest, ", buffer ", buffer) &&
                       take_number(rest, ", seed ", seed) && rest.empty();
    MANIPLE_REQUIRE(
        whole,
        "DataLoader: \"{}\" is not a cursor of a stream; expected \"epoch 3, 512 samples of each of 4 ranks, 16 "
        "shards, shuffle 1, buffer 1000, seed 7\"",
        one_line(text.substr(0, 80)));
    const auto same = [&](const char* what, std::uint64_t there, std::uint64_t here) {
      MANIPLE_REQUIRE(
          samples == 0 || there == here,
          "DataLoader: the cursor of the stream was saved in the middle of epoch {} with {} {}, but here it is {}; "
          "other samples would follow (to begin the epoch anew, leave the loader out of the checkpoint)",
          epoch, what, there, here);
    };
    const auto& options = shards_->options;
    same("a number of ranks of", ranks, static_cast<std::uint64_t>(options.num_replicas));
    same("a number of shards of", count, shards_->paths.size());
    same("shuffle", shuffle, options.shuffle_shards ? 1 : 0);
    same("a shuffle buffer of", buffer, options.shuffle_buffer);
    same("seed", seed, options.seed);
    go_to(epoch, samples);
  }
  void divide(const VirtualRanks& ranks) override {
    MANIPLE_REQUIRE(ranks.total == 1,
                    "DataLoader: a stream divides its shards over ranks, and cannot divide them over {} virtual ranks; "
                    "use a dataset with get() and size()",
                    ranks.total);
  }

 private:
  /// Counts full batches: after a smaller batch this rank is at its end, whatever follows.
  std::size_t place() const { return start_ + taken_ * options_.batch_size; }
  void go_to(std::size_t epoch, std::size_t start) {
    epoch_ = epoch;
    start_ = start;
    taken_ = 0;
    over_ = false;
    stays_ = start > 0;
  }

  std::shared_ptr<const ShardSet> shards_;
  LoaderOptions options_;
  std::unique_ptr<ShardPass> pass_;
  std::size_t epoch_ = 0;
  std::size_t start_ = 0;  ///< samples of this rank before the pass
  std::size_t taken_ = 0;  ///< batches of the pass that the loop has received
  bool stays_ = false;     ///< the next pass keeps `start_`
  bool over_ = false;
};

}  // namespace

std::shared_ptr<BatchSource> sampled_batches(DistributedSampler sampler, std::size_t size,
                                             const LoaderOptions& options) {
  return std::make_shared<SampledBatches>(std::move(sampler), size, options);
}

std::shared_ptr<BatchSource> sampled_batches(std::size_t size, const LoaderOptions& options) {
  SamplerOptions sampler{.shuffle = options.shuffle, .seed = options.seed, .mode = options.mode};
  if (!is_initialized()) {
    sampler.num_replicas = 1;
    sampler.rank = 0;
  }
  return sampled_batches(DistributedSampler(size, sampler), size, options);
}

std::shared_ptr<BatchSource> stream_batches(std::shared_ptr<const ShardSet> shards, const LoaderOptions& options) {
  return std::make_shared<StreamBatches>(std::move(shards), options);
}

}  // namespace detail
}  // namespace maniple
