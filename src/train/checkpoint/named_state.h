// A part of a checkpoint in memory: tensors and short texts by name, as a safetensors file holds them.
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

/// A copy in memory of its own, on the CPU, contiguous: what is saved does not change while training goes on.
NamedState snapshot_of(const NamedState& state);

/// As safetensors spells it: "F32". A type that the format has not: LibTorch's name, which is refused later.
std::string safetensors_dtype(torch::ScalarType type);
/// Throws ProtocolError naming the tensor.
torch::ScalarType scalar_type_of(const std::string& dtype, const std::string& tensor);

/// `state` as snapshot_of gives it.
FileDigest write_state(const std::string& path, const NamedState& state);

/// Throws ProtocolError, SystemError, or InvalidArgument for anything but a regular file, naming it and what is wrong.
NamedState read_state(const std::string& path);

// Numbers as text, exactly.
std::string text_of(double value);
std::string text_of(std::int64_t value);
double real_of(const std::string& text);           ///< throws ProtocolError
std::int64_t integer_of(const std::string& text);  ///< throws ProtocolError

// An optimizer as tensors and numbers, and back: options of every parameter group, state of every parameter. A new kind
// of optimizer is one visitor for its options, one for its state, and one line in the table of optimizer_state.cpp.

/// Throws Unsupported for a kind that is not in the table, naming those that are.
NamedState state_of(torch::optim::Optimizer& optimizer);

/// Throws InvalidArgument naming what does not fit: another kind, other groups, other parameters.
void restore(torch::optim::Optimizer& optimizer, const NamedState& state);

/// The parameter that a tensor of such a state belongs to; undefined if there is none.
torch::Tensor parameter_of_state(const torch::optim::Optimizer& optimizer, const std::string& name);

}  // namespace maniple
