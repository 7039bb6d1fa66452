// Starting processes, the environment of ranks, their messages, and which of them failed first.
#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include <fmt/format.h>

#include "comm/net/address.h"
#include "launch/process/descriptors.h"
#include "launch/process/failure_report.h"
#include "launch/process/lost_by.h"
#include "launch/process/process_table.h"
#include "launch/process/program.h"
#include "launch/process/rank_environment.h"
#include "launch/process/start.h"
#include "launch/process/worker_messages.h"

namespace maniple::launch {
namespace {

TEST(FailureReport, TellsConsequencesFromCauses) {
  EXPECT_TRUE(is_consequence(lost_by(0, 2), 0));
  EXPECT_TRUE(is_consequence({.kind = ErrorKind::aborted}, 0));
  EXPECT_TRUE(is_consequence({.kind = ErrorKind::aborted, .origin = 3}, 0));
  EXPECT_FALSE(is_consequence({.kind = ErrorKind::aborted, .origin = 0}, 0)) << "it aborted the group itself";
  EXPECT_FALSE(is_consequence({.kind = ErrorKind::timeout}, 0)) << "of an unknown rank";
  EXPECT_TRUE(is_consequence({.kind = ErrorKind::timeout, .ranks = {2, 3}, .origin = 0}, 0));
  EXPECT_FALSE(is_consequence({.kind = ErrorKind::timeout, .ranks = {0, 1}, .origin = 0}, 0)) << "it is late itself";
  EXPECT_FALSE(is_consequence({.kind = ErrorKind::mismatch, .origin = 0}, 0));
  EXPECT_TRUE(is_consequence({.kind = ErrorKind::mismatch, .origin = 1}, 0));
}

// A rank of several groups reports the failure of each.
TEST(FailureReport, TellsReactionsFromNewFailures) {
  const auto in = [](const char* group, ErrorInfo info) {
    info.group = group;
    return info;
  };
  const ErrorInfo lost = in("world", lost_by(0, 2));
  const ErrorInfo own_abort = in("world/1", {.kind = ErrorKind::aborted, .origin = 0});
  const std::chrono::seconds soon(1), later(60);
  EXPECT_TRUE(follows_from(lost, own_abort, 0, soon)) << "it lost rank 2 and then aborts its other groups";
  EXPECT_TRUE(follows_from(lost, in("world/1", lost_by(0, 1)), 0, soon)) << "another rank ends for the same reason";
  EXPECT_TRUE(follows_from(own_abort, lost, 0, soon)) << "rank 2 ended because of the abort";
  EXPECT_FALSE(follows_from(lost, own_abort, 0, later)) << "the program went on without rank 2";
  EXPECT_FALSE(follows_from(lost, in("world", lost_by(0, 3)), 0, soon)) << "a new group of that name";
  const ErrorInfo own_mismatch = in("world/1", {.kind = ErrorKind::mismatch, .origin = 0});
  EXPECT_FALSE(follows_from(lost, own_mismatch, 0, soon)) << "it begins here";
}

TEST(FailureReport, TheCauseComesBeforeItsConsequences) {
  const RankExit consequence{.rank = 0, .code = 1, .consequence = true, .at_us = 100};
  const RankExit killed{.rank = 1, .signal = SIGKILL, .at_us = 5000};
  const RankExit later{.rank = 2, .code = 2, .at_us = 90'000};
  EXPECT_EQ(first_cause({consequence, killed, later}), 1u);
  EXPECT_EQ(first_cause({later, killed}), 1u);
  EXPECT_EQ(first_cause({consequence}), 0u);
  const auto blames = [](int rank, int blamed, int at) {
    return RankExit{.rank = rank, .code = 1, .consequence = true, .blamed = blamed, .at_us = at};
  };
  EXPECT_EQ(first_cause({blames(0, 1, 10), blames(1, 2, 20)}), 1u) << "who is blamed is nearer to the cause";
  EXPECT_EQ(unseen_cause({blames(0, 1, 10), blames(1, 2, 20)}), 2);
  EXPECT_EQ(unseen_cause({blames(0, 1, 10), blames(1, 0, 20)}), -1) << "each other";
  EXPECT_EQ(unseen_cause({blames(0, 1, 10), killed}), -1);
  EXPECT_EQ(blamed_rank({.kind = ErrorKind::peer_lost, .ranks = {3}, .loss = LossKind::left}), -1);
  EXPECT_EQ(blamed_rank(lost_by(0, 2)), 2);
  EXPECT_EQ(blamed_rank({.kind = ErrorKind::timeout, .ranks = {2, 3}, .origin = 0}), 2);
  EXPECT_EQ(blamed_rank({.kind = ErrorKind::timeout, .origin = 0}), 0);
  // A network that was cut: the rank beyond the cut waits for another as well.
  for (int first = 0; first < 4; ++first) {
    std::vector<RankExit> cut = {blames(0, 2, 20), blames(1, 2, 20), blames(2, 0, 20), blames(3, 2, 20)};
    cut[static_cast<std::size_t>(first)].at_us = 10;
    EXPECT_EQ(first_cause(cut), 2u) << "rank " << first << " was the first to end";
  }
  // Within a moment of each other the one with a signal is more likely the cause.
  EXPECT_EQ(first_cause({RankExit{.rank = 0, .code = 1, .at_us = 100}, killed}), 1u);
  EXPECT_EQ(first_cause({RankExit{.rank = 0, .code = 1, .at_us = 100}, later}), 0u);
  EXPECT_TRUE(cause_may_follow({consequence}));
  EXPECT_FALSE(cause_may_follow({consequence, killed}));
}

TEST(FailureReport, ARankThatEndedWithZeroIsTheCauseIfOthersWaitedForIt) {
  const std::vector<RankExit> ended = {{.rank = 3, .host = "b", .pid = 8}, {.rank = 1, .host = "a", .pid = 7}};
  const RankExit lost{.rank = 0, .host = "a", .pid = 9, .code = 1, .error = "lost", .consequence = true, .blamed = 1};
  ASSERT_EQ(early_end({lost}, ended), &ended[1]);
  EXPECT_EQ(describe_failure(lost, 4, 1, &ended[1]),
            "maniple: rank 1 of 4 ended early, on host a (pid 7): exit code 0, while other ranks waited for it; rank 0 "
            "failed because of it, on host a (pid 9): exit code 1\nmaniple:   error: lost");
  // One that left in good order is not blamed, but it is the cause all the same.
  EXPECT_EQ(early_end({{.rank = 0, .code = 1, .consequence = true, .left = 3}}, ended), &ended[0]);
  EXPECT_EQ(left_rank({.kind = ErrorKind::peer_lost, .ranks = {3}, .loss = LossKind::left}), 3);
  EXPECT_EQ(left_rank(lost_by(0, 2)), -1);
  EXPECT_EQ(early_end({{.rank = 0, .code = 1, .consequence = true, .blamed = 2}}, ended), nullptr);
  EXPECT_EQ(early_end({lost, {.rank = 2, .signal = SIGKILL}}, ended), nullptr) << "rank 2 has failed";
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

TEST(WorkerMessages, AreReceived) {
  WorkerMessages messages;
  messages.open();
  const auto send = [&](const std::string& packet) {
    ASSERT_EQ(::send(messages.rank_end(), packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
  };
  for (const char* packet : {"joining 1", "joining 2", "joined 1", "joining x", "nonsense"}) send(packet);
  send(encode_report({.rank = 2, .error = lost_by(2, 1)}));
  messages.close_rank_end();
  while (messages.receive()) {
  }
  EXPECT_TRUE(messages.is_initialised(1));
  EXPECT_EQ(messages.waiting(), 2);
  EXPECT_EQ(messages.failure_of(1), nullptr);
  ASSERT_NE(messages.failure_of(2), nullptr);
  EXPECT_EQ(describe(*messages.failure_of(2)), describe(lost_by(2, 1)));
}

TEST(WorkerMessages, AFailureThatFollowsFromAnotherDoesNotReplaceIt) {
  WorkerMessages messages;
  messages.open();
  const auto report = [&](const ErrorInfo& error) {
    const std::string packet = encode_report({.rank = 2, .error = error});
    ASSERT_EQ(::send(messages.rank_end(), packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
    messages.receive();
  };
  report(lost_by(2, 1));
  EXPECT_EQ(messages.take_reporters(), std::set<int>{2});
  report({.kind = ErrorKind::aborted, .group = "world/1", .origin = 2, .reason = "rank 1 is gone"});
  EXPECT_TRUE(messages.take_reporters().empty());
  EXPECT_EQ(messages.failure_of(2)->kind, ErrorKind::peer_lost);
  // The program recovers, and then fails by itself.
  report({.kind = ErrorKind::mismatch, .group = "world/2", .origin = 2, .reason = "different things"});
  EXPECT_EQ(messages.failure_of(2)->kind, ErrorKind::mismatch);
  EXPECT_EQ(messages.take_reporters(), std::set<int>{2});
  messages.open();
  EXPECT_EQ(messages.failure_of(2), nullptr) << "the ranks of the next start have reported nothing";
}

TEST(WorkerMessages, ARankThatGoesOnIsNoReporter) {
  for (const bool replaced : {false, true}) {
    WorkerMessages messages;
    messages.open();
    const auto send = [&](const std::string& packet) {
      ASSERT_EQ(::send(messages.rank_end(), packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
    };
    send(encode_report({.rank = 2, .error = lost_by(2, 1)}));
    if (!replaced) send("joined 2");  // both messages in one call of receive()
    messages.receive();
    if (replaced) messages.forget(2);
    EXPECT_EQ(messages.failure_of(2), nullptr);
    EXPECT_TRUE(messages.take_reporters().empty());
  }
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

std::string value(const Environment& environment, const std::string& name) {
  const std::string* entry = find_variable(environment, name);
  return entry == nullptr ? "(unset)" : entry->substr(name.size() + 1);
}

TEST(WorkerEnvironment, IsWhatThePyTorchWorldSets) {
  const NodeEnvironment node{.master_addr = "10.0.0.1",
                             .master_port = 4711,
                             .node_count = 2,
                             .job = "run-1",
                             .generation = 2,
                             .restarts = 2,
                             .max_restarts = 3,
                             .secret_fd = 9,
                             .cores = 8,
                             .devices = {"GPU-a", "GPU-b", "GPU-c", "GPU-d"}};
  const WorkerAssignment assignment{.rank = 3,
                                    .node_rank = 1,
                                    .local_rank = 1,
                                    .local_size = 2,
                                    .world_size = 4,
                                    .first_device = 2,
                                    .device_count = 2};
  const Environment result =
      rank_environment({"HOME=/h", "RANK=77", "MANIPLE_SECRET_FILE=/x", "CUDA_VISIBLE_DEVICES=all"}, node, assignment);
  EXPECT_EQ(value(result, "HOME"), "/h");
  EXPECT_EQ(value(result, "RANK"), "3");
  EXPECT_EQ(value(result, "WORLD_SIZE"), "4");
  EXPECT_EQ(value(result, "LOCAL_RANK"), "1");
  EXPECT_EQ(value(result, "LOCAL_WORLD_SIZE"), "2");
  EXPECT_EQ(value(result, "NODE_RANK"), "1");
  EXPECT_EQ(value(result, "GROUP_RANK"), "1");
  EXPECT_EQ(value(result, "MASTER_ADDR"), "10.0.0.1");
  EXPECT_EQ(value(result, "MASTER_PORT"), "4711");
  EXPECT_EQ(value(result, "MANIPLE_RESTART_COUNT"), "2");
  EXPECT_EQ(value(result, "TORCHELASTIC_RESTART_COUNT"), "2");
  EXPECT_EQ(value(result, "TORCHELASTIC_RUN_ID"), "run-1");
  EXPECT_EQ(value(result, "MANIPLE_SECRET_FD"), "9");
  EXPECT_EQ(value(result, "MANIPLE_SECRET_FILE"), "(unset)");
  EXPECT_EQ(value(result, "OMP_NUM_THREADS"), "4");
  EXPECT_EQ(value(result, "CUDA_VISIBLE_DEVICES"), "GPU-c,GPU-d");
  EXPECT_EQ(value(rank_environment({"OMP_NUM_THREADS=3"}, node, assignment), "OMP_NUM_THREADS"), "3");
  EXPECT_EQ(value(rank_environment({}, {.cores = 2}, {.local_size = 5}), "OMP_NUM_THREADS"), "1");
  EXPECT_EQ(value(rank_environment({}, {.cores = 2}, {}), "CUDA_VISIBLE_DEVICES"), "(unset)");
}

TEST(WorkerEnvironment, DevicesAreThoseThatMayBeSeen) {
  EXPECT_EQ(visible_devices({"CUDA_VISIBLE_DEVICES=3,5"}), (std::vector<std::string>{"3", "5"}));
  EXPECT_TRUE(visible_devices({"CUDA_VISIBLE_DEVICES="}).empty());
}

TEST(ProcessTable, ReadsTheLineOfTheKernel) {
  const auto stat = parse_process_stat(
      "42 (a) b (c) R 1 43 44 0 -1 4194304 100 0 0 0 1 2 3 4 20 0 1 0 987654 1000 200 18446744073709551615");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->name, "a) b (c");
  EXPECT_EQ(stat->state, 'R');
  EXPECT_EQ(stat->parent, 1);
  EXPECT_EQ(stat->group, 43);
  EXPECT_EQ(stat->foreground_group, -1);
  EXPECT_EQ(stat->start, 987654u);
  for (const char* bad : {"", "42", "42 (a", "42 (a)", "42 a) R"}) EXPECT_FALSE(parse_process_stat(bad)) << bad;
  EXPECT_TRUE(start_of_process(::getpid()));
  EXPECT_FALSE(start_of_process(999'999'999));
}

TEST(ProcessTable, ReadsControlGroups) {
  EXPECT_EQ(parse_control_groups("0::/user.slice/a").unified, "/sys/fs/cgroup/user.slice/a");
  const ControlGroups old = parse_control_groups("5:cpu,cpuacct:/box\n4:memory:/box/b\nnonsense\n0::/\n");
  EXPECT_EQ(old.cpu, "/sys/fs/cgroup/cpu/box");
  EXPECT_EQ(old.memory, "/sys/fs/cgroup/memory/box/b");
  EXPECT_EQ(old.unified, "/sys/fs/cgroup");
  EXPECT_EQ(parse_control_groups("").memory, "");
}

const Deadline kSoon = Deadline::after(std::chrono::seconds(60));

TEST(ChildProcess, GivesItsLines) {
  ChildProcess child({"sh", "-c", "echo one; echo two; echo three >&2; echo 'the last' >&2"});
  EXPECT_EQ(child.next_line(kSoon), "one");
  EXPECT_EQ(child.next_line(kSoon), "two");
  EXPECT_EQ(child.next_line(kSoon), std::nullopt);
  EXPECT_TRUE(child.has_ended());
  EXPECT_EQ(child.last_error_line(), "the last");
  EXPECT_THROW(ChildProcess({"no-such-program"}), ProgramError);
}

TEST(ChildProcess, EndsWithItsOwner) {
  pid_t pid = -1;
  {
    const Program program =
        find_program({"sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"}, "/usr/bin:/bin");
    const Environment environment = own_environment();
    const std::vector<int> cpus;
    ChildProcess child({.program = &program, .environment = &environment, .cpus = &cpus},
                       std::chrono::milliseconds(50));
    pid = child.pid();
    EXPECT_EQ(child.next_line(kSoon), "up");
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

// Without a session of its own it stays in the process group, ignores what this process ignores, and has its outputs.
TEST(StartProcess, InThisSession) {
  ::signal(SIGUSR1, SIG_IGN);
  auto [reading, writing] = make_pipe();
  const std::string script = fmt::format("kill -USR1 $$; cat /proc/$$/stat >&{}", writing.get());
  const Program program = find_program({"sh", "-c", script}, "/usr/bin:/bin");
  const Environment environment = own_environment();
  const StartedProcess started = start_process({.program = &program,
                                                .environment = &environment,
                                                .output = StartOutput::inherited,
                                                .inherited = {writing.get()},
                                                .own_session = false});
  ::signal(SIGUSR1, SIG_DFL);
  writing.reset();
  EXPECT_FALSE(started.out);
  std::string line(2048, '\0');
  const ssize_t got = ::read(reading.get(), line.data(), line.size());
  int status = -1;
  ASSERT_EQ(::waitpid(started.pid, &status, 0), started.pid);
  EXPECT_EQ(status, 0);
  const auto stat =
      parse_process_stat(std::string_view(line).substr(0, static_cast<std::size_t>(std::max<ssize_t>(got, 0))));
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->group, ::getpgrp());
}

}  // namespace
}  // namespace maniple::launch
