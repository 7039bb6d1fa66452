// A call of a unit's forward, and its nodes in autograd's graph: see unit.h.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "comm/base/check.h"
#include "train/fully_sharded/unit.h"
#include "train/tensor/public_call.h"

namespace maniple::detail {
namespace {

using torch::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// A tensor over the memory of `tensor`, behind `node`. The two share a version counter, so that autograd notices
/// in-place changes of either.
Tensor behind(const Tensor& tensor, const AnyNode& node) {
  Tensor result = tensor.tensor_data();
  torch::autograd::impl::set_version_counter(result, torch::autograd::impl::version_counter(tensor));
  torch::autograd::set_history(result, node);
  return result;
}

/// Passes the tensors that require a gradient through a node of the given kind. Null if there are none.
template <class Kind>
NodePointer<Kind> pass_through(std::vector<Tensor>& tensors, const NodePointer<GatheredBy>& call) {
  torch::autograd::edge_list edges;
  std::vector<Tensor*> passing;
  for (Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    passing.push_back(&tensor);
  }
  if (passing.empty()) return {};
  const NodePointer<Kind> node = make_node<Kind>(call);
  node->set_next_edges(std::move(edges));
  for (Tensor* tensor : passing) *tensor = behind(*tensor, node);
  return node;
}

constexpr const char* kBackward = "the backward of a fully sharded module";

struct ResultsOf final : Node {
  explicit ResultsOf(NodePointer<GatheredBy> given) : call(std::move(given)) {}
  variable_list apply(variable_list&& gradients) override {
    call->enter();
    return std::move(gradients);
  }
  NodePointer<GatheredBy> call;
};

struct ArgumentsOf final : Node {
  explicit ArgumentsOf(NodePointer<GatheredBy> given) : call(std::move(given)) {}
  variable_list apply(variable_list&& gradients) override {
    call->arguments_done();
    return std::move(gradients);
  }
  NodePointer<GatheredBy> call;  // the graph of a tensor that left the unit may need frozen parameters, and end here
};

}  // namespace

// ---- GatheredBy -----------------------------------------------------------------------------------------------------

GatheredBy::GatheredBy(std::shared_ptr<ShardUnit> given) : unit(std::move(given)) {}

GatheredBy::~GatheredBy() {
  if (forward) ForwardCalls::remove(*forward);
  leave();
  let_go();
}

void GatheredBy::release_resources() {
  if (const auto ended = std::exchange(forward, nullptr)) ForwardCalls::remove(*ended);
  leave();
  let_go();
  release_base<Node>(*this);
}

void GatheredBy::enter() {
  const PublicCall call(kBackward);
  const std::lock_guard lock(unit->context().mutex);
  if (torch::GradMode::is_enabled())
    unit->fail("backward with create_graph is not supported: averaging gradients would cut the graph");
  unit->context().enter_backward();
  unit->context().require_success();
  entered_in_ = unit->context().backwards();
  arguments_left_ = arguments;
  if (std::exchange(stage_, Stage::entered) != Stage::outside) return;
  try {
    unit->expose(pointer_to(this), keeps_ && kept_since_ == unit->context().backwards());
  } catch (...) {
    stage_ = Stage::outside;
    throw;
  }
  unit->context().note(pointer_to(this));
}

// Gathers at most once in a backward. LibTorch ignores what the caller throws, so the error waits for GatheredBy or the
// end of backward; until then the graph computes with undefined values, but in memory of the unit.
void GatheredBy::enter_early() noexcept {
  ShardContext& context = unit->context();
  const std::lock_guard lock(context.mutex);
  if (stage_ != Stage::outside || entered_in_ == context.backwards()) return;
  try {
    enter();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    try {
      context.enter_backward();
      context.fail_backward(error);
      unit->expose_undefined(pointer_to(this));
      stage_ = Stage::entered;
      context.note(pointer_to(this));
    } catch (...) {
      // No memory, or no backward: the node reports that its parameters have none.
    }
  }
}

variable_list GatheredBy::apply(variable_list&& gradients) {
  const PublicCall call(kBackward);
  const std::lock_guard lock(unit->context().mutex);
  unit->context().require_success();
  if (stage_ == Stage::outside)
    unit->fail(
        "a tensor that another thread computed in forward has left it otherwise than as a result; compute with the "
        "unit's parameters in the thread that calls forward");
  if (unit->unsynced > 0) {
    unit->accumulate(trained, std::move(gradients));
  } else {
    unit->reduce(trained, std::move(gradients));
  }
  stage_ = Stage::reduced;
  if (arguments_left_ == 0) leave();
  return {};
}

void GatheredBy::arguments_done() {
  const std::lock_guard lock(unit->context().mutex);
  if (--arguments_left_ == 0 && (stage_ == Stage::reduced || trained.empty())) leave();
}

void GatheredBy::leave() noexcept {
  const Stage was = std::exchange(stage_, Stage::outside);
  if (was != Stage::outside) unit->conceal();
  if (was == Stage::reduced || trained.empty()) let_go();
}

void GatheredBy::keep() {
  if (!std::exchange(keeps_, true)) unit->keep();
  kept_since_ = unit->context().backwards();
}

void GatheredBy::let_go() noexcept {
  if (std::exchange(keeps_, false)) unit->let_go();
}

// ---- UnitForward ----------------------------------------------------------------------------------------------------

struct CallNode {
  NodePointer<GatheredBy> pointer;
};

UnitForward::UnitForward(std::shared_ptr<ShardUnit> unit)
    : unit_(std::move(unit)), node_(std::make_unique<CallNode>()), graph_(torch::GradMode::is_enabled()) {
  const PublicCall call("the forward of a fully sharded module");
  const std::lock_guard lock(unit_->context().mutex);
  if (graph_) node_->pointer = make_node<GatheredBy>(unit_);
  unit_->context().enter_forward();
  try {
    unit_->expose(node_->pointer);
  } catch (...) {
    unit_->context().leave_forward();
    throw;
  }
  if (graph_) node_->pointer->forward = ForwardCalls::begin(node_->pointer);
}

UnitForward::~UnitForward() {
  if (finished_) return;
  if (graph_ && node_->pointer->forward->open()) ForwardCalls::end(*node_->pointer->forward);
  unit_->context().leave_forward();
  unit_->conceal();
  try {
    unit_->context().abort(format_text(
        "forward of {} failed on rank {} (its own output says why): the other ranks would wait for its part of the "
        "parameters; make a new group and wrap again, or start again from a checkpoint",
        unit_->text(), unit_->group().rank()));
  } catch (...) {
    // No memory for the text: other ranks wait until their deadline.
  }
}

bool UnitForward::changes_inputs() const noexcept {
  const MixedPrecision& precision = unit_->options().mixed_precision;
  return (precision.param_dtype && precision.cast_forward_inputs) || (graph_ && unit_->has_frozen());
}

std::vector<Tensor> UnitForward::inputs(std::vector<Tensor> tensors) {
  const MixedPrecision& precision = unit_->options().mixed_precision;
  if (precision.param_dtype && precision.cast_forward_inputs) {
    for (Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(*precision.param_dtype);
    }
  }
  if (graph_ && unit_->has_frozen() && pass_through<ArgumentsOf>(tensors, node_->pointer)) ++node_->pointer->arguments;
  return tensors;
}

std::vector<Tensor> UnitForward::finish(std::vector<Tensor> tensors) {
  if (graph_) ForwardCalls::end(*node_->pointer->forward);
  for (Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (unit_->owns(tensor))
      throw InvalidArgument(
          format_text("fully_shard: forward of {} returns one of its parameters, or a view of one, which is whole only "
                      "while the unit computes; return a clone() of it, or make the unit larger",
                      unit_->text()));
    const auto dtype = unit_->options().mixed_precision.output_dtype;
    if (dtype && tensor.is_floating_point()) tensor = tensor.to(*dtype);
  }
  const std::lock_guard lock(unit_->context().mutex);
  const bool passed = graph_ && pass_through<ResultsOf>(tensors, node_->pointer);
  // After expose() only the graph and the parameters hold pointers to the node.
  if (graph_ && !passed) {
    const auto own = 1 + static_cast<std::int64_t>(node_->pointer->trained.size());
    if (static_cast<std::int64_t>(node_->pointer.use_count()) > own)
      throw InvalidArgument(format_text(
          "fully_shard: forward of {} returns no tensor that requires a gradient, but keeps some that need its "
          "parameters; return them: as tensors, or in tuples, vectors, maps and optionals (tensor_nest.h)",
          unit_->text()));
  }
  // Inside a backward (activation checkpointing recomputes) the unit is needed again at once.
  if (passed && (unit_->context().in_backward() || !unit_->reshards())) node_->pointer->keep();
  finished_ = true;
  unit_->conceal();
  unit_->context().leave_forward();
  return tensors;
}

// ---- Guards ---------------------------------------------------------------------------------------------------------

}  // namespace maniple::detail

namespace maniple {

UnitsNoSync::UnitsNoSync(std::vector<std::shared_ptr<detail::ShardUnit>> units) : units_(std::move(units)) {
  for (const auto& unit : units_) {
    ++unit->unsynced;
    unit->waiting = true;
  }
}
UnitsNoSync::~UnitsNoSync() {
  for (const auto& unit : units_) --unit->unsynced;
}

namespace {

void conceal(const std::vector<std::shared_ptr<detail::ShardUnit>>& units) {
  for (const auto& unit : units) {
    const std::lock_guard lock(unit->context().mutex);
    unit->conceal();
  }
}

}  // namespace

Unsharded::Unsharded(std::vector<std::shared_ptr<detail::ShardUnit>> units) {
  const PublicCall call("unshard, which all ranks call");
  try {
    for (auto& unit : units) {
      const std::lock_guard lock(unit->context().mutex);
      unit->expose(nullptr);
      units_.push_back(std::move(unit));
    }
  } catch (...) {
    conceal(units_);
    throw;
  }
}
Unsharded::~Unsharded() { conceal(units_); }

}  // namespace maniple
