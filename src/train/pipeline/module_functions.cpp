// The functions of torch::nn::Module that a Pipeline refuses.
#include "comm/base/format.h"
#include <maniple/train/pipeline.h>

namespace maniple {
namespace {

void require_all_stages(const char* function, const ProcessGroup& group) {
  if (group.size() == 1) return;
  throw Unsupported(
      format_text("{} of a Pipeline: this rank holds some of its stages; use Checkpoint with "
                  "CheckpointOptions::sharded",
                  function));
}

[[noreturn]] void refuse_conversion() {
  throw InvalidArgument(
      "Pipeline: to() after it was made; convert and move its stages first and make the Pipeline then");
}

}  // namespace

void Pipeline::save(torch::serialize::OutputArchive& archive) const {
  require_all_stages("torch::save", *divided_over());
  torch::nn::Module::save(archive);
}
void Pipeline::load(torch::serialize::InputArchive& archive) {
  require_all_stages("torch::load", *divided_over());
  torch::nn::Module::load(archive);
}

void Pipeline::to(torch::Device, torch::Dtype, bool) { refuse_conversion(); }
void Pipeline::to(torch::Dtype, bool) { refuse_conversion(); }
void Pipeline::to(torch::Device, bool) { refuse_conversion(); }

}  // namespace maniple
