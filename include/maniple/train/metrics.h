// Training metrics, averaged over batches and ranks.
//
//   maniple::Metrics metrics;
//   for (auto& batch : *loader) {
//     ...
//     metrics.add("loss", loss, batch.target.size(0));            // a mean, weighted by the number of samples
//     metrics.add_accuracy("accuracy", output, batch.target);
//   }
//   const auto row = metrics.all_reduce();                          // over all ranks; the same on each of them
//   std::puts(row.text().c_str());                                  // loss 0.0812  accuracy 0.975
//   writer.add_scalar("loss", row["loss"], step);
//
// Means are exact: the sum of value x count divided by the sum of counts, over all ranks and batches, so a rank with
// fewer samples has less weight. Sums are taken in double, in rank order, so all ranks get the same bits in every run.
//
// Tensors are accumulated on their device, by one small kernel, without host synchronization. All of them are copied to
// the host together when a row is requested.
//
// NaN stays visible: a mean, sum, minimum or maximum over values with a NaN is NaN. (A value with count 0, such as the
// mean of an empty batch, is ignored.)
//
// Names. all_reduce() is one collective (an all_gather of 16 bytes per name). Ranks may have different names: the row
// has their union, and a rank without a name does not contribute to it. When a rank adds a new name (as in the first
// call), the ranks agree on the names in that call, with two more collectives. A name used for different kinds on
// different ranks throws InvalidArgument on all ranks.
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class MetricKind : std::uint8_t { mean, sum, min, max };

struct Metric {
  std::string name;
  MetricKind kind = MetricKind::mean;
  double value = 0;
  double count = 0;  ///< for a mean: the sum of the counts; otherwise the number of values
};

/// A snapshot of the metrics, in the order in which rank 0 added them, followed by names that only other ranks have.
class MetricRow {
 public:
  explicit MetricRow(std::vector<Metric> metrics = {}) : metrics_(std::move(metrics)) {}

  /// Throws InvalidArgument for an unknown name, and lists the known ones.
  double operator[](std::string_view name) const { return at(name).value; }
  const Metric& at(std::string_view name) const;
  bool contains(std::string_view name) const noexcept { return find(name) != nullptr; }
  /// For rows that may be empty, such as TrainerState::evaluation before the first evaluation.
  double value_or(std::string_view name, double otherwise) const noexcept {
    const Metric* const metric = find(name);
    return metric != nullptr ? metric->value : otherwise;
  }

  bool empty() const noexcept { return metrics_.empty(); }
  std::size_t size() const noexcept { return metrics_.size(); }
  auto begin() const noexcept { return metrics_.begin(); }
  auto end() const noexcept { return metrics_.end(); }

  /// "loss 0.0812  accuracy 0.975": for a progress bar or a log.
  std::string text(int digits = 4) const;

 private:
  const Metric* find(std::string_view name) const noexcept;

  std::vector<Metric> metrics_;
};

class Metrics {
 public:
  Metrics() = default;

  /// Adds to a mean. `value` is normally itself the mean of `count` samples. A tensor has one element of any real
  /// dtype, on any device; gradients are not recorded. Throws InvalidArgument for a negative count, a tensor with more
  /// or fewer elements, and a name that is in use for another kind.
  void add(const std::string& name, double value, double count = 1);
  void add(const std::string& name, const torch::Tensor& value, double count = 1);

  /// Adds to a sum, a minimum or a maximum.
  void add_sum(const std::string& name, double value);
  void add_sum(const std::string& name, const torch::Tensor& value);
  void add_min(const std::string& name, double value);
  void add_min(const std::string& name, const torch::Tensor& value);
  void add_max(const std::string& name, double value);
  void add_max(const std::string& name, const torch::Tensor& value);

  /// Adds to a mean: the fraction of samples whose target is among the `top_k` classes with the largest scores. scores:
  /// samples x classes (or samples x classes x places, as in LibTorch's losses). target: the same shape without
  /// classes.
  void add_accuracy(const std::string& name, const torch::Tensor& scores, const torch::Tensor& target, int top_k = 1);

  /// The row over all ranks of the group (null: the default group; without one, this process alone). Then the metrics
  /// are reset: the next row covers the values added from now on. Collective.
  MetricRow all_reduce(const std::shared_ptr<ProcessGroup>& group = nullptr,
                       const SourceLocation& where = SourceLocation::current());

  /// The row over the metrics of several virtual ranks of every rank. Sums are taken in the order of ranks, and on each
  /// rank in the order of `parts`, so the result depends on the parts alone, not on how ranks divide them. `max_parts`:
  /// the largest number of parts on a rank; the same on all ranks. Resets all parts. Collective.
  static MetricRow all_reduce(std::span<Metrics> parts, std::size_t max_parts,
                              const std::shared_ptr<ProcessGroup>& group,
                              const SourceLocation& where = SourceLocation::current());

  /// The same, if this rank has all parts. Does not communicate.
  static MetricRow row_of(std::span<Metrics> parts);

  /// The row of this rank alone; does not reset the metrics.
  MetricRow local() const;

  /// Adds what `other` has: its sums, minima and maxima, as one value of each name. Throws InvalidArgument for a name
  /// that is in use for another kind.
  void merge(const Metrics& other);

  /// The exact sums so far, as text.
  std::string state_dict() const;
  /// Throws ProtocolError, and changes nothing, for another text.
  void load_state_dict(const std::string& text);

  void reset() noexcept { entries_.clear(); }
  bool empty() const noexcept { return entries_.empty(); }

 private:
  struct Entry {
    std::string name;
    MetricKind kind;
    double value = 0;      ///< for numbers; by kind, the weighted sum, sum, minimum, or maximum so far
    double count = 0;      ///< for numbers and tensors
    torch::Tensor tensor;  ///< for tensors; one element, float64
    bool has_value = false;
  };
  struct Name {
    std::string name;
    MetricKind kind;
  };

  Entry& entry(const std::string& name, MetricKind kind);
  void put(const std::string& name, MetricKind kind, double value, double count);
  void put(const std::string& name, MetricKind kind, const torch::Tensor& value, double count, double factor);
  std::vector<double> values() const;
  /// The names that all ranks of the group agreed on. With several parts, the first part keeps them.
  struct Agreement {
    std::weak_ptr<ProcessGroup> group;
    bool alone = false;  ///< of a process without a group
    std::vector<Name> names;
  };
  Agreement& agreement_of(const std::shared_ptr<ProcessGroup>& group);
  static MetricRow reduce(std::span<Metrics> parts, std::size_t max_parts, const std::shared_ptr<ProcessGroup>& ranks);
  static void agree(std::span<const Metrics> parts, ProcessGroup* group, std::vector<Name>& agreed);

  std::vector<Entry> entries_;
  std::vector<Agreement> agreements_;
};

/// The fraction of correct samples, as a tensor of one element; does not wait for the device. See add_accuracy.
torch::Tensor accuracy(const torch::Tensor& scores, const torch::Tensor& target, int top_k = 1);

}  // namespace maniple
