#include "train/data_parallel/gather.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "train/tensor/torch_compat.h"

namespace maniple {
namespace {

using torch::Tensor;

/// One result, from all replicas.
Tensors across(const std::vector<ReplicaGraph>& graphs, std::size_t result) {
  Tensors parts;
  for (const ReplicaGraph& graph : graphs) parts.push_back(graph.outputs[result]);
  return parts;
}

/// The places of the parts in a gathered result.
struct Layout {
  bool scalars = false;  // one element per replica
  std::int64_t dim = 0;
  std::vector<std::int64_t> lengths;
};

Layout layout_of_result(const Tensors& parts, std::size_t result, std::int64_t dim) {
  const std::int64_t dims = parts[0].dim();
  if (dims == 0) {
    warn_once(
        "DataParallel gathers results without dimensions into a vector, with one element for each replica; take its "
        "mean "
        "if they are losses");
  }
  MANIPLE_REQUIRE(dims == 0 || (dim < dims && dim >= -dims),
                  "DataParallel: result {} has {} dimensions and cannot be concatenated along dimension {}", result,
                  dims, dim);
  Layout layout{dims == 0, dims == 0 ? 0 : (dim + dims) % dims, {}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    bool fits = parts[i].dim() == dims;
    for (std::int64_t d = 0; fits && d < dims; ++d) {
      fits = d == layout.dim || parts[i].size(d) == parts[0].size(d);
    }
    MANIPLE_REQUIRE(fits,
                    "DataParallel: result {} is [{}] on replica 0 and [{}] on replica {}; they may differ in dimension "
                    "{} alone",
                    result, joined(parts[0].sizes()), joined(parts[i].sizes()), i, layout.dim);
    layout.lengths.push_back(dims == 0 ? 1 : parts[i].size(layout.dim));
  }
  return layout;
}

Tensor concatenated(const Tensors& parts, const Layout& layout, torch::Device device) {
  const torch::NoGradGuard no_grad;
  Tensors here;
  for (const Tensor& part : parts) here.push_back(part.to(device, /*non_blocking=*/true));
  return layout.scalars ? torch::stack(here) : torch::cat(here, layout.dim);
}

/// The replica's part of the gradient of a gathered result.
Tensor part_of(const Tensor& gradient, const Layout& layout, std::size_t replica, torch::Device device) {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < replica; ++i) begin += layout.lengths[i];
  const Tensor part =
      layout.scalars ? gradient.select(0, begin) : gradient.narrow(layout.dim, begin, layout.lengths[replica]);
  return part.to(device);
}

// ---- The sum of the replicas' gradients -----------------------------------------------------------------------------

constexpr std::int64_t kLarge = 1 << 16;  // elements: takes about ten microseconds, more than waking the threads

/// Whether nothing else refers to this memory: a gradient may be the same tensor as another gradient, or a view.
bool is_ours_alone(const Tensor& tensor) {
  return tensor.layout() == torch::kStrided && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         is_dense(tensor);
}

bool can_be_sliced(const Tensor& sum, const std::vector<Tensor>& others) {
  if (sum.numel() < kLarge || !sum.is_cpu()) return false;
  for (const Tensor& other : others) {
    if (other.layout() != torch::kStrided || other.strides() != sum.strides() ||
        other.scalar_type() != sum.scalar_type()) {
      return false;
    }
  }
  return true;
}

/// Slice `part` of `parts`, in memory order.
Tensor slice(const Tensor& tensor, std::size_t part, std::size_t parts) {
  const auto count = static_cast<std::int64_t>(parts), index = static_cast<std::int64_t>(part);
  const std::int64_t begin = tensor.numel() * index / count, end = tensor.numel() * (index + 1) / count;
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

struct Sum {
  Tensor* total;
  std::vector<Tensor> others;
};

/// For each parameter, the sum of its addends, from first to last, on the parameter's device; undefined if there are
/// none. Large sums are divided into slices, one for each replica's thread.
std::vector<Tensor> add_gradients(ReplicaThreads& threads, std::vector<std::vector<Tensor>> addends,
                                  const std::vector<Tensor>& parameters) {
  std::vector<Tensor> sums(addends.size());
  std::vector<Sum> large;
  for (std::size_t k = 0; k < addends.size(); ++k) {
    std::vector<Tensor>& own = addends[k];
    if (own.empty()) continue;
    const torch::Device device = parameters[k].device();
    Tensor first = std::move(own[0]);
    std::vector<Tensor> others;
    for (std::size_t i = 1; i < own.size(); ++i) others.push_back(std::move(own[i]).to(device));
    sums[k] = first.device() == device ? std::move(first) : first.to(device);
    first.reset();
    if (others.empty()) continue;
    if (!is_ours_alone(sums[k])) {
      for (const Tensor& other : others) sums[k] = sums[k] + other;
    } else if (can_be_sliced(sums[k], others)) {
      large.push_back({&sums[k], std::move(others)});
    } else {
      for (const Tensor& other : others) sums[k].add_(other);
    }
  }
  if (large.empty()) return sums;
  threads.run(threads.size(), "the addition of gradients", [&](std::size_t part) {
    for (const Sum& sum : large) {
      for (const Tensor& other : sum.others) {
        slice(*sum.total, part, threads.size()).add_(slice(other, part, threads.size()));
      }
    }
  });
  return sums;
}

// ---- The node of the program's graph --------------------------------------------------------------------------------

struct GatherBackward : torch::autograd::Node {
  std::shared_ptr<ReplicaThreads> threads;
  std::vector<ReplicaGraph> graphs;
  std::vector<std::size_t> results;  // results with a gradient, in the order of this node's inputs
  std::vector<Layout> layouts;       // layouts of these results
  std::int64_t dim = 0;
  GatherTargets targets;
  bool last_time = false;

  std::string name() const override { return "DataParallelBackward"; }
  void will_release_variables() override { last_time = true; }
  void release_variables() override { graphs.clear(); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (torch::GradMode::is_enabled()) {
      throw Unsupported("DataParallel: backward with create_graph cannot go through replicas; use the module itself");
    }
    MANIPLE_REQUIRE(!graphs.empty(),
                    "DataParallel: backward a second time through a forward whose graph was freed; the first backward "
                    "needs retain_graph");
    std::vector<Tensors> found(graphs.size(), Tensors(num_outputs()));
    threads->run(graphs.size(), "backward", [&](std::size_t i) { walk(i, gradients, found[i]); });
    torch::autograd::variable_list sums(num_outputs());
    for (std::size_t k = 0; k < targets.inputs.size(); ++k) sums[k] = gathered_gradient(k, found);
    std::vector<Tensors> addends(targets.parameters.size());
    for (std::size_t k = 0; k < addends.size(); ++k) {
      for (Tensors& one : found) {
        Tensor& gradient = one[targets.inputs.size() + k];
        if (gradient.defined()) addends[k].push_back(std::move(gradient));
      }
    }
    Tensors added = add_gradients(*threads, std::move(addends), targets.parameters);
    std::move(added.begin(), added.end(), sums.begin() + static_cast<std::ptrdiff_t>(targets.inputs.size()));
    return sums;
  }

 private:
  /// Runs a replica's backward, in the replica's thread.
  void walk(std::size_t replica, const torch::autograd::variable_list& gradients, Tensors& found) const {
    const ReplicaGraph& graph = graphs[replica];
    torch::autograd::variable_list ends, seeds, leaves;
    std::vector<std::size_t> places;
    for (std::size_t k = 0; k < results.size(); ++k) {
      const Tensor& end = graph.outputs[results[k]];
      if (!gradients[k].defined() || !end.requires_grad()) continue;
      ends.push_back(end);
      seeds.push_back(part_of(gradients[k], layouts[k], replica, end.device()));
    }
    const auto add_leaf = [&](const Tensor& leaf, std::size_t place) {
      leaves.push_back(leaf);
      places.push_back(place);
    };
    for (std::size_t k = 0; k < graph.inputs.size(); ++k) {
      if (task_should_compute_output(k)) add_leaf(graph.inputs[k], k);
    }
    for (std::size_t k = 0; k < graph.parameters.size(); ++k) {
      const std::size_t place = graph.inputs.size() + k;
      if (!task_should_compute_output(place)) continue;
      for (const Tensor& leaf : graph.parameters[k]) add_leaf(leaf, place);
    }
    if (ends.empty() || leaves.empty()) return;
    auto own = torch::autograd::grad(ends, leaves, seeds, /*retain_graph=*/!last_time, /*create_graph=*/false,
                                     /*allow_unused=*/true);
    for (std::size_t k = 0; k < own.size(); ++k) {
      if (!own[k].defined()) continue;
      Tensor& place = found[places[k]];
      place = place.defined() ? place + own[k] : std::move(own[k]);
    }
  }

  Tensor gathered_gradient(std::size_t input, const std::vector<Tensors>& found) const {
    Tensors parts;
    bool any = false;
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      any = any || found[i][input].defined();
      const Tensor part = found[i][input].defined() ? found[i][input] : torch::zeros_like(graphs[i].inputs[input]);
      parts.push_back(part.to(targets.inputs[input].device()));
    }
    return any ? torch::cat(parts, dim) : Tensor();
  }
};

}  // namespace

Tensors gather(const std::shared_ptr<ReplicaThreads>& threads, std::vector<ReplicaGraph> graphs,
               const GatherOptions& options, const GatherTargets& targets) {
  const std::size_t count = graphs[0].outputs.size();
  for (std::size_t i = 1; i < graphs.size(); ++i) {
    MANIPLE_REQUIRE(graphs[i].outputs.size() == count,
                    "DataParallel: replica 0 returned {} tensors, replica {} returned {}", count, i,
                    graphs[i].outputs.size());
  }
  const auto node = make_node<GatherBackward>();
  Tensors gathered(count);
  for (std::size_t k = 0; k < count; ++k) {
    const Tensors parts = across(graphs, k);
    const auto defined = std::count_if(parts.begin(), parts.end(), [](const Tensor& part) { return part.defined(); });
    MANIPLE_REQUIRE(defined == 0 || defined == std::ssize(parts),
                    "DataParallel: result {} is undefined on some replicas and defined on others", k);
    if (defined == 0) continue;
    Layout layout = layout_of_result(parts, k, options.dim);
    gathered[k] = concatenated(parts, layout, options.device);
    if (std::any_of(parts.begin(), parts.end(), [](const Tensor& part) { return part.requires_grad(); })) {
      node->results.push_back(k);
      node->layouts.push_back(std::move(layout));
    }
  }
  if (node->results.empty()) return gathered;
  node->threads = threads;
  node->dim = options.dim;
  node->targets = targets;
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(targets.inputs);
  for (auto& edge : torch::autograd::collect_next_edges(targets.parameters)) edges.push_back(std::move(edge));
  node->set_next_edges(std::move(edges));
  for (const std::size_t k : node->results) torch::autograd::set_history(gathered[k], node);
  node->graphs = std::move(graphs);
  return gathered;
}

}  // namespace maniple
