#include "train/ddp/bucket.h"

#include "base/check.h"
#include "tensor/staged.h"
#include "tensor/torch_compat.h"

namespace maniple {
namespace {

/// A tensor on registered memory, which lives as long as the tensor does.
torch::Tensor tensor_on(const RegisteredMemory& memory, std::size_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides, const torch::Tensor& like) {
  void* data = static_cast<std::byte*>(memory.data()) + offset;
  return torch::from_blob(data, sizes, strides, [memory](void*) {}, like.options().requires_grad(false));
}

}  // namespace

Bucket::Bucket(int index, bool is_last, const PlannedBucket& plan, std::span<const Parameter> parameters,
               const RegisteredMemory& memory, std::size_t offset, bool gradients_live_here)
    : index_(index), is_last_(is_last), gradients_live_here_(gradients_live_here), members_(plan.members) {
  for (const std::size_t member : members_) {
    names_.push_back(parameters[member].name);
    parameters_.push_back(parameters[member].tensor);
  }
  const torch::Tensor& like = parameters_.front();
  const auto total = static_cast<std::int64_t>(plan.elements);
  flat_ = tensor_on(memory, offset, {total}, {1}, like);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const torch::Tensor& parameter = parameters_[i];
    const std::size_t at = offset + plan.offsets[i] * like.element_size();
    const auto strides =
        is_dense(parameter) ? parameter.strides().vec() : torch::empty(parameter.sizes(), torch::kMeta).strides().vec();
    views_.push_back(tensor_on(memory, at, parameter.sizes(), strides, like));
  }
  const torch::Tensor reals = flat_.is_complex() ? torch::view_as_real(flat_) : flat_;
  buffer_ = {flat_.data_ptr(), static_cast<std::size_t>(reals.numel()),
             dtype_of(flat_, {"DistributedDataParallel", "gradient"})};
}

GradBucket Bucket::for_hook() const { return GradBucket(flat_, index_, is_last_, parameters_, views_, names_); }

bool Bucket::lives_here(const torch::Tensor& gradient, std::size_t i) const {
  return gradient.data_ptr() == views_[i].data_ptr() && gradient.strides() == views_[i].strides();
}

void Bucket::copy_in(std::size_t i) {
  torch::Tensor& gradient = parameters_[i].mutable_grad();
  if (!gradient.defined()) {
    views_[i].zero_();
    return;
  }
  MANIPLE_REQUIRE(gradient.layout() == torch::kStrided,
                  "DistributedDataParallel: the gradient of {} is sparse, which is not supported; make "
                  "its embedding with sparse(false)",
                  names_[i]);
  MANIPLE_REQUIRE(gradient.scalar_type() == views_[i].scalar_type() && gradient.sizes() == views_[i].sizes() &&
                      gradient.device().is_cpu(),
                  "DistributedDataParallel: parameter {} has changed since the first backward (its gradient is {} [{}] "
                  "on {}, it was {} "
                  "[{}] on cpu); convert the module before wrapping it",
                  names_[i], c10::toString(gradient.scalar_type()), joined(gradient.sizes()), gradient.device().str(),
                  c10::toString(views_[i].scalar_type()), joined(views_[i].sizes()));
  if (lives_here(gradient, i)) return;
  views_[i].copy_(gradient);
  if (gradients_live_here_) gradient = views_[i];
}

void Bucket::copy_out(std::size_t i) const {
  torch::Tensor& gradient = parameters_[i].mutable_grad();
  if (gradients_live_here_) {
    if (!gradient.defined() || !lives_here(gradient, i)) gradient = views_[i];
  } else if (gradient.defined()) {
    gradient.copy_(views_[i]);
  } else {
    gradient = views_[i].clone();
  }
}

void Bucket::drop_gradients() {
  for (torch::Tensor& parameter : parameters_) parameter.mutable_grad() = torch::Tensor();
}

torch::Tensor Bucket::saved(std::size_t i) const {
  const torch::Tensor gradient = parameters_[i].grad();
  return gradient.defined() && gradients_live_here_ ? gradient.clone() : torch::Tensor();
}

}  // namespace maniple
