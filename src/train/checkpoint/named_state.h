// The state of a checkpoint part in memory: tensors and short texts by name, as a safetensors file holds them.
#pragma once

#include <map>
#include <string>

#include <torch/torch.h>

#include "train/disk_file.h"

namespace maniple {

struct NamedState {
  std::map<std::string, torch::Tensor> tensors;
  std::map<std::string, std::string> texts;
};

/// A contiguous copy on the CPU in its own memory, so that the saved state does not change while training continues.
NamedState snapshot_of(const NamedState& state);

/// The dtype's name in safetensors: "F32". For a dtype that the format does not have, LibTorch's name, which is refused
/// later.
std::string safetensors_dtype(torch::ScalarType type);
/// Throws ProtocolError naming the tensor.
torch::ScalarType scalar_type_of(const std::string& dtype, const std::string& tensor);

/// `state` must come from snapshot_of().
FileDigest write_state(const std::string& path, const NamedState& state);

/// Throws ProtocolError, SystemError, or InvalidArgument for anything but a regular file, naming the file and what is
/// wrong.
NamedState read_state(const std::string& path);

// Exact conversion of numbers to text and back.
std::string text_of(double value);
std::string text_of(std::int64_t value);
double real_of(const std::string& text);           ///< throws ProtocolError
std::int64_t integer_of(const std::string& text);  ///< throws ProtocolError

// Conversion of an optimizer to tensors and numbers, and back: options of every parameter group, state of every
// parameter. A new kind of optimizer needs a visitor for its options, a visitor for its state, and a row in the table
// of optimizer_state.cpp.

/// Throws Unsupported for an optimizer that is not in the table; the error text lists the supported ones.
NamedState state_of(torch::optim::Optimizer& optimizer);

/// Throws InvalidArgument naming the mismatch: the kind of optimizer, the groups or the parameters.
void restore(torch::optim::Optimizer& optimizer, const NamedState& state);

/// The parameter to which a tensor of such a state belongs; undefined if there is none.
torch::Tensor parameter_of_state(const torch::optim::Optimizer& optimizer, const std::string& name);

}  // namespace maniple
