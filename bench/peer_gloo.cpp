// The peer Gloo: runs a work item with Gloo's collectives over TCP, its only CPU transport.
//
//   peer_gloo WORK_ITEM RANK DIRECTORY ADDRESS      the ranks find each other by files in DIRECTORY and use ADDRESS's
//                                                   interface
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>

#include "tools/bench/measure.h"
#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

void sum_floats(void* into, const void* a, const void* b, std::size_t count) { gloo::sum<float>(into, a, b, count); }

void max_words(void* into, const void* a, const void* b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    static_cast<std::uint64_t*>(into)[i] =
        std::max(static_cast<const std::uint64_t*>(a)[i], static_cast<const std::uint64_t*>(b)[i]);
  }
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(const WorkItem& item, int rank, const std::string& directory, const char* address) : rank_(rank) {
    gloo::rendezvous::FileStore store(directory);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, item.ranks);
    context->setTimeout(std::chrono::milliseconds(static_cast<int>(item.timeout_s * 1000)));
    auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address));
    context->connectFullMesh(store, device);
    context_ = context;
  }

  int rank() const override { return rank_; }
  std::string transport() const override { return "tcp"; }
  std::byte* memory(std::size_t bytes) override { return memory_.at_least(bytes); }

  void prepare(const Case& what, std::byte* in, std::byte* out) override {
    if (what.dtype != DType::float32 || !(what.reduce == ReduceOp::sum))
      throw Unsupported("measured with Gloo: float32 sum");
    auto* input = reinterpret_cast<float*>(in);
    auto* output = reinterpret_cast<float*>(out);
    switch (what.op) {
      case Op::all_reduce: {
        auto options = std::make_shared<gloo::AllreduceOptions>(context_);
        options->setOutput(output, what.count);
        options->setReduceFunction(sum_floats);
        call_ = [options] { gloo::allreduce(*options); };
        break;
      }
      case Op::broadcast: {
        auto options = std::make_shared<gloo::BroadcastOptions>(context_);
        options->setOutput(output, what.count);
        options->setRoot(0);
        call_ = [options] { gloo::broadcast(*options); };
        break;
      }
      case Op::all_gather: {
        auto options = std::make_shared<gloo::AllgatherOptions>(context_);
        options->setInput(input, what.part());
        options->setOutput(output, what.count);
        call_ = [options] { gloo::allgather(*options); };
        break;
      }
      case Op::barrier: {
        auto options = std::make_shared<gloo::BarrierOptions>(context_);
        call_ = [options] { gloo::barrier(*options); };
        break;
      }
      default: throw Unsupported("not measured with Gloo: " + std::string(to_string(what.op)));
    }
  }

  void call() override { call_(); }

  std::uint64_t largest(std::uint64_t value) override {
    gloo::AllreduceOptions options(context_);
    options.setOutput(&value, 1);
    options.setReduceFunction(max_words);
    gloo::allreduce(options);
    return value;
  }

 private:
  int rank_;
  std::shared_ptr<gloo::Context> context_;
  PageMemory memory_;
  std::function<void()> call_;
};

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) {
  using namespace maniple::bench;
  try {
    if (argc != 5) throw maniple::InvalidArgument("usage: peer_gloo WORK_ITEM RANK DIRECTORY ADDRESS");
    const WorkItem item = parse_work_item(argv[1]);
    GlooCommunicator communicator(item, std::atoi(argv[2]), argv[3], argv[4]);
    measure_and_print(communicator, item);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peer_gloo: %s\n", error.what());
    return 1;
  }
}
