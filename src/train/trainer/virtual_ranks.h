// Training over virtual ranks (docs/elastic.md): DataParallel, with results that do not depend on the number of ranks.
//
// In a step each rank computes the batches of its virtual ranks in turn:
//
//   begin_batch    seeds the random generators by (seed, step, virtual rank); restores the buffers that the module had
//                  at the beginning of the step
//   end_batch      takes the gradients, except after the last turn, whose backward averages (tree_average.h)
//   finish_backward   gives all ranks the buffers that virtual rank 0 has left
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "train/ddp/parameter.h"
#include "train/ddp/virtual_tree.h"
#include "train/restored.h"
#include "train/trainer/strategy.h"

namespace maniple::trainer {

class VirtualRanksStrategy final : public TrainerStrategy {
 public:
  VirtualRanksStrategy(Given given, const std::shared_ptr<ProcessGroup>& group, const DdpOptions& ddp,
                       const TrainerOptions& options);
  ~VirtualRanksStrategy() override;

  const VirtualRanks* virtual_ranks() const override { return &own_; }
  int data_ranks() const override { return own_.total; }
  std::shared_ptr<void> begin() override;
  void require_usable(const detail::TrainerData& data) const override;
  Accumulation accumulation(int batches) override;
  void verify_bits(const detail::TrainerBatch& batch) override;
  void assume_same_bits() override { verified_ = true; }
  void begin_step() override;
  void end_step() override { buffers_before_ = TensorValues(); }
  void undo_step() override;
  void begin_batch(std::int64_t step, int turn) override;
  torch::Tensor backward(const detail::TrainerBatch& batch, Metrics& metrics, const Scaled& scaled) override;
  void end_batch() override;
  void finish_backward() override;
  std::string nonfinite_in(const detail::TrainerBatch& batch) override;
  std::string bits_text() const override;
  void load_bits_text(const std::string& text) override;

 private:
  using Facts = std::map<std::string, std::string>;
  Facts facts() const;
  void differ(const std::string& what);
  std::vector<torch::Tensor> buffers() const { return given_.model.module->buffers(); }
  std::string probe(const detail::TrainerBatch& batch);
  void seed(std::uint64_t kind, std::int64_t step, int virtual_rank) const;

  VirtualRanks own_;
  int threads_;
  bool allow_different_bits_;
  std::int64_t seed_;  ///< of the random generators; rank 0's when the trainer was made, or the checkpoint's
  bool verified_ = false;
  bool warned_ = false;

  // The step in progress.
  int turn_ = 0;
  TensorValues buffers_before_;  ///< at the beginning of the step; may be empty with one turn
  TensorValues buffers_after_;   ///< after virtual rank 0; empty on other ranks
  Replicator replicated_;        ///< the buffers

  // Used without a group: the reducer needs one.
  VirtualSums sums_;
  std::vector<torch::Tensor> parameters_;
  std::vector<bool> used_;
};

}  // namespace maniple::trainer
