// The average of gradients over virtual ranks, instead of the all_reduce of DistributedDataParallel.
//
// Each rank adds the gradients of its virtual ranks as far as the tree (virtual_tree.h) allows, which leaves one or a
// few nodes. The ranks exchange their nodes as bytes, so every backend will do, and add them along the same tree:
//
//   one rank           nothing to exchange
//   two, a node each   all_reduce: a sum of two numbers does not depend on their order
//   small buckets      all_gather of all nodes; every rank adds them
//   otherwise          all_to_all, after which rank r has slice r of all nodes; it adds them; then all_gather of the
//                      slices. With one node per rank this moves the bytes of an all_reduce.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <torch/types.h>

#include "train/ddp/bucket.h"
#include "train/ddp/virtual_tree.h"
#include <maniple/comm/process_group.h>
#include <maniple/train/virtual_ranks.h>

namespace maniple {

class TreeAverage {
 public:
  TreeAverage(std::shared_ptr<ProcessGroup> group, int total);

  const VirtualRanks& own() const noexcept { return own_; }
  /// Takes the gradients of a virtual rank, one per parameter. The last virtual rank of this rank is not kept: its
  /// gradients are in the buckets.
  void keep(std::vector<torch::Tensor> gradients) { kept_.append(std::move(gradients)); }
  /// Whether all virtual ranks of this rank but the last are kept.
  bool is_last_turn() const noexcept { return kept_.appended() == own_.count - 1; }
  void clear() noexcept { kept_.clear(); }

  /// Begins the exchange of a bucket, which holds the gradients of the last virtual rank. Collective; all ranks launch
  /// the buckets in the same order. Returns an invalid Work if the exchange is over.
  Work launch(const Bucket& bucket, bool async);
  /// Leaves the average in the bucket. Called when the launched exchange is over, for the buckets in their order.
  /// Collective.
  void finish(const Bucket& bucket);

 private:
  enum class Way { alone, pair, gather, slices };
  struct Exchange {
    torch::Tensor send, received;
  };

  std::size_t size() const noexcept { return nodes_of_.size(); }
  Way way_of(const Bucket& bucket) const;
  std::int64_t slice_begin(const torch::Tensor& flat, std::size_t rank) const;
  torch::Tensor packed(const Bucket& bucket) const;

  std::shared_ptr<ProcessGroup> group_;
  VirtualRanks own_;
  std::vector<std::vector<TreeNode>> nodes_of_;  ///< by rank
  std::size_t all_nodes_ = 0;
  VirtualSums kept_;
  std::vector<Exchange> exchanges_;  ///< by bucket
};

}  // namespace maniple
