#include "train/tensor/staged.h"

#include "comm/base/check.h"
#include "train/tensor/device.h"
#include "train/tensor/torch_compat.h"

namespace maniple {

std::string named(const Argument& argument) {
  return argument.index < 0 ? format_text("{}: {}", argument.operation, argument.name)
                            : format_text("{}: {}[{}]", argument.operation, argument.name, argument.index);
}

namespace {

std::string text_of(c10::ScalarType dtype) { return c10::toString(dtype); }

bool lies_ready(const torch::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

/// A contiguous tensor as real numbers.
torch::Tensor as_reals(const torch::Tensor& tensor) {
  return tensor.is_complex() ? torch::view_as_real(tensor) : tensor;
}

}  // namespace

DType dtype_of(const torch::Tensor& tensor, const Argument& argument) {
  switch (tensor.scalar_type()) {
    case torch::kInt8: return DType::int8;
    case torch::kInt16: return DType::int16;
    case torch::kInt32: return DType::int32;
    case torch::kInt64: return DType::int64;
    case torch::kUInt8: return DType::uint8;
    case torch::kFloat16: return DType::float16;
    case torch::kBFloat16: return DType::bfloat16;
    case torch::kFloat32:
    case c10::ScalarType::ComplexFloat: return DType::float32;
    case torch::kFloat64:
    case c10::ScalarType::ComplexDouble: return DType::float64;
    case torch::kBool: return DType::bool8;
    case c10::ScalarType::ComplexHalf: return DType::float16;
    default: break;
  }
  throw InvalidArgument(
      format_text("{} is a tensor of {}, which cannot be communicated; convert it to one of float16, bfloat16, "
                  "float32, float64, int8, int16, int32, int64, uint8, bool",
                  named(argument), text_of(tensor.scalar_type())));
}

void require_usable(const torch::Tensor& tensor, const Argument& argument) {
  MANIPLE_REQUIRE(tensor.defined(), "{} is an undefined tensor; give it memory first (torch::empty)", named(argument));
  MANIPLE_REQUIRE(!tensor.is_quantized(), "{} is a quantized tensor ({}); pass its int_repr() or dequantize() it",
                  named(argument), text_of(tensor.scalar_type()));
  MANIPLE_REQUIRE(tensor.layout() == torch::kStrided,
                  "{} is a tensor of {} elements with a sparse layout; pass its values and indices, "
                  "or to_dense()",
                  named(argument), text_of(tensor.scalar_type()));
  MANIPLE_REQUIRE(!tensor.is_meta(), "{} is on the meta device and has no elements; materialise it first",
                  named(argument));
  device_of(tensor, argument);
}

Staged::Staged(const torch::Tensor& tensor, Access access, const Argument& argument)
    : tensors_{tensor}, writes_(access != Access::read), argument_(argument) {
  const torch::NoGradGuard no_grad;
  require_usable(tensor, argument);
  const DType dtype = dtype_of(tensor, argument);
  complex_ = tensor.is_complex();
  copied_ = !lies_ready(tensor);
  torch::Tensor ready = tensor;
  if (copied_ && access == Access::write) {
    ready = torch::empty(tensor.sizes(), tensor.options().requires_grad(false));
  } else if (copied_) {
    ready = torch::empty(tensor.sizes(), tensor.options().requires_grad(false)).copy_(tensor);
  }
  memory_ = as_reals(ready);
  buffer_ = {memory_.data_ptr(), static_cast<std::size_t>(memory_.numel()), dtype, device_of(tensor, argument)};
  if (writes_ && !copied_) bump_version(tensor);
}

Staged::Staged(const std::vector<torch::Tensor>& tensors, Access access, const Argument& argument)
    : tensors_(tensors), copied_(true), writes_(access != Access::read), argument_(argument) {
  const torch::NoGradGuard no_grad;
  MANIPLE_REQUIRE(!tensors.empty(), "{} is empty; expected one tensor for each rank", named(argument));
  DType dtype = DType::uint8;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Argument element{argument.operation, argument.name, static_cast<int>(i)};
    require_usable(tensors[i], element);
    const DType own = dtype_of(tensors[i], element);
    MANIPLE_REQUIRE(i == 0 || tensors[i].scalar_type() == tensors[0].scalar_type(),
                    "{} is a tensor of {}, but {}[0] is one of {}", named(element), text_of(tensors[i].scalar_type()),
                    argument.name, text_of(tensors[0].scalar_type()));
    MANIPLE_REQUIRE(tensors[i].device() == tensors[0].device(), "{} is on {}, but {}[0] is on {}", named(element),
                    tensors[i].device().str(), argument.name, tensors[0].device().str());
    dtype = own;
    total += tensors[i].numel();
  }
  complex_ = tensors[0].is_complex();
  const std::size_t reals = complex_ ? 2 : 1;
  for (const torch::Tensor& tensor : tensors) counts_.push_back(tensor.numel() * reals);
  torch::Tensor flat = torch::empty({total}, tensors[0].options().requires_grad(false));
  if (access != Access::write) {
    std::int64_t at = 0;
    for (const torch::Tensor& tensor : tensors) {
      flat.narrow(0, at, tensor.numel()).view(tensor.sizes()).copy_(tensor);
      at += tensor.numel();
    }
  }
  memory_ = as_reals(flat);
  buffer_ = {memory_.data_ptr(), static_cast<std::size_t>(memory_.numel()), dtype, device_of(tensors[0], argument)};
}

void Staged::write_back() const {
  if (!writes_ || !copied_) return;
  const torch::NoGradGuard no_grad;
  const torch::Tensor flat = (complex_ ? torch::view_as_complex(memory_) : memory_).view({-1});
  std::int64_t at = 0;
  for (const torch::Tensor& tensor : tensors_) {
    torch::Tensor to = tensor.detach();
    to.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

}  // namespace maniple
