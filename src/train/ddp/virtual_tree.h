// The fixed binary tree along which gradients of virtual ranks are added. Floating-point addition is not associative:
// a sum has the same bits on every number of ranks only if the additions are the same.
//
// Node (level, index) is the sum over the virtual ranks index * 2^level to (index + 1) * 2^level - 1, as far as they
// exist. A node without a right child is equal to its left child. The root is the node of level ceil(log2 total).
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <torch/types.h>

namespace maniple {

struct TreeNode {
  int level = 0;
  int index = 0;
  bool operator==(const TreeNode&) const = default;
};

/// Nodes of consecutive virtual ranks. Nodes that become complete replace their children, as in a binary counter, so a
/// range of n virtual ranks has at most 2 log2 n nodes.
class TreeNodes {
 public:
  explicit TreeNodes(int total) : total_(total) {}

  /// Appends the node of the next virtual ranks. Calls add(i) for each addition that this makes possible: node i
  /// becomes the sum of nodes i and i + 1, and node i + 1 is removed.
  template <class Add>
  void append(TreeNode node, const Add& add) {
    nodes_.push_back(node);
    while (rises()) {
      TreeNode& last = nodes_.back();
      if (last.index % 2 != 0) {
        nodes_.pop_back();
        add(nodes_.size() - 1);
      }
      TreeNode& top = nodes_.back();
      top = {top.level + 1, top.index / 2};
    }
  }

  const std::vector<TreeNode>& all() const noexcept { return nodes_; }
  void clear() noexcept { nodes_.clear(); }

 private:
  /// Whether the last node and those before it determine their parent.
  bool rises() const {
    const TreeNode& last = nodes_.back();
    if (last.index % 2 != 0)
      return nodes_.size() > 1 && nodes_[nodes_.size() - 2] == TreeNode{last.level, last.index - 1};
    const bool is_root = last.index == 0 && (1LL << last.level) >= total_;
    return !is_root && (static_cast<long long>(last.index) + 1) << last.level >= total_;
  }

  int total_;
  std::vector<TreeNode> nodes_;
};

/// Sums of gradients over the virtual ranks of one rank: for each node, one tensor per parameter.
class VirtualSums {
 public:
  VirtualSums(int total, int first) : nodes_(total), first_(first) {}

  /// Takes the gradients of the next virtual rank; adds to them in place.
  void append(std::vector<torch::Tensor> gradients);
  int appended() const noexcept { return appended_; }
  const std::vector<TreeNode>& nodes() const noexcept { return nodes_.all(); }
  const std::vector<std::vector<torch::Tensor>>& sums() const noexcept { return sums_; }
  void clear() noexcept;

  /// Takes the gradient out of the parameter. Zeros if there is none: a virtual rank that does not use a parameter adds
  /// zero, also where that changes -0 to 0.
  static torch::Tensor taken_from(torch::Tensor& parameter);

 private:
  TreeNodes nodes_;
  int first_;
  int appended_ = 0;
  std::vector<std::vector<torch::Tensor>> sums_;
};

}  // namespace maniple
