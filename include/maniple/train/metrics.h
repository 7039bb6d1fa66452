// Numbers of a training, averaged over batches and over ranks.
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
// Means are exact: sum of value x count over sum of counts, over all ranks and batches, so that a rank with fewer
// samples counts less. Sums are taken in double, in the order of ranks: every rank gets the same bits, run after run.
//
// Tensors are added up where they are, by one small kernel and without waiting for a device; they are read, all at
// once, when a row is asked for.
//
// NaN is not hidden: a mean, sum, minimum or maximum with a NaN in it is NaN. (But a value with a count of 0, the mean
// of an empty batch say, is nothing and does not count.)
//
// Names. all_reduce() is one collective (an all_gather of 16 bytes for each name). Ranks need not have the same names:
// the row has the union, and a rank without a name adds nothing to it. When a rank brings a name that the ranks have
// not agreed on before, in the first call say, they do so in that call, by two more collectives. A name that is of
// another kind on another rank is an InvalidArgument on all ranks.
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
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
  double count = 0;  ///< of a mean: the sum of the counts; otherwise the number of values
};

/// Metrics at one time. In the order in which rank 0 first had them, then those of the others.
class MetricRow {
 public:
  explicit MetricRow(std::vector<Metric> metrics = {}) : metrics_(std::move(metrics)) {}

  /// Throws InvalidArgument if there is none of this name, listing those that there are.
  double operator[](std::string_view name) const { return at(name).value; }
  const Metric& at(std::string_view name) const;
  bool contains(std::string_view name) const noexcept { return find(name) != nullptr; }
  /// For rows that may be empty, as TrainerState::evaluation is before the first evaluation.
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

  /// Part of a mean. `value` is normally itself the mean of `count` samples. A tensor has one element, of any real
  /// dtype, on any device; gradients are not recorded. Throws InvalidArgument for a negative count, a tensor of another
  /// size, and a name that is in use for another kind.
  void add(const std::string& name, double value, double count = 1);
  void add(const std::string& name, const torch::Tensor& value, double count = 1);

  /// Part of a sum, candidates for a minimum or a maximum.
  void add_sum(const std::string& name, double value);
  void add_sum(const std::string& name, const torch::Tensor& value);
  void add_min(const std::string& name, double value);
  void add_min(const std::string& name, const torch::Tensor& value);
  void add_max(const std::string& name, double value);
  void add_max(const std::string& name, const torch::Tensor& value);

  /// A mean: the part of the samples whose target is among the `top_k` classes with the largest scores. scores: samples
  /// x classes (or samples x classes x places, as the losses of LibTorch take them); target: the same without the
  /// classes.
  void add_accuracy(const std::string& name, const torch::Tensor& scores, const torch::Tensor& target, int top_k = 1);

  /// Over all ranks of the group (null: the default group; if there is none, this process alone), and begins anew: the
  /// next row is of what is added from now on. Collective.
  MetricRow all_reduce(const std::shared_ptr<ProcessGroup>& group = nullptr,
                       const SourceLocation& where = SourceLocation::current());

  /// Of this rank alone; keeps what was added.
  MetricRow local() const;

  void reset() noexcept { entries_.clear(); }
  bool empty() const noexcept { return entries_.empty(); }

 private:
  struct Entry {
    std::string name;
    MetricKind kind;
    double value = 0;      ///< of numbers: a sum weighted by counts, a sum, a minimum, a maximum
    double count = 0;      ///< of numbers and tensors
    torch::Tensor tensor;  ///< of tensors; one element, float64
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
  /// What the ranks of a group have agreed on: the same on all of them, whatever else a rank does meanwhile.
  struct Agreement {
    std::weak_ptr<ProcessGroup> group;
    std::vector<Name> names;
  };
  Agreement& agreement_of(const std::shared_ptr<ProcessGroup>& group);
  void agree(ProcessGroup& group, std::vector<Name>& agreed) const;

  std::vector<Entry> entries_;
  std::vector<Agreement> agreements_;
};

/// The part of the samples that are right, as a tensor of one element: nothing is read from a device. See add_accuracy.
torch::Tensor accuracy(const torch::Tensor& scores, const torch::Tensor& target, int top_k = 1);

}  // namespace maniple
