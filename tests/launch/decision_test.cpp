// Who failed first, was it memory, when to try again: the launcher's judgements as pure functions.
#include <gtest/gtest.h>

#include <csignal>

#include <fmt/format.h>

#include "launch/coordinate/agent_message.h"
#include "process/failure_report.h"
#include "launch/output/log_pump.h"
#include "launch/coordinate/node_agent.h"
#include "launch/workers/out_of_memory.h"
#include "process/program.h"
#include "launch/coordinate/remote_start.h"
#include "launch/workers/repeated_losses.h"
#include "launch/coordinate/restart_policy.h"

namespace maniple::launch {
namespace {

const std::string kBlamesOne = "[barrier #3 world rank 0/2] rank 1 (pid 7 on vm) is lost: its process ended";

TEST(FailureReport, FindsWhoIsBlamed) {
  EXPECT_EQ(blamed_rank(kBlamesOne), 1);
  EXPECT_EQ(blamed_rank("[recv from rank 1 tag 7 world rank 0/2] rank 12 lost, 3 of 8 bytes received: reset"), 12);
  EXPECT_EQ(blamed_rank("[barrier #3 world rank 0/2] 1 of 2 ranks came within 5.0 s; missing rank 1"), -1);
  EXPECT_EQ(blamed_rank("rank 1 is lost"), -1);
  EXPECT_EQ(blamed_rank(""), -1);
  EXPECT_EQ(blamed_rank("[rank 99999999999/2] rank 99999999999999 lost"), -1);
}

TEST(FailureReport, TheCauseComesBeforeItsConsequences) {
  const RankExit consequence{.rank = 0, .code = 1, .error = kBlamesOne, .at_us = 100};
  const RankExit killed{.rank = 1, .signal = SIGKILL, .at_us = 5000};
  const RankExit later{.rank = 2, .code = 2, .at_us = 90'000};
  EXPECT_EQ(first_cause({consequence, killed, later}), 1u);
  EXPECT_EQ(first_cause({later, killed}), 1u);
  EXPECT_EQ(first_cause({consequence}), 0u);
  // Within a moment of each other the one with a signal is more likely the cause.
  EXPECT_EQ(first_cause({RankExit{.rank = 0, .code = 1, .at_us = 100}, killed}), 1u);
  EXPECT_EQ(first_cause({RankExit{.rank = 0, .code = 1, .at_us = 100}, later}), 0u);
  EXPECT_TRUE(cause_may_follow({consequence}));
  EXPECT_FALSE(cause_may_follow({consequence, killed}));
}

TEST(FailureReport, Text) {
  const RankExit exit{.rank = 3, .host = "node2", .pid = 4711, .signal = SIGSEGV, .error = "what", .tail = {"a", "b"}};
  EXPECT_EQ(describe_failure(exit, 8),
            "maniple: rank 3 of 8 failed first, on host node2 (pid 4711): signal SIGSEGV (segmentation fault)\n"
            "maniple:   error: what\n"
            "maniple:   last lines of rank 3:\n"
            "maniple:     a\n"
            "maniple:     b");
  EXPECT_EQ(exit.exit_code(), 139);
  EXPECT_EQ(describe_end({.code = 3}), "exit code 3");
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(60), "signal 60");
}

TEST(FailureReport, ThatARankIsLostIsShownOnce) {
  RepeatedLosses losses;
  const auto lost = [](int by, int rank) { return fmt::format("[barrier #3 world rank {}/8] rank {} (pid 7 on vm) is lost: it ended", by, rank); };
  EXPECT_FALSE(losses.take(0, lost(0, 2)));
  EXPECT_EQ(losses.summary(), "");
  EXPECT_TRUE(losses.take(3, lost(3, 2)));
  EXPECT_TRUE(losses.take(1, lost(1, 2)));
  EXPECT_TRUE(losses.take(0, lost(0, 2))) << "the same rank again";
  EXPECT_FALSE(losses.take(1, lost(1, 5))) << "of another";
  EXPECT_TRUE(losses.take(7, lost(7, 5)));
  EXPECT_FALSE(losses.take(4, "[barrier #3 world rank 4/8] 7 of 8 ranks came within 5.0 s; missing rank 2"));
  EXPECT_FALSE(losses.take(4, "anything else"));
  EXPECT_EQ(losses.summary(), "maniple: ranks 1, 3 said the same of rank 2\nmaniple: rank 7 said the same of rank 5");
  EXPECT_EQ(losses.summary(), "");
}

TEST(FailureReport, RecognisesErrors) {
  EXPECT_EQ(rate_error_line(kBlamesOne), 3);
  EXPECT_EQ(rate_error_line("  what():  [barrier #3 world rank 0/2] rank 1 is lost"), 3);
  EXPECT_EQ(rate_error_line("  what():  vector::at"), 2);
  EXPECT_EQ(rate_error_line("ValueError: no"), 1);
  EXPECT_EQ(rate_error_line("epoch 3: loss 0.2"), 0);
  EXPECT_EQ(rate_error_line("[rank 3] hello"), 0);
  EXPECT_EQ(rate_error_line(""), 0);
}

constexpr const char* kStack =
    "Exception raised from infer_size_impl at /build/aten/src/ATen/ExpandUtils.cpp:31 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0xb4 (0xffff8 in /lib/libc10.so)\n"
    "frame #1: at::infer_size_dimvector(c10::ArrayRef<long>) + 0x3d0 (0xffff9 in /lib/libtorch_cpu.so)\n"
    "frame #2: <unknown function> + 0x27400 (0xffffa in /lib/libc.so.6)\n\n";

// What LibTorch throws has its stack behind its message, and ten frames are all that fits into the last lines.
TEST(FailureReport, AnExceptionOfLibTorchIsShownByItsMessage) {
  const std::string message = "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0";
  LastWords caught;
  caught.take("epoch 1\n", false);
  caught.take("maniple: [world rank 1/2] a warning\n", true);
  caught.take(message + "\n" + kStack, true);
  EXPECT_EQ(caught.error(), message);
  EXPECT_EQ(caught.tail(), (std::vector<std::string>{"epoch 1", "maniple: [world rank 1/2] a warning"}));

  LastWords uncaught;
  uncaught.take("terminate called after throwing an instance of 'c10::Error'\n  what():  " + message + "\n", true);
  uncaught.take(std::string("a second line of it\n") + kStack, true);  // in pieces, as it may come
  EXPECT_EQ(uncaught.error(), message);
  EXPECT_EQ(uncaught.tail(), (std::vector<std::string>{"terminate called after throwing an instance of 'c10::Error'", "a second line of it"}));

  LastWords other;
  other.take("#1 of the list\nC++ CapturedTraceback:\n#4 c10::Error::Error() from ??:0\nframe 3\n", true);
  EXPECT_EQ(other.tail(), (std::vector<std::string>{"#1 of the list", "frame 3"}));
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
  EXPECT_NE(judge_kill(SIGKILL, false, before, after).find("probably"), std::string::npos);
  // A worker that was moved into a group of its own: its counter began at 0.
  EXPECT_NE(judge_kill(SIGKILL, false, before, {.group = "/h", .kills = 1}), "");
  EXPECT_EQ(judge_kill(SIGKILL, false, {}, {}), "");
}

TEST(OutOfMemory, ReadsTheKernelsTables) {
  EXPECT_EQ(counter_in("low 0\noom 7\noom_kill 3\n", "oom_kill"), 3);
  EXPECT_EQ(counter_in("oom_kill_disable 0\nunder_oom 0\noom_kill 4", "oom_kill"), 4);
  EXPECT_EQ(counter_in("", "oom_kill"), std::nullopt);
  EXPECT_EQ(memory_group_folder("0::/user.slice/a\n"), "/sys/fs/cgroup/user.slice/a");
  EXPECT_EQ(memory_group_folder("5:memory:/job\n4:cpu,cpuacct:/x\n0::/\n"), "/sys/fs/cgroup/memory/job");
  EXPECT_EQ(memory_group_folder("nonsense\n"), "");
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

TEST(AgentMessage, SurvivesTheWire) {
  AgentMessage message{.kind = AgentMessage::Kind::failed, .generation = 3, .node_rank = -1, .port = 4711, .host = "h"};
  message.words = {"a", std::string("b\0c", 3)};
  message.exit = {.rank = 5, .node_rank = 1, .host = "x", .pid = 9, .code = 2, .cause = "c", .error = "e", .tail = {"t", ""}, .at_us = -1};
  const std::string bytes = encode(message);
  EXPECT_EQ(decode_agent_message(bytes), message);
  for (std::size_t i = 0; i < bytes.size(); ++i) EXPECT_THROW(decode_agent_message(bytes.substr(0, i)), ProtocolError);
  EXPECT_THROW(decode_agent_message(bytes + "x"), ProtocolError);
  std::string unknown = bytes;
  unknown[0] = 99;
  EXPECT_THROW(decode_agent_message(unknown), ProtocolError);
}

TEST(Secrets, EachGenerationHasItsOwn) {
  const Secret job = Secret::random();
  EXPECT_NE(secret_of_generation(job, 0).bytes, secret_of_generation(job, 1).bytes);
  EXPECT_EQ(secret_of_generation(job, 1).bytes, secret_of_generation(job, 1).bytes);
  EXPECT_NE(secret_of_generation(job, 0).bytes, job.bytes);
  EXPECT_TRUE(secret_of_generation(Secret::none(), 1).is_none());
}

TEST(Ports, AReservedPortIsRankZerosAlone) {
  const UniqueFd held = reserve_port(Address::parse("127.0.0.1:0"));
  const Address address = Address::of_socket(held.get());
  ASSERT_NE(address.port(), 0);
  for (int i = 0; i < 200; ++i) {
    const UniqueFd other = reserve_port(Address::parse("127.0.0.1:0"));
    EXPECT_NE(Address::of_socket(other.get()).port(), address.port());
  }
  const UniqueFd listener = listen_on(address);
  EXPECT_THROW(listen_on(address), SystemError) << "it is listened on already";
}

TEST(Program, IsFoundAsAShellWould) {
  EXPECT_EQ(find_program({"sh", "-c"}, "/nonexistent:/bin").path, "/bin/sh");
  EXPECT_EQ(find_program({"/bin/sh"}, "").argv, (std::vector<std::string>{"/bin/sh"}));
  const auto code = [](const std::vector<std::string>& command) {
    try {
      find_program(command, "/bin:/usr/bin");
    } catch (const ProgramError& error) {
      return error.exit_code;
    }
    return 0;
  };
  EXPECT_EQ(code({"no-such-program"}), kNotFound);
  EXPECT_EQ(code({"/no/such"}), kNotFound);
  EXPECT_EQ(code({"/etc/passwd"}), kNotExecutable);
  EXPECT_EQ(code({"/tmp"}), kNotExecutable);
  EXPECT_THROW(find_program({}, "/bin"), InvalidArgument);
  EXPECT_THROW(find_program({""}, "/bin"), InvalidArgument);
}

TEST(RemoteStart, QuotesForTheOtherShell) {
  EXPECT_EQ(quoted("/a b/it's"), "'/a b/it'\\''s'");
  EXPECT_EQ(split_words("  ssh -p  22 "), (std::vector<std::string>{"ssh", "-p", "22"}));
  EXPECT_TRUE(split_words(" ").empty());
}

}  // namespace
}  // namespace maniple::launch
