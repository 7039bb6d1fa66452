// What the states of lossy hooks share: error feedback, and the count of bytes sent.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/train/comm_hooks.h>

namespace maniple {

/// Error feedback: what a hook left out of a gradient on this rank, to be added to the next one. One flat tensor for each
/// bucket, laid out as the bucket is. Each parameter's part can be saved and loaded by name, so that it survives a restart with
/// other buckets.
class ErrorFeedback {
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
  Named loaded_;  // for buckets that no backward has used yet
};

/// A view of `flat`, which is laid out as the bucket's buffer, in the place and shape of its i-th gradient.
torch::Tensor part_of(const torch::Tensor& flat, const GradBucket& bucket, std::size_t i);

/// What a rank of n sends in an all_reduce of so many bytes.
inline std::uint64_t all_reduce_sends(std::uint64_t bytes, int n) noexcept {
  return 2 * bytes * static_cast<std::uint64_t>(n - 1) / static_cast<std::uint64_t>(n);
}

inline void count_plain(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.plain_bytes += all_reduce_sends(bytes, n);
}

inline void count_all_reduce(HookTraffic& traffic, std::uint64_t bytes, int n) noexcept {
  traffic.sent_bytes += all_reduce_sends(bytes, n);
}

}  // namespace maniple
