// Errors name the program's line, however the options of a call are passed; never a line of the library.
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

TEST(CallPlace, OptionsHaveNoPlaceOfTheirOwn) {
  const CallOptions braces{.timeout = Seconds(1), .async_op = true};
  EXPECT_TRUE(braces.where.is_empty());
  CallOptions object;
  object.async_op = true;
  EXPECT_TRUE(object.where.is_empty());
}

struct Call {
  unsigned line;
  std::function<void(ProcessGroup&)> make;
};

void expect_places(Rank& r, const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    const Caught caught = catch_error([&] { call.make(*r.world); });
    EXPECT_TRUE(caught.is(ErrorKind::aborted)) << "line " << call.line << ": " << caught;
    EXPECT_TRUE(contains(caught.text, "(call at " __FILE__ ":" + std::to_string(call.line) + ")")) << caught;
  }
}

// `Options` is CallOptions or const CallOptions.
template <class Options>
void expect_line_of_each_operation(Options o) {
  run_ranks({.n = 1}, [&](Rank& r) {
    r.world->abort("of the test");
    catch_error([&] { r.world->barrier(); });  // the cause itself, which has no place
    float x = 1, y = 2;
    const std::array<Buffer, 1> list{buffer_of(x)};
    const std::array<std::string, 1> objects{"object"};
    const std::array<int, 1> ranks{0};
    const std::array<PointToPoint, 1> messages{PointToPoint::send(buffer_of(x), 0)};
    const auto sum = ReduceOp::sum;
    using G = ProcessGroup;
    expect_places(r, {
                         {__LINE__, [&](G& g) { g.broadcast(buffer_of(x), 0, o); }},
                         {__LINE__, [&](G& g) { g.reduce(buffer_of(x), buffer_of(y), 0, sum, o); }},
                         {__LINE__, [&](G& g) { g.all_reduce(buffer_of(x), sum, o); }},
                         {__LINE__, [&](G& g) { g.all_reduce(buffer_of(x), buffer_of(y), sum, o); }},
                         {__LINE__, [&](G& g) { g.all_reduce_coalesced(list, sum, o); }},
                         {__LINE__, [&](G& g) { g.gather(buffer_of(x), buffer_of(y), 0, {}, o); }},
                         {__LINE__, [&](G& g) { g.all_gather(buffer_of(x), buffer_of(y), {}, o); }},
                         {__LINE__, [&](G& g) { g.scatter(buffer_of(x), buffer_of(y), 0, {}, o); }},
                         {__LINE__, [&](G& g) { g.reduce_scatter(buffer_of(x), buffer_of(y), sum, {}, o); }},
                         {__LINE__, [&](G& g) { g.all_to_all(buffer_of(x), buffer_of(y), {}, {}, o); }},
                         {__LINE__, [&](G& g) { g.barrier(o); }},
                         {__LINE__, [&](G& g) { g.monitored_barrier(Seconds(1), o); }},
                         {__LINE__, [&](G& g) { g.send(buffer_of(x), 0, 0, o); }},
                         {__LINE__, [&](G& g) { g.isend(buffer_of(x), 0, 0, o); }},
                         {__LINE__, [&](G& g) { g.recv(buffer_of(x), 0, 0, o); }},
                         {__LINE__, [&](G& g) { g.irecv(buffer_of(x), 0, 0, nullptr, o); }},
                         {__LINE__, [&](G& g) { g.batch_isend_irecv(messages, o); }},
                         {__LINE__, [&](G& g) { g.broadcast_object("object", 0, o); }},
                         {__LINE__, [&](G& g) { g.gather_objects("object", 0, o); }},
                         {__LINE__, [&](G& g) { g.all_gather_objects("object", o); }},
                         {__LINE__, [&](G& g) { g.scatter_objects(objects, 0, o); }},
                         {__LINE__, [&](G& g) { g.allocate(8, o); }},
                         {__LINE__, [&](G& g) { g.allocate_shared(8, o); }},
                         {__LINE__, [&](G& g) { g.new_group(ranks, {}, o); }},
                         {__LINE__, [&](G& g) { g.split(0, 0, {}, o); }},
                     });
  });
}

TEST(CallPlace, EveryOperationNamesTheCallWithAnObject) {
  CallOptions object;
  object.timeout = Seconds(10);
  expect_line_of_each_operation<CallOptions>(object);
}

TEST(CallPlace, EveryOperationNamesTheCallWithAConstObject) {
  expect_line_of_each_operation<const CallOptions>({.timeout = Seconds(10)});
}

TEST(CallPlace, ACallWithBracesHasItsLine) {
  run_ranks({.n = 1}, [](Rank& r) {
    r.world->abort("of the test");
    catch_error([&] { r.world->barrier(); });  // the cause itself, which has no place
    float x = 1;
    expect_places(r, {
                         {__LINE__, [&](ProcessGroup& g) { g.barrier(); }},
                         {__LINE__, [&](ProcessGroup& g) { g.all_reduce(buffer_of(x)); }},
                         {__LINE__, [&](ProcessGroup& g) { g.barrier({.timeout = Seconds(10)}); }},
                     });
  });
}

// The library passes on the place of its own caller.
TEST(CallPlace, APlaceInTheOptionsWins) {
  run_ranks({.n = 1}, [](Rank& r) {
    r.world->barrier({.where = SourceLocation::current("program.cpp", 7, "main")});
    const std::string last = r.world->recent_operations().back();
    EXPECT_TRUE(contains(last, " at program.cpp:7,")) << last;
  });
}

TEST(CallPlace, TheRecorderHasTheLineOfTheCall) {
  run_ranks({.n = 2}, [](Rank& r) {
    CallOptions o;
    o.async_op = true;
    float x = 1;
    const unsigned line = __LINE__ + 1;
    r.world->all_reduce(buffer_of(x), ReduceOp::sum, o).wait();
    const std::string last = r.world->recent_operations().back();
    EXPECT_TRUE(contains(last, " at " __FILE__ ":" + std::to_string(line) + ",")) << last;
  });
}

TEST(CallPlace, AConstObjectFromElsewhereGetsTheLineOfTheCall) {
  run_ranks({.n = 1}, [](Rank& r) {
    const CallOptions o = std::vector<CallOptions>(1).front();
    const unsigned line = __LINE__ + 1;
    r.world->barrier(o);
    const std::string last = r.world->recent_operations().back();
    EXPECT_TRUE(contains(last, " at " __FILE__ ":" + std::to_string(line) + ",")) << last;
  });
}

TEST(CallPlace, AnEmptyPlaceStaysEmpty) {
  run_ranks({.n = 1}, [](Rank& r) {
    r.world->barrier({}, SourceLocation());
    const std::string last = r.world->recent_operations().back();
    EXPECT_FALSE(contains(last, " at ")) << last;
  });
}

}  // namespace
}  // namespace maniple::harness
