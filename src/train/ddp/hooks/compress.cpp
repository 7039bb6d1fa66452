// Gradients that travel with fewer bits.
//
// Each rank rounds its gradient to the short type; the engine adds in float32, divides, and rounds once; the result is
// widened again. Gradients that are short already are averaged as they are. Cost: half the bytes (a quarter for
// float64), two passes over the bucket.
#include <maniple/train/comm_hooks.h>

namespace maniple {
namespace {

CommHook compress_to(torch::ScalarType short_type) {
  return [short_type](GradBucket& bucket, CommContext& comm) {
    const torch::Tensor buffer = bucket.buffer();
    const bool pays = buffer.scalar_type() == torch::kFloat32 || buffer.scalar_type() == torch::kFloat64;
    if (!pays) return comm.all_reduce(buffer, ReduceOp::avg);
    const torch::Tensor rounded = buffer.to(short_type);
    return comm.then(comm.all_reduce(rounded, ReduceOp::avg), [buffer, rounded] { buffer.copy_(rounded); });
  };
}

}  // namespace

CommHook fp16_compress_hook() { return compress_to(torch::kFloat16); }
CommHook bf16_compress_hook() { return compress_to(torch::kBFloat16); }

}  // namespace maniple
