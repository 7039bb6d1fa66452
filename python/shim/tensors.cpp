#include "tensors.h"

#include <algorithm>

#include "device.h"
#include "errors.h"

namespace maniple_torch {
namespace {

struct Element {
  int dtype;
  std::size_t parts;  // elements of `dtype` per tensor element
};

/// For data movement any dtype of the same size works; the ranks compare it.
Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kChar: return {MANIPLE_INT8, 1};
    case at::kShort: return {MANIPLE_INT16, 1};
    case at::kInt: return {MANIPLE_INT32, 1};
    case at::kLong: return {MANIPLE_INT64, 1};
    case at::kByte: return {MANIPLE_UINT8, 1};
    case at::kHalf: return {MANIPLE_FLOAT16, 1};
    case at::kBFloat16: return {MANIPLE_BFLOAT16, 1};
    case at::kFloat: return {MANIPLE_FLOAT32, 1};
    case at::kDouble: return {MANIPLE_FLOAT64, 1};
    case at::kBool: return {MANIPLE_BOOL8, 1};
    case at::kComplexHalf: return {MANIPLE_FLOAT16, 2};
    case at::kComplexFloat: return {MANIPLE_FLOAT32, 2};
    case at::kComplexDouble: return {MANIPLE_FLOAT64, 2};
    default: break;
  }
  switch (c10::elementSize(type)) {
    case 1: return {MANIPLE_UINT8, 1};
    case 2: return {MANIPLE_INT16, 1};
    case 4: return {MANIPLE_INT32, 1};
    default: return {MANIPLE_INT64, c10::elementSize(type) / 8};
  }
}

/// Whether the type can be reduced. Unsigned types above 8 bits, 8-bit floats and other types can only be moved.
bool is_number(at::ScalarType type) {
  return element_of(type).parts == 1 &&
         (type == at::kChar || type == at::kShort || type == at::kInt || type == at::kLong || type == at::kByte ||
          type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble || type == at::kBool);
}

/// The factor is a number or a one-element tensor; PyTorch 1.13 has a list of tensors.
template <class Supplement>
double factor_of(const Supplement& supplement) {
  if constexpr (requires { supplement.tensor_factor; }) {
    if (supplement.tensor_factor.defined()) return supplement.tensor_factor.item().toDouble();
  } else {
    if (!supplement.tensor_factors.empty()) return supplement.tensor_factors.front().item().toDouble();
  }
  return supplement.double_factor;
}

std::string name_of(at::ScalarType type) { return c10::toString(type); }

void require_dense(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse(std::string(op) + ": a tensor is undefined");
  require_served(op, tensor.device());
  if (tensor.layout() != at::kStrided)
    throw Failure(MANIPLE_UNSUPPORTED, std::string(op) + ": a tensor is sparse; pass a dense one (x.to_dense())");
  if (tensor.is_quantized())
    throw Failure(MANIPLE_UNSUPPORTED, std::string(op) + ": a tensor is quantized; pass x.int_repr()");
}

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

/// Whether the tensors are adjacent in one storage.
bool are_consecutive(const std::vector<at::Tensor>& tensors) {
  const char* next = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!is_plain(tensor) || !tensor.is_alias_of(tensors.front())) return false;
    const char* data = static_cast<const char*>(tensor.data_ptr());
    if (next != nullptr && data != next) return false;
    next = data + tensor.nbytes();
  }
  return true;
}

void set_buffer(Memory& memory, void* data, std::int64_t numel, at::ScalarType type) {
  const Element element = element_of(type);
  const int gpu = memory.flat.is_cpu() ? -1 : memory.flat.device().index();
  memory.buffer = {data, static_cast<std::size_t>(numel) * element.parts, element.dtype,
                   gpu < 0 ? MANIPLE_CPU : MANIPLE_CUDA, std::max(gpu, 0)};
}

}  // namespace

void Memory::copy_back() const {
  if (own) return;
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.detach().copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

Memory memory_of(const char* op, const at::Tensor& tensor, Use use) {
  require_dense(op, tensor);
  Memory memory;
  if (is_plain(tensor)) {
    memory.flat = tensor;
  } else {
    const at::NoGradGuard no_grad;
    memory.own = false;
    memory.tensors = {tensor};
    memory.flat = at::empty({tensor.numel()}, tensor.options().memory_format(at::MemoryFormat::Contiguous));
    if (use != Use::out) memory.flat.view(tensor.sizes()).copy_(tensor.detach());
  }
  set_buffer(memory, memory.flat.data_ptr(), tensor.numel(), tensor.scalar_type());
  return memory;
}

int require_served(const char* op, const at::Device& device) {
  if (device.is_cpu()) return -1;
  if (device.is_cuda() && built_for_cuda()) return device.index();
  throw Failure(MANIPLE_UNSUPPORTED, std::string(op) + ": a tensor is on " + device.str() +
                                         ", and this maniple_torch was built for the CPU" +
                                         (built_for_cuda() ? " and NVIDIA GPUs" : "") +
                                         "; combine backends: init_process_group(\"cpu:maniple,cuda:nccl\")");
}

Memory memory_of(const char* op, const std::vector<at::Tensor>& tensors, Use use) {
  if (tensors.empty()) refuse(std::string(op) + ": a list of tensors is empty; expected one for each rank");
  const at::ScalarType type = tensors.front().scalar_type();
  const std::size_t parts = element_of(type).parts;
  Memory memory;
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    require_dense(op, tensor);
    if (tensor.scalar_type() != type)
      refuse(std::string(op) + ": tensors of a list are " + name_of(type) + " and " + name_of(tensor.scalar_type()) +
             "; expected one dtype");
    memory.counts.push_back(static_cast<std::size_t>(tensor.numel()) * parts);
    memory.equal = memory.equal && memory.counts.back() == memory.counts.front();
    total += tensor.numel();
  }
  memory.own = are_consecutive(tensors);
  memory.tensors = tensors;
  if (memory.own) {
    memory.flat = tensors.front();
  } else {
    const at::NoGradGuard no_grad;
    memory.flat = at::empty({total}, tensors.front().options().memory_format(at::MemoryFormat::Contiguous));
    std::int64_t at = 0;
    for (const at::Tensor& tensor : tensors) {
      if (use != Use::out) memory.flat.narrow(0, at, tensor.numel()).view(tensor.sizes()).copy_(tensor.detach());
      at += tensor.numel();
    }
  }
  set_buffer(memory, memory.flat.data_ptr(), total, type);
  return memory;
}

Memory nothing_like(const Memory& other) {
  Memory memory;
  memory.buffer = {nullptr, 0, other.buffer.dtype, other.buffer.device, other.buffer.device_index};
  return memory;
}

maniple_reduce_op reduce_op_of(const char* op, const c10d::ReduceOp& reduce_op, const at::Tensor& tensor) {
  using c10d::ReduceOp;
  const at::ScalarType type = tensor.scalar_type();
  const ReduceOp::RedOpType kind = reduce_op.op_;
  const bool sums = kind == ReduceOp::SUM || kind == ReduceOp::AVG || kind == ReduceOp::PREMUL_SUM;
  if (!is_number(type) && !(at::isComplexType(type) && sums))
    refuse(std::string(op) + ": tensors of " + name_of(type) +
           " can be moved, but not be reduced like this; convert them, to int64 or " + "float32 for instance");
  switch (kind) {
    case ReduceOp::SUM: return {MANIPLE_SUM, 1};
    case ReduceOp::AVG: return {MANIPLE_AVG, 1};
    case ReduceOp::PRODUCT: return {MANIPLE_PRODUCT, 1};
    case ReduceOp::MIN: return {MANIPLE_MIN, 1};
    case ReduceOp::MAX: return {MANIPLE_MAX, 1};
    case ReduceOp::BAND: return {MANIPLE_BAND, 1};
    case ReduceOp::BOR: return {MANIPLE_BOR, 1};
    case ReduceOp::BXOR: return {MANIPLE_BXOR, 1};
    case ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(reduce_op.supplement_.get());
      if (factor == nullptr) refuse(std::string(op) + ": PREMUL_SUM without a factor");
      return {MANIPLE_PREMUL_SUM, factor_of(*factor)};
    }
    default: refuse(std::string(op) + ": reduce op " + std::to_string(static_cast<int>(kind)) + " is not known");
  }
}

const at::Tensor& only(const char* op, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1)
    refuse(std::string(op) + ": expected a list of one tensor, not of " + std::to_string(tensors.size()));
  return tensors.front();
}

const std::vector<at::Tensor>& only(const char* op, const std::vector<std::vector<at::Tensor>>& lists) {
  if (lists.size() != 1)
    refuse(std::string(op) + ": expected one list of tensors, not " + std::to_string(lists.size()));
  return lists.front();
}

}  // namespace maniple_torch
