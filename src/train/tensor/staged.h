// From at::Tensor to Buffer and back.
//
// A group works on contiguous memory. A tensor that is contiguous is used where it lies; any other is *staged*: it
// travels through a contiguous copy, which is written back once the operation is done. A list of tensors is staged as
// one piece of memory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/types.h>

namespace maniple {

enum class Access { read, write, read_write };

/// Where a tensor was passed, for messages: "all_gather: tensor_list[2]".
struct Argument {
  const char* operation;
  const char* name;
  int index = -1;
};

std::string named(const Argument& argument);

/// The dtype that the group sees. Throws InvalidArgument for one that it does not have.
DType dtype_of(const torch::Tensor& tensor, const Argument& argument);

/// Throws unless a group can work on the tensor: it must be defined, strided and not quantized.
void require_usable(const torch::Tensor& tensor, const Argument& argument);

class Staged {
 public:
  Staged() = default;
  Staged(const torch::Tensor& tensor, Access access, const Argument& argument);
  /// All tensors one after the other; `counts` holds their elements. All must have the same dtype.
  Staged(const std::vector<torch::Tensor>& tensors, Access access, const Argument& argument);

  Buffer buffer() const noexcept { return buffer_; }
  bool defined() const noexcept { return !tensors_.empty(); }
  std::string name() const { return named(argument_); }
  bool writes_back() const noexcept { return writes_ && copied_; }
  bool complex() const noexcept { return complex_; }

  /// Elements of each tensor of a list, as the group counts them.
  const std::vector<std::size_t>& counts() const noexcept { return counts_; }

  /// After the operation: the tensors hold what the operation left in buffer().
  void write_back() const;

 private:
  std::vector<torch::Tensor> tensors_;  // the caller's, kept alive
  torch::Tensor memory_;                // contiguous
  bool copied_ = false;
  bool writes_ = false;
  bool complex_ = false;
  Buffer buffer_;
  Argument argument_{"", ""};
  std::vector<std::size_t> counts_;
};

}  // namespace maniple
