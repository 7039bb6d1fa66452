#include <maniple/train/metrics.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "comm/base/check.h"
#include "train/checkpoint/named_state.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

const char* kind_name(MetricKind kind) {
  switch (kind) {
    case MetricKind::mean: return "mean";
    case MetricKind::sum: return "sum";
    case MetricKind::min: return "minimum";
    default: return "maximum";
  }
}

/// Combines two parts of the same metric. NaN wins, so that it is not lost.
double together(MetricKind kind, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  switch (kind) {
    case MetricKind::min: return std::min(a, b);
    case MetricKind::max: return std::max(a, b);
    default: return a + b;
  }
}

/// For each sample, whether its target is among the `top_k` best scores.
torch::Tensor hits(const torch::Tensor& scores, const torch::Tensor& target, int top_k) {
  const torch::NoGradGuard no_grad;
  MANIPLE_REQUIRE(scores.defined() && target.defined() && scores.dim() == target.dim() + 1 && target.dim() >= 1 &&
                      scores.size(0) == target.size(0) && scores.sizes().slice(2) == target.sizes().slice(1),
                  "accuracy: scores of shape {} with targets of shape {}; expected samples x classes, and samples",
                  scores.defined() ? format_text("[{}]", joined(scores.sizes())) : "(undefined)",
                  target.defined() ? format_text("[{}]", joined(target.sizes())) : "(undefined)");
  MANIPLE_REQUIRE(top_k >= 1 && top_k <= scores.size(1), "accuracy: the best {} of {} classes", top_k, scores.size(1));
  const torch::Tensor detached = scores.detach();
  if (top_k == 1) return detached.argmax(1).eq(target);
  return std::get<1>(detached.topk(top_k, 1)).eq(target.unsqueeze(1)).any(1);
}

/// The data exchanged for each name: value and count.
struct Part {
  double value = 0;
  double count = 0;
};

}  // namespace

// ---- A row ----------------------------------------------------------------------------------------------------------

const Metric* MetricRow::find(std::string_view name) const noexcept {
  const auto found =
      std::find_if(metrics_.begin(), metrics_.end(), [&](const Metric& metric) { return metric.name == name; });
  return found == metrics_.end() ? nullptr : &*found;
}

const Metric& MetricRow::at(std::string_view name) const {
  if (const Metric* metric = find(name)) return *metric;
  MANIPLE_REQUIRE(
      !metrics_.empty(),
      "no metric \"{}\": the row is empty; it is one of a training that ended before its first evaluation, or "
      "nothing was added on any rank (contains() and value_or() do not throw)",
      name);
  std::vector<std::string> names;
  for (const Metric& metric : metrics_) names.push_back(metric.name);
  throw InvalidArgument(format_text("no metric \"{}\" was added on any rank; there are: {}", name, joined(names)));
}

std::string MetricRow::text(int digits) const {
  std::string text;
  for (const Metric& metric : metrics_) {
    if (!text.empty()) text += "  ";
    text += format_text("{} {:.{}g}", metric.name, metric.value, digits);
  }
  return text;
}

// ---- Adding ---------------------------------------------------------------------------------------------------------

Metrics::Entry& Metrics::entry(const std::string& name, MetricKind kind) {
  MANIPLE_REQUIRE(!name.empty() && name.find('\0') == std::string::npos,
                  "Metrics: a metric without a name, or with a NUL in it");
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& known) { return known.name == name; });
  if (found == entries_.end()) return entries_.emplace_back(Entry{name, kind, 0, 0, {}, false});
  MANIPLE_REQUIRE(found->kind == kind, "Metrics: \"{}\" is a {}, and cannot be a {} as well", name,
                  kind_name(found->kind), kind_name(kind));
  return *found;
}

void Metrics::put(const std::string& name, MetricKind kind, double value, double count) {
  MANIPLE_REQUIRE(count >= 0, "Metrics: \"{}\" with a count of {}; expected a number of samples", name, count);
  Entry& own = entry(name, kind);
  if (count == 0) return;
  own.value = own.has_value ? together(kind, own.value, value) : value;
  own.has_value = true;
  own.count += count;
}

void Metrics::put(const std::string& name, MetricKind kind, const torch::Tensor& value, double count, double factor) {
  MANIPLE_REQUIRE(count >= 0, "Metrics: \"{}\" with a count of {}; expected a number of samples", name, count);
  MANIPLE_REQUIRE(value.defined(), "Metrics: \"{}\": the tensor is undefined", name);
  MANIPLE_REQUIRE(value.numel() == 1 && !value.is_complex(),
                  "Metrics: \"{}\": a tensor of {} {} elements; expected one real number", name, value.numel(),
                  c10::toString(value.scalar_type()));
  const torch::NoGradGuard no_grad;
  Entry& own = entry(name, kind);
  if (count == 0) return;
  own.count += count;
  const torch::Tensor one = value.detach().reshape({});
  if (own.tensor.defined() && own.tensor.device() != one.device()) {
    // Rare: the device has changed. Reads the old sum and starts a new one.
    own.value = own.has_value ? together(kind, own.value, own.tensor.item<double>()) : own.tensor.item<double>();
    own.has_value = true;
    own.tensor = torch::Tensor();
  }
  if (!own.tensor.defined()) {
    own.tensor = one.to(torch::kFloat64, /*non_blocking=*/false, /*copy=*/true).mul_(factor);
  } else if (kind == MetricKind::min || kind == MetricKind::max) {
    const torch::Tensor wide = one.to(torch::kFloat64);
    own.tensor = kind == MetricKind::min ? torch::minimum(own.tensor, wide) : torch::maximum(own.tensor, wide);
  } else {
    own.tensor.add_(one, factor);
  }
}

void Metrics::add(const std::string& name, double value, double count) {
  put(name, MetricKind::mean, value * count, count);
}
void Metrics::add(const std::string& name, const torch::Tensor& value, double count) {
  put(name, MetricKind::mean, value, count, count);
}
void Metrics::add_sum(const std::string& name, double value) { put(name, MetricKind::sum, value, 1); }
void Metrics::add_sum(const std::string& name, const torch::Tensor& value) { put(name, MetricKind::sum, value, 1, 1); }
void Metrics::add_min(const std::string& name, double value) { put(name, MetricKind::min, value, 1); }
void Metrics::add_min(const std::string& name, const torch::Tensor& value) { put(name, MetricKind::min, value, 1, 1); }
void Metrics::add_max(const std::string& name, double value) { put(name, MetricKind::max, value, 1); }
void Metrics::add_max(const std::string& name, const torch::Tensor& value) { put(name, MetricKind::max, value, 1, 1); }

void Metrics::add_accuracy(const std::string& name, const torch::Tensor& scores, const torch::Tensor& target,
                           int top_k) {
  const torch::Tensor right = hits(scores, target, top_k);
  put(name, MetricKind::mean, right.sum(), static_cast<double>(right.numel()), 1);
}

torch::Tensor accuracy(const torch::Tensor& scores, const torch::Tensor& target, int top_k) {
  return hits(scores, target, top_k).to(torch::kFloat64).mean();
}

// ---- Reading --------------------------------------------------------------------------------------------------------

// Waits once for each device, regardless of the number of values on it.
std::vector<double> Metrics::values() const {
  std::vector<double> values(entries_.size(), 0);
  std::map<std::string, std::vector<std::size_t>> on_device;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    values[i] = entries_[i].value;
    if (entries_[i].tensor.defined()) on_device[entries_[i].tensor.device().str()].push_back(i);
  }
  for (const auto& [device, places] : on_device) {
    std::vector<torch::Tensor> tensors;
    for (const std::size_t i : places) tensors.push_back(entries_[i].tensor);
    const torch::Tensor read = torch::stack(tensors).cpu();
    for (std::size_t k = 0; k < places.size(); ++k) {
      const Entry& entry = entries_[places[k]];
      const double number = read.data_ptr<double>()[k];
      values[places[k]] = entry.has_value ? together(entry.kind, entry.value, number) : number;
    }
  }
  return values;
}

MetricRow Metrics::local() const {
  std::vector<Metric> row;
  const std::vector<double> all = values();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.count == 0) continue;
    row.push_back(
        {entry.name, entry.kind, entry.kind == MetricKind::mean ? all[i] / entry.count : all[i], entry.count});
  }
  return MetricRow(std::move(row));
}

void Metrics::merge(const Metrics& other) {
  const std::vector<double> all = other.values();
  for (std::size_t i = 0; i < other.entries_.size(); ++i)
    put(other.entries_[i].name, other.entries_[i].kind, all[i], other.entries_[i].count);
}

std::string Metrics::state_dict() const {
  std::string text;
  const std::vector<double> all = values();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    text += format_text("{} {} {} {}{}", static_cast<int>(entry.kind), text_of(all[i]), text_of(entry.count),
                        entry.name, '\0');
  }
  return text;
}

void Metrics::load_state_dict(const std::string& text) {
  Metrics loaded;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\0', begin);
    std::istringstream line(text.substr(begin, end - begin));
    int kind = -1;
    std::string value, count, name;
    line >> kind >> value >> count;
    line.get();
    std::getline(line, name, '\0');
    if (end == std::string::npos || kind < 0 || kind > static_cast<int>(MetricKind::max) || name.empty())
      throw ProtocolError(format_text("\"{}\" is not a state of metrics", text.substr(begin, 80)));
    loaded.put(name, static_cast<MetricKind>(kind), real_of(value), real_of(count));
    begin = end + 1;
  }
  entries_ = std::move(loaded.entries_);
}

/// The union of the names of all ranks, rank 0's first. Names that were agreed on before keep their places.
void Metrics::agree(std::span<const Metrics> parts, ProcessGroup* group, std::vector<Name>& agreed) {
  std::string own;
  for (const Metrics& part : parts) {
    for (const Entry& entry : part.entries_) {
      own += static_cast<char>('0' + static_cast<int>(entry.kind));
      own += entry.name + '\0';
    }
  }
  const auto lists = group == nullptr ? std::vector{own} : group->all_gather_objects(own, {}, public_place());
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    std::string_view rest = lists[rank];
    while (!rest.empty()) {
      const std::size_t end = rest.find('\0');
      const auto kind = static_cast<MetricKind>(rest.front() - '0');
      const std::string name(rest.substr(1, end - 1));
      rest.remove_prefix(end + 1);
      const auto found =
          std::find_if(agreed.begin(), agreed.end(), [&](const Name& known) { return known.name == name; });
      if (found == agreed.end()) {
        agreed.push_back({name, kind});
      } else if (found->kind != kind) {
        const MetricKind before = found->kind;
        agreed.clear();  // otherwise the earlier names would be agreed on without this one
        throw InvalidArgument(
            format_text("Metrics: \"{}\" is a {} on rank {}, but a {} on a rank before it, or earlier", name,
                        kind_name(kind), rank, kind_name(before)));
      }
    }
  }
}

Metrics::Agreement& Metrics::agreement_of(const std::shared_ptr<ProcessGroup>& group) {
  std::erase_if(agreements_, [](const Agreement& agreement) { return !agreement.alone && agreement.group.expired(); });
  for (Agreement& agreement : agreements_) {
    if (agreement.alone == (group == nullptr) && agreement.group.lock() == group) return agreement;
  }
  return agreements_.emplace_back(Agreement{group, group == nullptr, {}});
}

MetricRow Metrics::all_reduce(const std::shared_ptr<ProcessGroup>& group, const SourceLocation& where) {
  return all_reduce({this, 1}, 1, group, where);
}

MetricRow Metrics::all_reduce(std::span<Metrics> parts, std::size_t max_parts,
                              const std::shared_ptr<ProcessGroup>& group, const SourceLocation& where) {
  const PublicCall call("Metrics::all_reduce, which all ranks call", where);
  MANIPLE_REQUIRE(!parts.empty() && parts.size() <= max_parts, "Metrics: {} parts on this rank; expected 1 to {}",
                  parts.size(), max_parts);
  if (group) group->require_member("Metrics::all_reduce");
  auto ranks = group ? group : is_initialized() ? get_default_group() : nullptr;
  if (ranks && ranks->size() == 1) ranks = nullptr;
  return reduce(parts, max_parts, ranks);
}

MetricRow Metrics::row_of(std::span<Metrics> parts) { return reduce(parts, parts.size(), nullptr); }

MetricRow Metrics::reduce(std::span<Metrics> parts, std::size_t max_parts, const std::shared_ptr<ProcessGroup>& ranks) {
  std::vector<Name>& agreed = parts.front().agreement_of(ranks).names;
  std::vector<std::vector<double>> own_values;
  for (const Metrics& part : parts) own_values.push_back(part.values());
  std::vector<Part> all;
  // For each part its values in the agreed order, preceded by whether it has names or kinds that were not agreed on.
  const auto gather = [&] {
    const std::size_t length = agreed.size() + 1;
    std::vector<Part> own(length * max_parts);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::vector<Entry>& entries = parts[p].entries_;
      for (std::size_t i = 0; i < entries.size(); ++i) {
        const auto place = std::find_if(agreed.begin(), agreed.end(), [&](const Name& name) {
          return name.name == entries[i].name && name.kind == entries[i].kind;
        });
        if (place == agreed.end()) {
          own[p * length].count = 1;
        } else {
          own[p * length + (place - agreed.begin()) + 1] = {own_values[p][i], entries[i].count};
        }
      }
    }
    if (!ranks) {
      all = std::move(own);
      return;
    }
    all.resize(own.size() * ranks->size());
    ranks->all_gather(ConstBuffer{own.data(), own.size() * 2, DType::float64},
                      Buffer{all.data(), all.size() * 2, DType::float64}, {}, {}, public_place());
  };
  gather();
  const auto someone_has_news = [&] {
    for (std::size_t begin = 0; begin < all.size(); begin += agreed.size() + 1) {
      if (all[begin].count != 0) return true;
    }
    return false;
  };
  if (someone_has_news()) {
    agree(parts, ranks.get(), agreed);
    gather();
  }
  std::vector<Metric> row;
  for (std::size_t i = 0; i < agreed.size(); ++i) {
    Metric metric = {agreed[i].name, agreed[i].kind, 0, 0};
    for (std::size_t place = i + 1; place < all.size(); place += agreed.size() + 1) {
      const Part& part = all[place];
      if (part.count == 0) continue;
      metric.value = metric.count == 0 ? part.value : together(metric.kind, metric.value, part.value);
      metric.count += part.count;
    }
    if (metric.count == 0) continue;
    if (metric.kind == MetricKind::mean) metric.value /= metric.count;
    row.push_back(std::move(metric));
  }
  for (Metrics& part : parts) part.reset();
  return MetricRow(std::move(row));
}

}  // namespace maniple
