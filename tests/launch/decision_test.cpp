// Who failed first, was it memory, when to try again: the launcher's judgements as pure functions.
#include <gtest/gtest.h>

#include <csignal>

#include <fmt/format.h>

#include "launch/coordinate/agent_message.h"
#include "launch/coordinate/node_agent.h"
#include "launch/coordinate/policies.h"
#include "launch/coordinate/remote_start.h"
#include "launch/output/output_tail.h"
#include "launch/process/lost_by.h"
#include "launch/workers/out_of_memory.h"

namespace maniple::launch {
namespace {

TEST(RepeatedErrors, LossesAreShownOnce) {
  RepeatedErrors losses;
  const auto repeats = [&](int by, int rank) { return losses.report(by, lost_by(by, rank)); };
  EXPECT_FALSE(repeats(0, 2));
  EXPECT_FALSE(repeats(0, 2)) << "its own";
  EXPECT_TRUE(repeats(3, 2));
  EXPECT_TRUE(repeats(1, 2));
  EXPECT_TRUE(repeats(6, 2));
  EXPECT_EQ(losses.summary(), "") << "none has failed yet";
  for (const int rank : {0, 1, 3}) losses.failed(rank);  // and 6 goes on
  EXPECT_FALSE(repeats(1, 5)) << "of another";
  EXPECT_TRUE(repeats(7, 5));
  losses.failed(7);
  EXPECT_FALSE(losses.report(4, {.kind = ErrorKind::timeout, .ranks = {2}, .reason = "timed out"}));
  losses.failed(4);
  EXPECT_EQ(losses.summary(),
            "maniple: ranks 1, 3 reported the same loss of rank 2\nmaniple: rank 7 reported the same loss of rank 5");
  EXPECT_EQ(losses.summary(), "");
}

TEST(RepeatedErrors, WhoeverIsShownAsTheCauseIsNotListed) {
  RepeatedErrors losses;
  for (const int rank : {0, 1, 3}) losses.report(rank, lost_by(rank, 2));
  losses.failed(1);
  losses.shown(1);
  losses.shown(-1);
  losses.failed(3);
  losses.failed(1);
  EXPECT_EQ(losses.summary(), "maniple: rank 3 reported the same loss of rank 2");
}

// It was shown as the cause before it ended: "rank 2 failed first, but has not ended".
TEST(RepeatedErrors, WhoeverIsShownBeforeItReportsIsNotListed) {
  RepeatedErrors losses;
  losses.report(0, lost_by(0, 5));
  losses.shown(2);
  EXPECT_TRUE(losses.report(2, lost_by(2, 5)));
  losses.failed(2);
  EXPECT_EQ(losses.summary(), "");
}

TEST(RepeatedErrors, MismatchesAreShownOnce) {
  RepeatedErrors errors;
  const auto mismatch = [](int number) {
    return ErrorInfo{.kind = ErrorKind::mismatch, .sequence = static_cast<std::uint64_t>(number), .group = "world"};
  };
  EXPECT_FALSE(errors.report(1, mismatch(3)));
  EXPECT_TRUE(errors.report(0, mismatch(3)));
  EXPECT_FALSE(errors.report(2, mismatch(4)));
  for (const int rank : {0, 1, 2}) errors.failed(rank);
  EXPECT_EQ(errors.summary(), "maniple: rank 0 reported the same mismatch in call #3 of group world");
}

TEST(OutputTail, TheErrorIsNotRepeated) {
  OutputTail tail;
  const std::string error = "[barrier #1 world rank 0/2] " + std::string(1000, 'x');
  tail.take("hello\n" + error + "\nshort\n", true);
  EXPECT_EQ(tail.lines(error), (std::vector<std::string>{"hello", "short"}));
  EXPECT_EQ(tail.lines("short\nsecond line").size(), 2u);
  EXPECT_EQ(tail.lines("hell").size(), 3u);
}

// Of programs that do not report their failure.
TEST(OutputTail, RecognisesErrors) {
  const auto error_of = [](const std::string& lines) {
    OutputTail tail;
    tail.take(lines, true);
    return tail.error();
  };
  EXPECT_EQ(error_of("  what():  vector::at\nValueError: no\n"), "vector::at");
  EXPECT_EQ(error_of("ValueError: no\nepoch 3: loss 0.2\n[rank 3] hello\n\n"), "ValueError: no");
  EXPECT_EQ(error_of("epoch 3: loss 0.2\n"), "");
}

TEST(OutputTail, OfAProgramThatReportedItsFailureNothingIsSearched) {
  OutputTail tail;
  tail.take("ValueError: no\n", true);
  tail.stop_looking();
  tail.take("  what():  vector::at\n", true);
  EXPECT_EQ(tail.error(), "");
  EXPECT_EQ(tail.lines(""), (std::vector<std::string>{"ValueError: no", "  what():  vector::at"}));
}

constexpr const char* kStack =
    "Exception raised from infer_size_impl at /build/aten/src/ATen/ExpandUtils.cpp:31 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0xb4 (0xffff8 in /lib/libc10.so)\n"
    "frame #1: at::infer_size_dimvector(c10::ArrayRef<long>) + 0x3d0 (0xffff9 in /lib/libtorch_cpu.so)\n"
    "frame #2: <unknown function> + 0x27400 (0xffffa in /lib/libc.so.6)\n\n";

// What LibTorch throws has its stack behind its message, and ten frames are all that fits into the last lines.
TEST(OutputTail, AnExceptionOfLibTorchIsShownByItsMessage) {
  const std::string message =
      "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0";
  OutputTail caught;
  caught.take("epoch 1\n", false);
  caught.take("maniple: [world rank 1/2] a warning\n", true);
  caught.take(message + "\n" + kStack, true);
  EXPECT_EQ(caught.error(), message);
  EXPECT_EQ(caught.lines(caught.error()), (std::vector<std::string>{"epoch 1", "maniple: [world rank 1/2] a warning"}));

  OutputTail uncaught;
  uncaught.take("terminate called after throwing an instance of 'c10::Error'\n  what():  " + message + "\n", true);
  uncaught.take(std::string("a second line of it\n") + kStack, true);  // in pieces, as it may come
  EXPECT_EQ(uncaught.error(), message);
  EXPECT_EQ(
      uncaught.lines(uncaught.error()),
      (std::vector<std::string>{"terminate called after throwing an instance of 'c10::Error'", "a second line of it"}));

  OutputTail other;
  other.take("#1 of the list\nC++ CapturedTraceback:\n#4 c10::Error::Error() from ??:0\nframe 3\n", true);
  EXPECT_EQ(other.lines(other.error()), (std::vector<std::string>{"#1 of the list", "frame 3"}));
}

TEST(OutOfMemory, IsToldApart) {
  OomCounters before{.group = "/g", .kills = 2, .limit = 64 << 20, .peak = 1 << 20, .machine_kills = 5};
  OomCounters after = before;
  EXPECT_EQ(judge_kill(SIGKILL, false, before, after), "") << "nobody counted";
  after.kills = 3;
  after.peak = 64 << 20;
  EXPECT_EQ(judge_kill(SIGKILL, false, before, after),
            "by the kernel's out-of-memory killer: the limit of its control group is 64 MiB, the peak was 64 MiB");
  EXPECT_EQ(judge_kill(SIGKILL, true, before, after), "") << "the launcher did it";
  EXPECT_EQ(judge_kill(SIGSEGV, false, before, after), "");
  after = before;
  after.machine_kills = 6;
  EXPECT_NE(judge_kill(SIGKILL, false, before, after).find("a control group with a limit, or the machine"),
            std::string::npos)
      << "only the log of the kernel could tell";
  after.machine_short = true;
  EXPECT_EQ(judge_kill(SIGKILL, false, before, after),
            "by the kernel's out-of-memory killer: the machine ran out of memory");
  // A worker that was moved into a group of its own: its counter began at 0.
  EXPECT_NE(judge_kill(SIGKILL, false, before, {.group = "/h", .kills = 1}), "");
  EXPECT_EQ(judge_kill(SIGKILL, false, {}, {}), "");
}

TEST(OutOfMemory, ReadsTheKernelsLog) {
  const std::string line =
      "6,1234,99,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/small,"
      "task_memcg=/small/x,task=eat,pid=4711,uid=0\n";
  const auto record = parse_oom_record(line, 4711);
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->group, "/small");
  EXPECT_FALSE(record->machine_short);
  EXPECT_FALSE(parse_oom_record(line, 471).has_value()) << "of another process";
  EXPECT_FALSE(parse_oom_record("6,1,2,-;Out of memory", 4711).has_value());
  EXPECT_TRUE(parse_oom_record("oom-kill:constraint=CONSTRAINT_NONE,task=eat,pid=7,uid=0", 7)->machine_short);
}

TEST(OutOfMemory, ReadsTheKernelsTables) {
  EXPECT_EQ(counter_in("low 0\noom 7\noom_kill 3\n", "oom_kill"), 3);
  EXPECT_EQ(counter_in("oom_kill_disable 0\nunder_oom 0\noom_kill 4", "oom_kill"), 4);
  EXPECT_EQ(counter_in("", "oom_kill"), std::nullopt);
}

TEST(RestartPolicy, DoublesUpToALimit) {
  const RestartPolicy policy{.max_restarts = 2};
  EXPECT_TRUE(policy.allows(1));
  EXPECT_TRUE(policy.allows(2));
  EXPECT_FALSE(policy.allows(3));
  EXPECT_DOUBLE_EQ(policy.delay_before(1).count(), 1);
  EXPECT_DOUBLE_EQ(policy.delay_before(2).count(), 2);
  EXPECT_DOUBLE_EQ(policy.delay_before(4).count(), 8);
  EXPECT_DOUBLE_EQ(policy.delay_before(6).count(), 30);
  EXPECT_DOUBLE_EQ(policy.delay_before(1000).count(), 30);
}

const RankExit kExit{.rank = 5,
                     .node_rank = 1,
                     .host = "x",
                     .pid = 9,
                     .code = 2,
                     .cause = "c",
                     .error = "e",
                     .consequence = true,
                     .blamed = 3,
                     .left = 4,
                     .tail = {"t", ""},
                     .at_us = -1};

/// All options that are sent, with other values than their defaults.
LaunchOptions job_options() {
  LaunchOptions options;
  options.command = {"a", std::string("b\0c", 3)};
  options.folder = "/f";
  options.environment = {{.name = "A", .value = "v"}, {.name = "B", .value = ""}};
  options.log_folder = "/l";
  options.only_ranks = {3, 1};
  options.bind = BindPolicy::none;
  options.cores_per_process = 2;
  options.verbose = options.share_gpu = options.console.quiet = true;
  options.terminal_output = options.console.prefix = options.console.status = false;
  options.devices_per_node = 4;
  options.console.colour = ColourChoice::always;
  options.join_timeout = std::chrono::duration<double>(0.25);
  options.restarts.max_restarts = 5;
  options.elastic = {.min = 2, .max = 7};
  return options;
}

/// One of each kind, with all fields set.
const std::vector<AgentMessage> kMessages = {
    message::Join{1, 2, 3, 4, 5, 6, 7, "h", "c", "l"},
    message::Job{"run-1", job_options()},
    message::Reserve{7, 8},
    message::Reserved{7, 8, "h", 4711, "e"},
    message::Start{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "h", 11, "j", true},
    message::Waiting{7, 8},
    message::Absent{7, kExit},
    message::Exited{7, kExit},
    message::Failed{7, kExit},
    message::Finished{7},
    message::Interrupt{15},
    message::Verdict{"t"},
    message::Stop{7, 15, 800, {3, -1}, true},
    message::Stopped{7},
    message::Signal{19, "h", "t"},
    message::Quit{-1, "t"},
    message::Alive{100, 2000},
    message::Dropped{2000},
    message::Noticed{7, {WorkerNotice::Kind::lost, 3, 4, {0, 2}}},
    message::Members{7, 8, {4, 0, 2}, "h", 4711},
    message::Replace{7, 2, true},
    message::Kill{7, 2, 9},
    message::Finish{7},
};

TEST(AgentMessage, EveryKindSurvivesTheWire) {
  ASSERT_EQ(kMessages.size(), std::variant_size_v<AgentMessage>);
  for (std::size_t kind = 0; kind < kMessages.size(); ++kind) {
    const AgentMessage& message = kMessages[kind];
    ASSERT_EQ(message.index(), kind);
    const std::string bytes = encode(message);
    EXPECT_EQ(decode_agent_message(bytes), message) << kind;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      EXPECT_THROW(decode_agent_message(bytes.substr(0, i)), ProtocolError) << kind;
    EXPECT_THROW(decode_agent_message(bytes + "x"), ProtocolError) << kind;
  }
  const std::string unknown(1, static_cast<char>(kMessages.size()));
  EXPECT_THROW(decode_agent_message(unknown), ProtocolError) << "an unknown kind";
}

TEST(AgentMessage, LongVariablesAreNotCut) {
  message::Job job{.name = "run-1", .options = job_options()};
  job.options.environment.front().value.assign(100'000, 'v');
  EXPECT_EQ(decode_agent_message(encode(job)), AgentMessage(job));
}

TEST(AgentMessage, ImpossibleOptionsAreRefused) {
  const auto refused = [](auto change) {
    message::Job job{.name = "", .options = job_options()};
    change(job.options);
    EXPECT_THROW(decode_agent_message(encode(job)), ProtocolError);
  };
  refused([](LaunchOptions& options) { options.environment.front().name.clear(); });
  refused([](LaunchOptions& options) { options.bind = static_cast<BindPolicy>(7); });
  refused([](LaunchOptions& options) { options.join_timeout = std::chrono::duration<double>(-1); });
}

TEST(Secrets, EachGenerationHasItsOwn) {
  const Secret job = Secret::random();
  EXPECT_NE(secret_of_generation(job, 0).bytes, secret_of_generation(job, 1).bytes);
  EXPECT_EQ(secret_of_generation(job, 1).bytes, secret_of_generation(job, 1).bytes);
  EXPECT_NE(secret_of_generation(job, 0).bytes, job.bytes);
  EXPECT_TRUE(secret_of_generation(Secret::none(), 1).is_none());
}

TEST(RemoteStart, QuotesForTheOtherShell) {
  EXPECT_EQ(quoted("/a b/it's"), "'/a b/it'\\''s'");
  EXPECT_EQ(split_words("  ssh -p  22 "), (std::vector<std::string>{"ssh", "-p", "22"}));
  EXPECT_TRUE(split_words(" ").empty());
}

}  // namespace
}  // namespace maniple::launch
