// Error feedback: what a lossy hook left out of a gradient on this rank, to be added to the next one.
//
// One flat tensor for each bucket, laid out as the bucket is; by name each parameter's part can be taken out and put back,
// so that it survives a restart in which buckets come out differently.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/train/comm_hooks.h>

namespace maniple {

class ErrorMemory {
 public:
  using Named = std::map<std::string, torch::Tensor>;
  static constexpr std::string_view kPrefix = "error/";  ///< of the names in a hook's state

  /// The bucket's errors, of `dtype`; zeros at first, or what was loaded for its parameters. Throws InvalidArgument, naming
  /// the parameter, if that has another shape.
  torch::Tensor& of(const GradBucket& bucket, torch::ScalarType dtype);

  /// Collective: every rank's errors become the average of all.
  void average(ProcessGroup& group);

  Named copies() const;
  void load(Named named);

 private:
  struct One {
    torch::Tensor flat;
    std::vector<std::pair<std::string, torch::Tensor>> parts;  // views of it
  };
  std::map<int, One> buckets_;
  Named loaded_;  // for buckets that have not come yet
};

/// A view of `flat`, which is laid out as the bucket's buffer, in the place and shape of its i-th gradient.
torch::Tensor part_of(const torch::Tensor& flat, const GradBucket& bucket, std::size_t i);

}  // namespace maniple
