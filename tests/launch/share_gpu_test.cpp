// `maniple run --share-gpu` with a program instead of NVIDIA's that behaves like it: the MPS daemon starts before the
// ranks, and nothing is left of it however the job ends.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

// -d: forks a daemon, which makes a pipe "control" and forks a server, and returns at once. Without arguments: sends
// each line of its input to the daemon and waits for the answer. FAKE_MPS makes it fail in one way or another.
constexpr const char* kFake = R"(#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
case "$1" in
-d)
  if [ "$FAKE_MPS" = fails ]; then echo "one"; echo "no permission for the device" >&2; exit 1; fi
  setsid "$0" --daemon </dev/null >/dev/null 2>&1 &
  exit 0 ;;
--server)
  [ "$FAKE_MPS" != stubborn ] || trap "" TERM
  exec sleep 1000 ;;
--daemon)
  if [ "$FAKE_MPS" = dies ]; then echo "the daemon has no GPU" >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; fi
  [ "$FAKE_MPS" != stubborn ] || trap "" TERM
  echo "start $pipe devices=$CUDA_VISIBLE_DEVICES" >>"$FAKE_MPS_RECORD"
  : >"$pipe/control_lock"
  mkfifo "$pipe/control"
  exec 3<>"$pipe/control"
  "$0" --server 3>&- &
  server=$!
  while read -r command answer <&3; do
    [ "$FAKE_MPS" != silent ] || continue
    case "$command" in
    quit)
      [ "$FAKE_MPS" != stubborn ] || continue
      kill $server
      wait $server
      rm -f "$pipe/control"
      echo "quit $pipe" >>"$FAKE_MPS_RECORD"
      echo done 1<>"$answer"
      exit 0 ;;
    *) echo "$server" 1<>"$answer" ;;
    esac
  done ;;
*)
  [ -p "$pipe/control" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
  while read -r line; do
    mkfifo "$pipe/answer.$$"
    exec 4<>"$pipe/answer.$$"
    echo "$line $pipe/answer.$$" >"$pipe/control"
    read -r answer <&4
    echo "$answer"
    rm -f "$pipe/answer.$$"
  done ;;
esac
)";

// Each rank prints what it finds, and whether the daemon replies to it.
constexpr const char* kLook =
    "echo get_server_list | nvidia-cuda-mps-control >/dev/null && "
    "echo pipe=$CUDA_MPS_PIPE_DIRECTORY log=$CUDA_MPS_LOG_DIRECTORY "
    "mode=$(stat -c %a $(dirname $CUDA_MPS_PIPE_DIRECTORY)) device=$CUDA_VISIBLE_DEVICES. rank=$RANK.";
constexpr const char* kStay = "echo up=$CUDA_MPS_PIPE_DIRECTORY.; sleep 1000";

class ShareGpu : public testing::Test {
 protected:
  ShareGpu() {
    for (const char* name : {"bin", "tmp", "empty"}) ::mkdir(path(name).c_str(), 0700);
    const std::string program = path("bin/nvidia-cuda-mps-control");
    std::ofstream(program) << kFake;
    ::chmod(program.c_str(), 0700);
  }

  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  /// What the launcher, its daemon and its workers have in their environment.
  Setting setting(const std::string& behaviour = "") const {
    return {.env = {{"PATH", path("bin") + ":" + std::getenv("PATH")},
                    {"TMPDIR", path("tmp")},
                    {"FAKE_MPS", behaviour},
                    {"FAKE_MPS_RECORD", path("record")},
                    {"TEST_MARK", mark_.substr(mark_.find('=') + 1)}}};
  }
  Setting with(const std::string& name, const std::string& value) const {
    Setting result = setting();
    std::erase_if(result.env, [&](const auto& entry) { return entry.first == name; });
    result.env.emplace_back(name, value);
    return result;
  }

  int recorded(const std::string& word) const {
    const std::string text = file_text(path("record"));
    int count = 0;
    for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
    return count;
  }

  void expect_nothing_left() const {
    EXPECT_TRUE(becomes_true([&] { return processes_with(mark_).empty(); }, 20)) << processes_with(mark_).size();
    EXPECT_TRUE(becomes_true([&] { return names_in(path("tmp")).empty(); }, 20)) << "the folder is left";
  }

  const TemporaryDirectory folder_;
  const std::string mark_ = new_mark();
};

std::string after(const std::string& text, const std::string& word) {
  const auto begin = text.find(word);
  if (begin == std::string::npos) return "";
  return text.substr(begin + word.size(), text.find_first_of(". \n", begin + word.size()) - begin - word.size());
}

TEST_F(ShareGpu, TheDaemonIsThereBeforeTheRanksAndGoneAfterThem) {
  const Result result = maniple({"run", "--share-gpu", "/bin/sh", "-c", kLook}, setting());
  EXPECT_EQ(result.code, 0) << result.err;
  const std::string pipe = after(result.out, "pipe=");
  EXPECT_EQ(pipe.find(path("tmp/maniple-mps-")), 0u) << result.out;
  EXPECT_NE(result.out.find(" mode=700 "), std::string::npos) << result.out;
  EXPECT_EQ(after(result.out, "log="), pipe.substr(0, pipe.rfind('/')) + "/log") << result.out;
  EXPECT_EQ(result.err, "") << "nothing to say when all is well";
  EXPECT_EQ(recorded("start"), 1);
  EXPECT_EQ(recorded("quit"), 1) << "it was asked to end";
  EXPECT_TRUE(processes_with(mark_).empty());
  EXPECT_TRUE(names_in(path("tmp")).empty());
}

TEST_F(ShareGpu, WithoutTheOptionNothingIsStarted) {
  const Result result = maniple(
      {"run", "/bin/sh", "-c", "echo pipe=$CUDA_MPS_PIPE_DIRECTORY. queues=$CUDA_DEVICE_MAX_CONNECTIONS."}, setting());
  EXPECT_NE(result.out.find("pipe=. queues=."), std::string::npos) << result.out;
  EXPECT_EQ(recorded("start"), 0);
}

TEST_F(ShareGpu, StreamsOfAWorkerHaveQueuesOfTheirOwn) {
  const std::vector<std::string> command = {"run", "--share-gpu", "/bin/sh", "-c",
                                            "echo queues=$CUDA_DEVICE_MAX_CONNECTIONS."};
  EXPECT_EQ(after(maniple(command, setting()).out, "queues="), "32");
  std::vector<std::string> four = command;
  four.insert(four.begin() + 1, {"-n", "4", "--devices-per-node", "2"});
  EXPECT_EQ(after(maniple(four, setting()).out, "queues="), "16") << "two ranks on a GPU";
  EXPECT_EQ(after(maniple(command, with("CUDA_DEVICE_MAX_CONNECTIONS", "4")).out, "queues="), "4");
}

TEST_F(ShareGpu, TheLauncherIsKilled) {
  Launched launched({"run", "-n", "2", "--share-gpu", "/bin/sh", "-c", kStay}, setting());
  ASSERT_TRUE(launched.wait_for("up=", 60, 2)) << launched.err();
  launched.signal(SIGKILL);
  EXPECT_EQ(launched.wait(), 137);
  expect_nothing_left();
  EXPECT_EQ(recorded("quit"), 1);
}

// Of any two of the launcher's processes that are killed, the third ends what is left.
TEST_F(ShareGpu, ProcessesOfTheLauncherAreKilled) {
  enum { supervisor = 1, reaper = 2, agent = 4 };
  for (const int killed : {reaper + 0, agent + 0, supervisor | reaper, supervisor | agent, reaper | agent}) {
    SCOPED_TRACE(killed);
    Launched launched({"run", "-n", "2", "--share-gpu", "/bin/sh", "-c", kStay}, setting());
    ASSERT_TRUE(launched.wait_for("up=", 60, 2)) << launched.err();
    const pid_t pids[] = {launched.pid(), launched.reaper(), launched.agent()};
    for (int i = 0; i < 3; ++i) {
      if ((killed & (1 << i)) != 0) ::kill(pids[i], SIGKILL);
    }
    EXPECT_EQ(launched.wait(), 137);
    expect_nothing_left();
  }
}

TEST_F(ShareGpu, AWorkerIsKilled) {
  const Result result = maniple(
      {"run", "-n", "2", "--share-gpu", "/bin/sh", "-c", "[ $RANK = 1 ] && kill -KILL $$; sleep 1000"}, setting());
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_TRUE(processes_with(mark_).empty());
  EXPECT_TRUE(names_in(path("tmp")).empty());
  EXPECT_EQ(recorded("quit"), 1);
}

TEST_F(ShareGpu, ARestartKeepsTheDaemon) {
  const Result result =
      maniple({"run", "-n", "2", "--share-gpu", "--max-restarts", "2", "--restart-delay", "0.01", "/bin/sh", "-c",
               "echo get_server_list | nvidia-cuda-mps-control >/dev/null && "
               "echo try=$MANIPLE_RESTART_COUNT pipe=$CUDA_MPS_PIPE_DIRECTORY.; sleep 1000 & "
               "[ $RANK = 0 ] || exec sleep 1000; [ $MANIPLE_RESTART_COUNT = 2 ] && exit 5; exit 3"},
              setting());
  EXPECT_EQ(result.code, 5) << result.err;
  EXPECT_EQ(recorded("start"), 1) << "one daemon for all";
  EXPECT_EQ(recorded("quit"), 1);
  const std::string pipe = after(result.out, "try=0 pipe=");
  EXPECT_FALSE(pipe.empty()) << result.out;
  EXPECT_EQ(after(result.out, "try=2 pipe="), pipe) << result.out;
  expect_nothing_left();
}

TEST_F(ShareGpu, ADaemonThatFails) {
  for (const auto& [how, text] : {std::pair("fails", "-d failed with exit code 1: no permission for the device; "),
                                  std::pair("dies", "-d has ended: the daemon has no GPU; ")}) {
    const Result result = maniple({"run", "-n", "2", "--share-gpu", "/bin/echo", "started"}, setting(how));
    EXPECT_EQ(result.code, 1) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("without --share-gpu the ranks share a GPU in time slices\n"), std::string::npos);
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << "one line: " << result.err;
    expect_nothing_left();
  }
}

TEST_F(ShareGpu, ADaemonThatDoesNotAnswer) {
  const Result result = maniple({"run", "-n", "2", "--share-gpu", "/bin/echo", "started"}, setting("silent"));
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("-d did not answer within 10 s; "), std::string::npos) << result.err;
  expect_nothing_left();
}

TEST_F(ShareGpu, CtrlCWhileItDoesNotAnswer) {
  for (const int signal : {SIGINT, SIGKILL}) {
    Launched launched({"run", "--share-gpu", "/bin/echo", "started"}, setting("silent"));
    ASSERT_TRUE(becomes_true([&] { return !file_text(path("record")).empty(); }));
    launched.signal(SIGCONT);  // is for the workers
    launched.signal(SIGUSR1);
    ASSERT_TRUE(becomes_true([&] { return state_of(launched.pid()) == 'S'; }));  // it has passed them on
    launched.signal(signal);
    EXPECT_EQ(launched.wait(), 128 + signal) << launched.err();
    EXPECT_EQ(launched.out(), "");
    expect_nothing_left();
    ::remove(path("record").c_str());
  }
}

TEST_F(ShareGpu, ADaemonThatDoesNotQuit) {
  const Result result = maniple({"run", "--share-gpu", "/bin/sh", "-c", kLook}, setting("stubborn"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(processes_with(mark_).empty()) << "it was killed";
  EXPECT_TRUE(names_in(path("tmp")).empty());
}

TEST_F(ShareGpu, TheProgramIsMissing) {
  const Result result = maniple({"run", "--share-gpu", "/bin/echo", "started"}, with("PATH", path("empty")));
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(
      result.err.find("maniple: --share-gpu: nvidia-cuda-mps-control is not on PATH; it is a part of NVIDIA's driver"),
      std::string::npos)
      << result.err;
  EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << "one line: " << result.err;
  EXPECT_TRUE(names_in(path("tmp")).empty());
}

TEST_F(ShareGpu, ADaemonThatIsThereAlreadyIsUsed) {
  const std::vector<std::string> command = {"/bin/sh", "-c", "echo pipe=$CUDA_MPS_PIPE_DIRECTORY."};
  const auto run = [&](std::vector<std::string> options, const Setting& setting) {
    options.insert(options.begin(), {"run", "--share-gpu"});
    options.insert(options.end(), command.begin(), command.end());
    const Result result = maniple(options, setting);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err,
              "maniple: --share-gpu: CUDA_MPS_PIPE_DIRECTORY is set: the MPS daemon of /there/mps is used, none is "
              "started\n");
    EXPECT_NE(result.out.find("pipe=/there/mps."), std::string::npos) << result.out;
  };
  run({}, with("CUDA_MPS_PIPE_DIRECTORY", "/there/mps"));
  run({"--env", "CUDA_MPS_PIPE_DIRECTORY=/there/mps"}, setting());
  run({"--hosts", "127.0.0.1", "--env", "CUDA_MPS_PIPE_DIRECTORY=/there/mps"}, setting());
  EXPECT_EQ(recorded("start"), 0);
  EXPECT_TRUE(names_in(path("tmp")).empty());
}

TEST_F(ShareGpu, TwoJobsHaveADaemonEach) {
  Launched first({"run", "--share-gpu", "/bin/sh", "-c", kStay}, setting());
  ASSERT_TRUE(first.wait_for("up=")) << first.err();
  const Result second = maniple({"run", "--share-gpu", "/bin/sh", "-c", kLook}, setting());
  EXPECT_EQ(second.code, 0) << second.err;
  const std::string pipe = after(first.out(), "up=");
  EXPECT_NE(after(second.out, "pipe="), pipe);
  EXPECT_EQ(recorded("start"), 2);
  EXPECT_EQ(recorded("quit"), 1) << "the second job's";
  EXPECT_EQ(names_in(path("tmp")).size(), 1u);
  EXPECT_EQ(names_in(pipe).empty(), false) << "the first job's is still there";
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143);
  EXPECT_EQ(recorded("quit"), 2);
  expect_nothing_left();
}

// GPUs are dealt in blocks. A daemon that sees some of them numbers them anew; UUIDs stay.
TEST_F(ShareGpu, RanksAreDealtToTheGpus) {
  const auto devices = [&](const std::string& visible, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"run", "-n", "4", "--share-gpu", "--no-prefix"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    arguments.insert(arguments.end(), {"/bin/sh", "-c", "echo rank$RANK=$CUDA_VISIBLE_DEVICES."});
    const Result result = maniple(arguments, with("CUDA_VISIBLE_DEVICES", visible));
    EXPECT_EQ(result.code, 0) << result.err;
    std::string text;
    for (int rank = 0; rank < 4; ++rank) text += after(result.out, fmt::format("rank{}=", rank)) + " ";
    return text;
  };
  EXPECT_EQ(devices("4,6"), "0 0 1 1 ");
  EXPECT_EQ(recorded("devices=4,6\n"), 1) << "the daemon sees what the launcher saw";
  EXPECT_EQ(devices("GPU-aa,GPU-bb"), "GPU-aa GPU-aa GPU-bb GPU-bb ");
  EXPECT_EQ(devices("3"), "0 0 0 0 ");
  EXPECT_EQ(devices("4,5,6,7"), "0 1 2 3 ");
  EXPECT_EQ(devices("4,5,6,7", {"--devices-per-node", "2"}), "0 0 1 1 ");
  EXPECT_EQ(devices("4,6", {"--env", "CUDA_MPS_PIPE_DIRECTORY=/there/mps"}), "4 4 6 6 ");

  const Result table = maniple({"run", "--explain", "-n", "16", "--devices-per-node", "8", "--share-gpu", "x"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("     2      0           2  1\n     3      0           3  1\n"), std::string::npos)
      << table.out;
  const Result both = maniple({"run", "--share-gpu", "--devices-per-process", "1", "--devices-per-node", "2", "x"});
  EXPECT_EQ(both.code, 2);
  EXPECT_NE(both.err.find("--share-gpu lets several processes have one GPU, --devices-per-process 1 gives each"),
            std::string::npos)
      << both.err;
}

TEST_F(ShareGpu, AgentsOfHostsStartTheirs) {
  const Result result = maniple({"run", "--hosts", "127.0.0.1:2", "--share-gpu", "/bin/sh", "-c",
                                 "[ $RANK = 1 ] || echo pipe=$CUDA_MPS_PIPE_DIRECTORY."},
                                setting());
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(after(result.out, "pipe=").find(path("tmp/maniple-mps-")), 0u) << result.out;
  EXPECT_EQ(recorded("start"), 1);
  EXPECT_EQ(recorded("quit"), 1);
  expect_nothing_left();
  const Result failed =
      maniple({"run", "--hosts", "127.0.0.1:2", "--share-gpu", "/bin/echo", "started"}, setting("fails"));
  EXPECT_NE(failed.code, 0);
  EXPECT_EQ(failed.out, "");
  EXPECT_NE(failed.err.find("-d failed with exit code 1: no permission for the device; "), std::string::npos)
      << failed.err;
  EXPECT_NE(failed.err.find("host 127.0.0.1"), std::string::npos) << failed.err;
  expect_nothing_left();
}

}  // namespace
}  // namespace maniple::launched
