#include <maniple/train/ddp.h>

#include "base/format.h"
#include "train/ddp/reducer.h"

namespace maniple {

NoSync::NoSync(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) { reducer_->pause(); }
NoSync::~NoSync() { reducer_->resume(); }

namespace detail {

DdpBase::DdpBase(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options)
    : ModuleWrapper("DistributedDataParallel", module), reducer_(Reducer::make(module, std::move(options))) {}
DdpBase::~DdpBase() = default;
DdpBase::DdpBase(DdpBase&&) noexcept = default;
DdpBase& DdpBase::operator=(DdpBase&&) noexcept = default;

NoSync DdpBase::no_sync() { return NoSync(reducer_); }
void DdpBase::set_weight(double weight) { reducer_->set_weight(weight); }
void DdpBase::register_comm_hook(CommHook hook) { reducer_->register_hook(std::move(hook)); }
void DdpBase::apply_optimizer_in_backward(const OptimizerFactory& make) { reducer_->make_optimizers(make); }
std::vector<std::shared_ptr<torch::optim::Optimizer>> DdpBase::optimizers() const { return reducer_->optimizers(); }
// Loading gives parameters other memory, for which LibTorch drops their hooks.
void DdpBase::load(torch::serialize::InputArchive& archive) {
  ModuleWrapper::load(archive);
  reducer_->attach_hooks();
}
void DdpBase::require_unchanged() const { reducer_->require_unchanged(); }
DdpStatistics DdpBase::statistics() const { return reducer_->statistics(); }
const DdpOptions& DdpBase::options() const noexcept { return reducer_->options(); }
const std::shared_ptr<ProcessGroup>& DdpBase::process_group() const noexcept { return reducer_->group(); }

}  // namespace detail

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
