#include <maniple/train/ddp.h>

#include "base/check.h"
#include "train/ddp/reducer.h"

namespace maniple {

NoSync::NoSync(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) { reducer_->pause(); }
NoSync::~NoSync() { reducer_->resume(); }

DdpCore::DdpCore(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options) {
  MANIPLE_REQUIRE(module != nullptr, "DistributedDataParallel: the module is null");
  reducer_ = Reducer::make(module, std::move(options));
}
DdpCore::~DdpCore() = default;
DdpCore::DdpCore(DdpCore&&) noexcept = default;
DdpCore& DdpCore::operator=(DdpCore&&) noexcept = default;

NoSync DdpCore::no_sync() { return NoSync(reducer_); }
void DdpCore::set_weight(double weight) { reducer_->set_weight(weight); }
void DdpCore::register_comm_hook(CommHook hook) { reducer_->register_hook(std::move(hook)); }
void DdpCore::apply_optimizer_in_backward(const OptimizerFactory& make) { reducer_->make_optimizers(make); }
const std::vector<std::shared_ptr<torch::optim::Optimizer>>& DdpCore::optimizers() const noexcept {
  return reducer_->optimizers();
}
void DdpCore::require_unchanged() const { reducer_->require_unchanged(); }
DdpStatistics DdpCore::statistics() const { return reducer_->statistics(); }
const DdpOptions& DdpCore::options() const noexcept { return reducer_->options(); }
const std::shared_ptr<ProcessGroup>& DdpCore::process_group() const noexcept { return reducer_->group(); }

std::string DdpStatistics::text() const {
  std::string result = format_text("{} ranks, {} parameters, {:.2f} MiB of gradients in {} bucket{}, overlap {}\n",
                                   ranks, parameters, static_cast<double>(gradient_bytes) / (1024 * 1024),
                                   buckets.size(), buckets.size() == 1 ? "" : "s", overlap);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    result += format_text("  bucket {}: {} {:.2f} MiB, {} parameters, {} .. {}\n", i, bucket.dtype,
                          static_cast<double>(bucket.bytes) / (1024 * 1024), bucket.parameters.size(),
                          bucket.parameters.front(), bucket.parameters.back());
  }
  result += format_text(
      "  {} synchronised backwards: {:.3f} ms each, {:.3f} ms communicating, {:.3f} ms waiting for it, {:.0f} % "
      "hidden\n",
      backwards, backward_ms, comm_ms, wait_ms, 100 * overlap_fraction());
  return result;
}

}  // namespace maniple
