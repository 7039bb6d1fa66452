// Errors name the program's line, however the options of a call are passed; never a line of the library.
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

TEST(CallPlace, OptionsKnowTheLineThatInitialisesThemWithBraces) {
  const CallOptions braces{};
  EXPECT_EQ(braces.where.line(), __LINE__ - 1u);
  EXPECT_STREQ(braces.where.file_name(), __FILE__);
  const CallOptions set{.timeout = Seconds(1), .async_op = true};
  EXPECT_EQ(set.where.line(), __LINE__ - 1u);
  EXPECT_STREQ(set.where.file_name(), __FILE__);
}

TEST(CallPlace, OptionsThatAConstructorInitialisesHaveNone) {
  CallOptions object;
  object.async_op = true;
  EXPECT_TRUE(object.where.is_empty());
  const std::vector<CallOptions> several(2);
  EXPECT_TRUE(several[1].where.is_empty());
  EXPECT_EQ(object.called_at(SourceLocation::current()).where.line(), __LINE__ + 0u);
  EXPECT_EQ(CallOptions{}.called_at(SourceLocation::current("other.cpp", 1)).where.line(), __LINE__ + 0u);
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

TEST(CallPlace, EveryOperationNamesTheCallWithAnObject) {
  run_ranks({.n = 1}, [](Rank& r) {
    r.world->abort("of the test");
    catch_error([&] { r.world->barrier(); });  // the cause itself, which has no place
    float x = 1, y = 2;
    const std::array<Buffer, 1> list{buffer_of(x)};
    const std::array<std::string, 1> objects{"object"};
    const std::array<int, 1> ranks{0};
    const std::array<PointToPoint, 1> messages{PointToPoint::send(buffer_of(x), 0)};
    CallOptions o;
    o.timeout = Seconds(10);
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
    EXPECT_TRUE(o.where.is_empty());  // the next call has a line of its own
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

// A function that gets options as a constant does not know where its caller declared them: rather no place.
TEST(CallPlace, NoErrorNamesALineOfTheLibrary) {
  run_ranks({.n = 1}, [](Rank& r) {
    const CallOptions o = std::vector<CallOptions>(1).front();
    r.world->barrier(o);
    const std::string last = r.world->recent_operations().back();
    EXPECT_FALSE(contains(last, ".h:")) << last;
    EXPECT_FALSE(contains(last, " at ")) << last;
  });
}

}  // namespace
}  // namespace maniple::harness
