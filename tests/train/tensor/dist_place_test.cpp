// Errors name the program's line, however the options of a call are passed; never a line of the library.
#include <functional>
#include <string>
#include <vector>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include <maniple/maniple.h>

namespace maniple::harness::dist_place_test {
namespace {

struct Call {
  unsigned line;
  std::function<void()> make;
};

std::string place_of(unsigned line) { return __FILE__ ":" + std::to_string(line) + ")"; }

// `Options` is DistOptions or const DistOptions.
template <class Options>
void expect_line_of_each_operation() {
  run_ranks({.n = 1}, [](Rank& r) {
    r.world->abort("of the test");
    catch_error([&] { r.world->barrier(); });  // the cause itself, which has no place
    const torch::Tensor x = torch::ones({2}), y = torch::ones({2});
    const std::vector<torch::Tensor> list = {y};
    const std::vector<P2POp> messages = {P2POp::isend(x, 0)};
    Options o{.group = r.world};
    const auto sum = ReduceOp::sum;
    const std::vector<Call> calls = {
        {__LINE__, [&] { broadcast(x, 0, o); }},
        {__LINE__, [&] { reduce(x, 0, sum, o); }},
        {__LINE__, [&] { all_reduce(x, sum, o); }},
        {__LINE__, [&] { all_reduce_coalesced(list, sum, o); }},
        {__LINE__, [&] { gather(x, list, 0, o); }},
        {__LINE__, [&] { all_gather(list, x, o); }},
        {__LINE__, [&] { all_gather_into_tensor(y, x, o); }},
        {__LINE__, [&] { scatter(x, list, 0, o); }},
        {__LINE__, [&] { reduce_scatter(x, list, sum, o); }},
        {__LINE__, [&] { reduce_scatter_tensor(y, x, sum, o); }},
        {__LINE__, [&] { all_to_all(list, {x}, o); }},
        {__LINE__, [&] { all_to_all_single(y, x, {}, {}, o); }},
        {__LINE__, [&] { barrier(o); }},
        {__LINE__, [&] { monitored_barrier(o); }},
        {__LINE__, [&] { send(x, 0, 0, o); }},
        {__LINE__, [&] { recv(x, 0, 0, o); }},
        {__LINE__, [&] { isend(x, 0, 0, o); }},
        {__LINE__, [&] { irecv(x, 0, 0, o); }},
        {__LINE__, [&] { batch_isend_irecv(messages, o); }},
        {__LINE__, [&] { broadcast_object("object", 0, o); }},
        {__LINE__, [&] { gather_object("object", 0, o); }},
        {__LINE__, [&] { all_gather_object("object", o); }},
        {__LINE__, [&] { scatter_object({"object"}, 0, o); }},
        {__LINE__, [&] { main_process_first([] {}, o); }},
    };
    for (const Call& call : calls) {
      const Caught caught = catch_error([&] { call.make(); });
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << "line " << call.line << ": " << caught;
      EXPECT_TRUE(contains(caught.text, place_of(call.line))) << "line " << call.line << ": " << caught;
    }
  });
}

TEST(DistPlace, EveryOperationNamesTheCallWithAnObject) { expect_line_of_each_operation<DistOptions>(); }
TEST(DistPlace, EveryOperationNamesTheCallWithAConstObject) { expect_line_of_each_operation<const DistOptions>(); }

TEST(DistPlace, ClippingNamesTheCallWithAnObject) {
  run_ranks({.n = 2}, [](Rank& r) {
    r.phase("all have joined");
    if (r.rank == 0) r.world->abort("of the test");
    r.phase("the group has failed");
    catch_error([&] { r.world->barrier(); });
    torch::Tensor x = torch::ones({2}, torch::requires_grad());
    x.mutable_grad() = torch::ones({2});
    torch::nn::Linear module(2, 2);
    for (torch::Tensor& parameter : module->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    ClipGradOptions o;
    o.group = r.world;
    const ClipGradOptions constant = o;
    const std::vector<Call> calls = {
        {__LINE__, [&] { clip_grad_norm_(x, 1, o); }},
        {__LINE__, [&] { clip_grad_norm_(std::vector{x}, 1, o); }},
        {__LINE__, [&] { clip_grad_norm_(*module, 1, o); }},
        {__LINE__, [&] { clip_grad_norm_(x, 1, constant); }},
        {__LINE__, [&] { clip_grad_norm_(std::vector{x}, 1, constant); }},
        {__LINE__, [&] { clip_grad_norm_(*module, 1, constant); }},
    };
    for (const Call& call : calls) {
      const Caught caught = catch_error([&] { call.make(); });
      EXPECT_TRUE(contains(caught.text, "in clip_grad_norm_, which all ranks call (" + place_of(call.line)))
          << "line " << call.line << ": " << caught;
    }
  });
}

}  // namespace
}  // namespace maniple::harness::dist_place_test
