// How it works. The first call runs with a graph, on inputs that are detached from the outer graph. The edges by which
// that graph leaves the function, to parameters and to captured tensors, become the next edges of one checkpoint node,
// and the graph is dropped with all its activations. In backward the node calls the function again, redirects the same
// edges of the new graph to nodes that collect the arriving gradients, runs autograd on the new graph, and passes the
// collected gradients to its own next edges. So gradients reach parameters through the outer graph alone: hooks run
// once, and the inner run affects nothing outside.
#include <maniple/train/activation_checkpoint.h>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "comm/base/check.h"
#include "train/restored.h"
#include "train/tensor/torch_compat.h"

namespace maniple {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using EdgeIndex = std::unordered_map<Edge, std::size_t>;

/// The nodes of autograd's graph that the calling thread creates from this object's construction on. Nodes that
/// accumulate gradients of leaves are excluded: they belong to the leaf.
class NewNodes {
 public:
  bool contain(const Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= begin_ &&
           node.sequence_nr() != std::numeric_limits<std::uint64_t>::max();
  }

 private:
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::uint64_t begin_ = at::sequence_number::peek();
};

/// Calls `visit` for each edge that leads out of the new nodes, starting from the roots. `visit` may change the edge.
template <class Visit>
void visit_leaving_edges(edge_list& roots, const NewNodes& inside, const Visit& visit) {
  std::vector<Node*> open;
  std::unordered_set<Node*> seen;
  const auto look_at = [&](edge_list& edges) {
    for (Edge& edge : edges) {
      if (!edge.is_valid()) continue;
      if (!inside.contain(*edge.function)) {
        visit(edge);
      } else if (seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  };
  look_at(roots);
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    look_at(node->next_edges());
  }
}

/// Stands in for an input of another node and collects the gradient that arrives there.
struct Collector final : Node {
  explicit Collector(const Edge& in_place_of) {
    input_metadata_.emplace_back(in_place_of.function->input_metadata(in_place_of.input_nr));
  }
  variable_list apply(variable_list&& gradients) override {
    gradient = std::move(gradients[0]);
    return {};
  }
  torch::Tensor gradient;
};

// ---- State that must be as it was in the first call -----------------------------------------------------------------

/// The generators of the CPU and of the inputs' devices.
RandomStates random_states_for(const std::vector<torch::Tensor>& inputs) {
  std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(torch::kCPU)};
  for (const torch::Tensor& input : inputs) {
    if (!input.defined() || !input.is_cuda()) continue;
    const at::Generator one = at::globalContext().defaultGenerator(input.device());
    if (std::find(generators.begin(), generators.end(), one) == generators.end()) generators.push_back(one);
  }
  return RandomStates(std::move(generators));
}

struct AutocastSettings {
  struct OfDevice {
    explicit OfDevice(torch::DeviceType type)
        : device(type), enabled(autocast_enabled(type)), dtype(autocast_dtype(type)) {}
    torch::DeviceType device;
    bool enabled;
    torch::ScalarType dtype;
  };
  std::array<OfDevice, 2> devices = {OfDevice(torch::kCPU), OfDevice(torch::kCUDA)};
  bool cache = at::autocast::is_autocast_cache_enabled();

  void set() const {
    for (const OfDevice& one : devices) {
      enable_autocast(one.device, one.enabled);
      set_autocast_dtype(one.device, one.dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache);
  }
};

/// Sets autocast, but without its cache of cast weights: a cast shared between the function and the outside would make
/// the graphs of the two calls leave the function by different edges.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastSettings& settings) {
    settings.set();
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastGuard() { before_.set(); }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastSettings before_;
};

// ---- The node -------------------------------------------------------------------------------------------------------

/// The inputs detached from the graph, and the edges by which their gradients come out.
struct CutInputs {
  explicit CutInputs(const std::vector<torch::Tensor>& inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool needed = inputs[i].defined() && inputs[i].requires_grad();
      tensors.push_back(inputs[i].defined() ? inputs[i].detach().set_requires_grad(needed) : inputs[i]);
      if (needed) edges[torch::autograd::impl::gradient_edge(tensors[i])] = i;
    }
  }
  std::vector<torch::Tensor> tensors;
  EdgeIndex edges;
};

struct CheckpointBackward final : Node {
  std::string name() const override { return "CheckpointBackward"; }
  variable_list apply(variable_list&& gradients) override;
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto& input : inputs) input.reset_data();
    function = nullptr;
  }

  detail::TensorFunction function;  ///< null after release
  std::vector<torch::autograd::SavedVariable> inputs;
  std::vector<std::size_t> differentiable;  ///< the indices of results with gradients
  std::size_t results = 0;
  EdgeIndex captured;  ///< edges out of the function, except to its inputs, and their places among the next edges
  RandomStates random;
  AutocastSettings autocast;

 private:
  edge_list compute_again(const variable_list& gradients, variable_list& root_gradients,
                          std::vector<NodePointer<Collector>>& collectors);
};

/// Recomputes the function. Returns the roots of a graph whose outgoing edges lead to collectors, and the roots'
/// gradients.
edge_list CheckpointBackward::compute_again(const variable_list& gradients, variable_list& root_gradients,
                                            std::vector<NodePointer<Collector>>& collectors) {
  detail::TensorFunction again;
  std::vector<torch::Tensor> saved;
  {
    const std::lock_guard lock(mutex_);
    MANIPLE_REQUIRE(function != nullptr,
                    "checkpoint: backward through a checkpointed function a second time: its inputs were freed by the "
                    "first one; call the first backward with retain_graph = true");
    for (const auto& input : inputs) saved.push_back(input.unpack());
    again = function;
  }
  const CutInputs cut(saved);
  saved.clear();
  const torch::AutoGradMode with_graph(true);
  const Restored outside{random.now()};
  random.restore();
  const AutocastGuard autocast_guard(autocast);
  const NewNodes inside;
  const std::vector<torch::Tensor> outputs = again(cut.tensors);
  MANIPLE_REQUIRE(outputs.size() == results,
                  "checkpoint: the function returned {} tensors when it was computed again in backward, and {} in "
                  "forward; it must do the same both times",
                  outputs.size(), results);
  edge_list roots;
  for (std::size_t i = 0; i < differentiable.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const torch::Tensor& output = outputs[differentiable[i]];
    const bool fits = output.defined() && output.requires_grad() && output.sizes() == gradients[i].sizes();
    MANIPLE_REQUIRE(
        fits,
        "checkpoint: result {} of the function {} when it was computed again in backward; in forward it had "
        "shape [{}] and required a gradient; the function must do the same both times",
        differentiable[i],
        !output.defined()         ? "was undefined"
        : !output.requires_grad() ? "required no gradient"
                                  : format_text("had shape [{}]", joined(output.sizes())),
        joined(gradients[i].sizes()));
    roots.push_back(torch::autograd::impl::gradient_edge(output));
    root_gradients.push_back(gradients[i]);
  }
  visit_leaving_edges(roots, inside, [&](Edge& edge) {
    std::size_t place = 0;
    if (const auto input = cut.edges.find(edge); input != cut.edges.end()) {
      place = input->second;
    } else {
      const auto found = captured.find(edge);
      MANIPLE_REQUIRE(found != captured.end(),
                      "checkpoint: when it was computed again in backward, the function used a parameter or a captured "
                      "tensor ({}) that it did not use in forward; it must do the same both times",
                      edge.function->name());
      place = found->second;
    }
    auto& collector = collectors[place];
    if (!collector) collector = make_node<Collector>(edge);
    edge = Edge(collector, 0);
  });
  return roots;
}

variable_list CheckpointBackward::apply(variable_list&& gradients) {
  MANIPLE_REQUIRE(!torch::GradMode::is_enabled(),
                  "checkpoint: backward with create_graph is not supported through a checkpointed function");
  variable_list root_gradients;
  std::vector<NodePointer<Collector>> collectors(num_outputs());
  const edge_list roots = compute_again(gradients, root_gradients, collectors);
  gradients.clear();
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, false, false, true);
  }
  variable_list result;
  for (auto& collector : collectors) result.push_back(collector ? std::move(collector->gradient) : torch::Tensor());
  return result;
}

}  // namespace

namespace detail {

std::vector<torch::Tensor> checkpoint_tensors(TensorFunction function, const std::vector<torch::Tensor>& inputs,
                                              const ActivationCheckpointOptions& options) {
  if (!torch::GradMode::is_enabled()) return function(inputs);
  const NodePointer<CheckpointBackward> node = make_node<CheckpointBackward>();
  if (options.preserve_random_state) node->random = random_states_for(inputs);

  // Saved before the function runs: if the function changes an input in place, LibTorch reports that in backward.
  for (const torch::Tensor& input : inputs) node->inputs.emplace_back(input, false);
  edge_list next;
  std::vector<torch::Tensor> outputs;
  {
    const CutInputs cut(inputs);
    const NewNodes inside;
    {
      const AutocastGuard autocast_guard(node->autocast);
      outputs = function(cut.tensors);
    }
    edge_list roots;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad()) continue;
      node->differentiable.push_back(i);
      roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    }
    if (roots.empty()) return outputs;
    for (const torch::Tensor& input : inputs) {
      const bool needed = input.defined() && input.requires_grad();
      next.push_back(needed ? torch::autograd::impl::gradient_edge(input) : Edge());
    }
    visit_leaving_edges(roots, inside, [&](const Edge& edge) {
      if (cut.edges.count(edge) != 0) return;
      if (node->captured.emplace(edge, next.size()).second) next.push_back(edge);
    });
  }
  node->results = outputs.size();
  node->function = std::move(function);
  node->set_next_edges(std::move(next));
  for (const std::size_t i : node->differentiable) {
    outputs[i] = outputs[i].tensor_data();  // the same memory, but without the graph, which is dropped here
    torch::autograd::set_history(outputs[i], node);
  }
  return outputs;
}

}  // namespace detail

torch::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, std::int64_t segments, torch::Tensor input,
                                    const ActivationCheckpointOptions& options) {
  const auto count = static_cast<std::int64_t>(modules->size());
  MANIPLE_REQUIRE(segments >= 1 && segments <= count,
                  "checkpoint_sequential: {} modules in {} segments; expected 1 to {} segments", count, segments,
                  count);
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    const auto begin = segment * count / segments, end = (segment + 1) * count / segments;
    const auto run = [all = modules.ptr(), begin, end](torch::Tensor x) {
      for (auto module = all->begin() + begin; module != all->begin() + end; ++module) x = module->forward(x);
      return x;
    };
    input = segment + 1 < segments ? checkpoint(options, run, input) : run(input);
  }
  return input;
}

}  // namespace maniple
