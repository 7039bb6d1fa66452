// Copies batches to the GPU before the loop needs them.
//
//   auto batches = maniple::prefetch_to(device, *loader);
//   for (auto& batch : batches) {                         // batch.data and batch.target are on the device
//     loss = torch::nll_loss(ddp(batch.data), batch.target);
//     ...
//   }
//
// While the loop works on a batch, the next batches are read from the loader, put into pinned memory and copied to the
// GPU on a separate stream. A batch is returned without waiting for its copy: work submitted to the current stream runs
// after the copy. On the CPU batches are passed through one at a time, without prefetching.
//
// The source is any range: a torch::data loader, a vector of batches. A batch is a tensor, a torch::data::Example, or
// tuples, pairs, vectors, maps and optionals of these; other members are copied unchanged. Tensors that are already on
// a GPU stay there.
//
// With a counting sampler, count outside, so that a batch counts when the loop receives it, not when it is read:
//
//   for (auto& batch : sampler.counting(batches)) { ... }
//
// An exception of the source is thrown when the loop reaches the batch concerned, after all earlier batches. A loop may
// end early; the batches read ahead are then lost, because the loader has already returned them.
//
// Memory: `batches` (default 2) batches are on the GPU in addition to the loop's own.
//
// Threads and lifetime: one thread at a time. The source must outlive it, unless it is passed as a temporary.
#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>
#include <maniple/train/tensor_nest.h>

namespace MANIPLE_API maniple {

struct PrefetchOptions {
  std::size_t batches = 2;  ///< read ahead of the loop's batch; at least 1
};

namespace detail {

/// Copies tensors to a device in the background.
class Prefetcher {
 public:
  /// Throws InvalidArgument for invalid options.
  Prefetcher(torch::Device device, const PrefetchOptions& options);
  bool reads_ahead() const noexcept { return !device_.is_cpu(); }
  std::size_t batches() const noexcept { return reads_ahead() ? options_.batches : 0; }
  /// Replaces the tensors by tensors on the device; their values are valid after finish().
  std::shared_ptr<void> start(std::vector<torch::Tensor>& tensors) const;
  void finish(const std::shared_ptr<void>& started, const std::vector<torch::Tensor>& tensors) const;

 private:
  torch::Device device_;
  PrefetchOptions options_;
  std::shared_ptr<void> stream_;
};

}  // namespace detail

/// The result of prefetch_to: a range of batches. It can be iterated as often as the source range.
template <class Range>
class Prefetched {
  using Base = decltype(std::begin(std::declval<Range&>()));
  using End = decltype(std::end(std::declval<Range&>()));

 public:
  using Batch = std::remove_cv_t<std::remove_reference_t<decltype(*std::declval<Base&>())>>;

  /// For one pass, at one position: a copy continues from the same position.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Iterator() = default;  ///< end of the pass
    Iterator(const detail::Prefetcher& prefetcher, Base base, End end)
        : pass_(std::make_shared<Pass>(Pass{prefetcher, std::move(base), std::move(end), {}, {}, {}})) {
      pass_->advance();
    }
    Batch& operator*() const { return *pass_->current; }
    Batch* operator->() const { return &*pass_->current; }
    Iterator& operator++() {
      pass_->advance();
      return *this;
    }
    void operator++(int) { pass_->advance(); }
    friend bool operator==(const Iterator& a, const Iterator& b) { return a.over() == b.over(); }
    friend bool operator!=(const Iterator& a, const Iterator& b) { return !(a == b); }

   private:
    struct Started {
      Batch batch;
      std::vector<torch::Tensor> tensors;
      std::shared_ptr<void> copies;
    };
    struct Pass {
      detail::Prefetcher prefetcher;
      Base base;
      End end;
      std::deque<Started> ahead;
      std::exception_ptr failed;  // from reading the batch after `ahead`
      std::optional<Batch> current;
      bool begun = false;
      bool over = false;

      void read() {
        if (std::exchange(begun, true)) ++base;
        if (!(base != end)) {
          over = true;
          return;
        }
        const Batch& given = *base;
        if (!prefetcher.reads_ahead()) {
          ahead.push_back({given, {}, nullptr});
          return;
        }
        std::vector<torch::Tensor> tensors = detail::tensors_in(given);
        std::shared_ptr<void> copies = prefetcher.start(tensors);
        ahead.push_back({detail::with_tensors(given, tensors), tensors, std::move(copies)});
      }
      void read_up_to(std::size_t count) {
        try {
          while (ahead.size() < count && !over && !failed) read();
        } catch (...) {
          failed = std::current_exception();
        }
      }
      void advance() {
        current.reset();
        read_up_to(1);
        if (ahead.empty() && failed) {
          over = true;
          std::rethrow_exception(std::exchange(failed, nullptr));
        }
        if (ahead.empty()) return;
        Started next = std::move(ahead.front());
        ahead.pop_front();
        if (prefetcher.reads_ahead()) prefetcher.finish(next.copies, next.tensors);
        current.emplace(std::move(next.batch));
        read_up_to(prefetcher.batches());
      }
    };
    bool over() const { return !pass_ || !pass_->current; }

    std::shared_ptr<Pass> pass_;
  };

  Prefetched(detail::Prefetcher prefetcher, Range&& range)
      : prefetcher_(std::move(prefetcher)), range_(std::forward<Range>(range)) {}

  /// Begins a pass and reads the first batches.
  Iterator begin() { return Iterator(prefetcher_, std::begin(range_), std::end(range_)); }
  Iterator end() { return {}; }

  /// Options of the source loader, if it has any: DistributedSampler::counting reads them.
  decltype(auto) options() const
    requires requires(const std::remove_reference_t<Range>& range) { range.options(); }
  {
    return range_.options();
  }
  /// Forwards to the source; called by Trainer. (The source's cursor counts batches read ahead, so it is not exposed.)
  void set_epoch(std::size_t epoch)
    requires requires(std::remove_reference_t<Range>& range) { range.set_epoch(epoch); }
  {
    range_.set_epoch(epoch);
  }

 private:
  detail::Prefetcher prefetcher_;
  Range range_;  // a reference, if it was given as an lvalue
};

/// Returns the batches of `range` on `device`. Throws InvalidArgument for invalid options.
template <class Range>
Prefetched<Range> prefetch_to(torch::Device device, Range&& range, const PrefetchOptions& options = {}) {
  return Prefetched<Range>(detail::Prefetcher(device, options), std::forward<Range>(range));
}

}  // namespace maniple
