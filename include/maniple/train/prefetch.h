// Batches that are on the GPU before the loop asks for them.
//
//   auto batches = maniple::prefetch_to(device, *loader);
//   for (auto& batch : batches) {                         // batch.data and batch.target are on the device
//     loss = torch::nll_loss(ddp(batch.data), batch.target);
//     ...
//   }
//
// While the loop works on a batch, the next ones are read from the loader, put into pinned memory and copied to the GPU
// on a stream of their own; a batch is handed out without waiting for its copy: what the current stream does with it
// comes after. On the CPU batches are handed out as the loader has them, one at a time.
//
// Any range will do: a torch::data loader, a vector of batches. A batch is a tensor, a torch::data::Example, or tuples,
// pairs, vectors, maps and optionals of such; what is no tensor in it is copied as it is. Tensors that are on a GPU
// already stay where they are.
//
// With a sampler whose batches are counted, count outside, so that a batch counts when the loop has it, not when it was
// read:
//
//   for (auto& batch : sampler.counting(batches)) { ... }
//
// What the range throws when it is asked for a batch is thrown when the loop gets there: the batches before it come
// first. A loop may be left early; the batches that were read ahead are lost then, as the loader has handed them out.
//
// Memory: `batches` (2) batches are on the GPU beside that of the loop. One thread at a time; the range must outlive
// it, unless it is given as a temporary.
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
  std::size_t batches = 2;  ///< that are read ahead of the one which the loop has; at least 1
};

namespace detail {

/// Tensors on their way to a device.
class Prefetcher {
 public:
  /// Throws InvalidArgument for options that cannot be.
  Prefetcher(torch::Device device, const PrefetchOptions& options);
  bool reads_ahead() const noexcept { return !device_.is_cpu(); }
  std::size_t batches() const noexcept { return reads_ahead() ? options_.batches : 0; }
  /// The tensors become those on the device; their values are there after finish().
  std::shared_ptr<void> start(std::vector<torch::Tensor>& tensors) const;
  void finish(const std::shared_ptr<void>& started, const std::vector<torch::Tensor>& tensors) const;

 private:
  torch::Device device_;
  PrefetchOptions options_;
  std::shared_ptr<void> stream_;
};

}  // namespace detail

/// What prefetch_to gives: a range of batches, as often as the range below it may be gone through.
template <class Range>
class Prefetched {
  using Base = decltype(std::begin(std::declval<Range&>()));
  using End = decltype(std::end(std::declval<Range&>()));

 public:
  using Batch = std::remove_cv_t<std::remove_reference_t<decltype(*std::declval<Base&>())>>;

  /// For one pass, in one place: a copy goes on where this one is.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Iterator() = default;  ///< the end
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
      std::exception_ptr failed;  // in reading what comes after `ahead`
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

  /// Begins a pass: reads the first batches.
  Iterator begin() { return Iterator(prefetcher_, std::begin(range_), std::end(range_)); }
  Iterator end() { return {}; }

  /// Those of the loader below, where it has such: DistributedSampler::counting looks at them.
  decltype(auto) options() const
    requires requires(const std::remove_reference_t<Range>& range) { range.options(); }
  {
    return range_.options();
  }
  /// The same; Trainer calls it. (The cursor of the loader below counts what was read ahead, so there is none here.)
  void set_epoch(std::size_t epoch)
    requires requires(std::remove_reference_t<Range>& range) { range.set_epoch(epoch); }
  {
    range_.set_epoch(epoch);
  }

 private:
  detail::Prefetcher prefetcher_;
  Range range_;  // a reference, if it was given as an lvalue
};

/// The batches of `range` on `device`. Throws InvalidArgument for options that cannot be.
template <class Range>
Prefetched<Range> prefetch_to(torch::Device device, Range&& range, const PrefetchOptions& options = {}) {
  return Prefetched<Range>(detail::Prefetcher(device, options), std::forward<Range>(range));
}

}  // namespace maniple
