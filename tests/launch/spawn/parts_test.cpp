// The parts of spawn that can be looked at without a second process.
#include <gtest/gtest.h>

#include <dlfcn.h>

#include "launch/spawn/child_main.h"
#include "launch/spawn/children.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

void some_function() {}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(SpawnParts, AFunctionIsFoundAgainByItsOffset) {
  EXPECT_EQ(function_at_offset(offset_in_program(&some_function)), &some_function);
  EXPECT_THROW(function_at_offset(std::uint64_t{1} << 40), ProtocolError);
  EXPECT_THROW(function_at_offset(~std::uint64_t{0}), ProtocolError);
  EXPECT_THROW(offset_in_program(nullptr), InvalidArgument);
}

TEST(SpawnParts, AFunctionOfALibraryIsRefused) {
  const auto foreign = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "toupper"));
  ASSERT_NE(foreign, nullptr);
  const std::string text = text_of([&] { offset_in_program(foreign); });
  EXPECT_NE(text.find("libc"), std::string::npos) << text;
  EXPECT_NE(text.find("not in the main program"), std::string::npos) << text;
}

TEST(SpawnParts, Assignments) {
  const SpawnAssignment one{.payload = 5, .report = 7, .parent_pipe = -1, .index = 31};
  const auto back = parse_spawn_assignment(to_text(one));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->payload, 5);
  EXPECT_EQ(back->report, 7);
  EXPECT_EQ(back->parent_pipe, -1);
  EXPECT_EQ(back->index, 31);
  for (const char* bad : {"", "1", "1,2", "1,2,3", "1,2,3,", "1,2,3,4,", "1,2,3,-1", "-1,2,3,4", "1,2,-2,4", "a,2,3,4",
                          "1,2,3,4x", "1,2,3,99999999999", " 1,2,3,4"}) {
    EXPECT_FALSE(parse_spawn_assignment(bad)) << bad;
  }
}

TEST(SpawnParts, ReportsOfExceptions) {
  const auto report_of = [](auto&& thrower) {
    try {
      thrower();
    } catch (...) {
      return report_of_current_exception();
    }
    return SpawnReport{};
  };
  const SpawnReport plain = report_of([] { throw std::out_of_range("too far"); });
  EXPECT_EQ(plain.type, "std::out_of_range");
  EXPECT_EQ(plain.text, "too far");
  EXPECT_FALSE(plain.error);
  const SpawnReport ours = report_of([] { throw Mismatch("rank 2 called barrier"); });
  EXPECT_EQ(ours.type, "maniple::Mismatch");
  ASSERT_TRUE(ours.error);
  EXPECT_EQ(ours.error->kind, ErrorKind::mismatch);
  EXPECT_EQ(report_of([] { throw 5; }).type, "int");
  EXPECT_EQ(report_of([] { throw std::string("text"); }).text, "text");
  EXPECT_EQ(report_of([] { throw "text"; }).text, "text");

  const auto back = decode_report(encode_report(ours));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->type, ours.type);
  EXPECT_EQ(back->text, ours.text);
  ASSERT_TRUE(back->error);
  EXPECT_EQ(back->error->kind, ErrorKind::mismatch);
  EXPECT_EQ(back->when_ns, ours.when_ns);
  EXPECT_TRUE(decode_report(encode_report({.finished = true}))->finished);
}

TEST(SpawnParts, ReportsThatAreCutOrTooLong) {
  const std::string bare = encode_report({.type = "T", .text = "text"});
  const std::string whole =
      encode_report({.type = "T", .text = "text", .error = ErrorInfo{.kind = ErrorKind::timeout}});
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_TRUE(length == bare.size() || !decode_report(whole.substr(0, length))) << length;
  }
  EXPECT_FALSE(decode_report(whole + "x"));
  EXPECT_FALSE(decode_report(std::string(40, '\xfe')));
  const std::string large = encode_report({.type = std::string(100'000, 't'),
                                           .text = std::string(1'000'000, 'x'),
                                           .error = ErrorInfo{.reason = std::string(1'000'000, 'x')}});
  EXPECT_LE(large.size(), kMostReportBytes);
  ASSERT_TRUE(decode_report(large));
  EXPECT_EQ(decode_report(large)->text.substr(0, 3), "xxx");
}

// Two machines with four devices each: ranks 0-3 and 4-7.
TEST(SpawnParts, RanksOfTheSecondMachine) {
  SpawnOptions options{.nprocs = 4, .nodes = 2, .node_rank = 1};
  const NodeEnvironment node{.master_addr = "10.0.0.1", .master_port = 8888, .secret_fd = 9, .cores = 12};
  Environment environment = rank_environment(
      {"HOME=/home", "RANK=7", "RANKS=1", "MANIPLE_STORE_HOSTED=1", "MANIPLE_GENERATION=3", "MANIPLE_JOB=j"}, node,
      assignment_of(options, 2));
  std::sort(environment.begin(), environment.end());
  EXPECT_EQ(environment,
            (Environment{"HOME=/home", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=4", "MANIPLE_JOB=j", "MANIPLE_SECRET_FD=9",
                         "MANIPLE_SPAWNED=1", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=8888", "NODE_RANK=1",
                         "OMP_NUM_THREADS=3", "RANK=6", "RANKS=1", "WORLD_SIZE=8"}));
  options.world_size = 12;
  EXPECT_EQ(assignment_of(options, 2).world_size, 12);
}

TEST(SpawnParts, ImpossibleOptions) {
  const auto refusal = [](const SpawnOptions& options) { return text_of([&] { check_spawn_options(options); }); };
  EXPECT_EQ(refusal({.nprocs = 4}), "no error");
  EXPECT_NE(refusal({.nprocs = 0}).find("nprocs is 0"), std::string::npos);
  EXPECT_NE(refusal({.nprocs = -3}).find("nprocs is -3"), std::string::npos);
  EXPECT_NE(refusal({.nprocs = 1'000'000}).find("1 to 4096"), std::string::npos);
  EXPECT_NE(refusal({.nodes = 0}).find("nodes is 0"), std::string::npos);
  EXPECT_NE(refusal({.node_rank = -1}).find("node_rank is -1"), std::string::npos);
  EXPECT_NE(refusal({.nprocs = 4, .nodes = 2, .node_rank = 2}).find("ranks up to 11, but the world has 8"),
            std::string::npos);
  EXPECT_NE(refusal({.nprocs = 4, .world_size = 3}).find("the world has 3"), std::string::npos);
  EXPECT_NE(refusal({.master_port = 70000}).find("master_port is 70000"), std::string::npos);
  EXPECT_NE(refusal({.grace = Seconds(-1)}).find("grace"), std::string::npos);
}

TEST(Foreground, IsReadFromTheSupervisor) {
  EXPECT_TRUE(has_terminal(parse_process_stat("7 (a b) c) S 1 50 40 34816 50 0")));
  EXPECT_FALSE(has_terminal(parse_process_stat("7 (maniple) S 1 50 40 34816 40 0"))) << "the shell has it";
  EXPECT_TRUE(has_terminal(parse_process_stat("7 (maniple) S 1 50 40 0 -1 0"))) << "no terminal, no shell";
  EXPECT_TRUE(has_terminal(parse_process_stat(""))) << "nothing is known";
}

}  // namespace
}  // namespace maniple::launch
