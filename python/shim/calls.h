// Functions shared by the backend's operations: sizes, lists of counts, several operations as one.
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "tensors.h"
#include "work.h"

namespace maniple_torch {

// Operations up to this many bytes are deferred (work.h); for larger ones the cost of a thread switch is negligible.
inline constexpr std::size_t kDeferredBytes = std::size_t{256} << 10;

inline std::size_t bytes_of(const Memory& memory) { return memory.flat.defined() ? memory.flat.nbytes() : 0; }

/// The counts of all_to_all_single: split sizes are rows of the first dimension; without them, equal parts.
inline std::vector<std::size_t> counts_of_splits(const char* op, const char* which, const at::Tensor& tensor,
                                                 const std::vector<int64_t>& splits, const Memory& memory, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size != 0)
      refuse(std::string(op) + ": the first dimension of the " + which + " is " + std::to_string(rows) +
             ", which cannot be divided by " + std::to_string(size) + " ranks; pass split sizes");
    return std::vector<std::size_t>(ranks, memory.buffer.count / ranks);
  }
  if (splits.size() != ranks)
    refuse(std::string(op) + ": " + std::to_string(splits.size()) + " split sizes of the " + which + " for " +
           std::to_string(size) + " ranks");
  std::vector<std::size_t> counts;
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0) refuse(std::string(op) + ": a split size of the " + which + " is negative");
    sum += split;
    counts.push_back(
        rows == 0 ? 0 : memory.buffer.count / static_cast<std::size_t>(rows) * static_cast<std::size_t>(split));
  }
  if (sum != rows)
    refuse(std::string(op) + ": the split sizes of the " + which + " add up to " + std::to_string(sum) +
           ", and its first dimension is " + std::to_string(rows));
  return counts;
}

/// Runs several operations as one. They run in order, so the last one's work stands for all.
template <class One>
maniple_error* run_all(std::size_t count, maniple_work** work, One&& one) {
  for (std::size_t i = 0; i < count; ++i) {
    maniple_work* each = nullptr;
    if (maniple_error* error = one(i, work == nullptr ? nullptr : &each)) return error;
    if (work != nullptr && i + 1 < count) maniple_work_free(each);
    if (work != nullptr && i + 1 == count) *work = each;
  }
  return nullptr;
}

/// The device of an operation's tensors. Refuses tensors on different devices.
inline at::Device device_of(const char* op, const Operation& operation) {
  const at::Tensor* first = nullptr;
  for (const auto* list : {&operation.tensors, &operation.outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) continue;
      if (first == nullptr) first = &tensor;
      if (tensor.device() != first->device())
        refuse(std::string(op) + ": tensors are on " + first->device().str() + " and " + tensor.device().str() +
               "; expected one device");
    }
  }
  return first == nullptr ? at::Device(at::kCPU) : first->device();
}

inline maniple_error* is_gone() {
  return maniple_error_new(MANIPLE_ABORTED, "the process group was destroyed with this operation under way");
}

inline void require_dtype(const char* op, const at::Tensor& input, const at::Tensor& output) {
  if (input.scalar_type() != output.scalar_type())
    refuse(std::string(op) + ": the output is " + c10::toString(output.scalar_type()) + " and the input " +
           c10::toString(input.scalar_type()) + "; expected one dtype");
}

}  // namespace maniple_torch
