// One machine: what workers get, what the user is told when something is wrong with the command, and how a job starts.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>
#include <openssl/opensslv.h>

#include <chrono>
#include <csignal>
#include <fstream>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

TEST(Run, WorkersGetTheirPlace) {
  const Result result =
      maniple({"run", "-n", "3", "sh", "-c",
               "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR $MANIPLE_RESTART_COUNT; "
               "[ $MASTER_PORT -gt 0 ] && [ $OMP_NUM_THREADS -ge 1 ]"});
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(result.out.find(fmt::format("[rank {}] {} 3 {} 3 0 127.0.0.1 0\n", rank, rank, rank)), std::string::npos)
        << result.out;
  }
}

TEST(Run, RanksJoin) {
  const Result result = maniple({"run", "-n", "4", worker_program(), "join"});
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_NE(result.out.find(fmt::format("[rank {}] sum 6 of 4", rank)), std::string::npos);
  EXPECT_EQ(result.err, "") << "no warning about a secret";
}

// OpenSSL is loaded by those who connect, and only by them.
TEST(Run, WithoutOpenSslRanksSayWhatToInstallAtOnce) {
  const TemporaryDirectory folder;
  std::ofstream(folder.path() + "/libcrypto.so." + std::to_string(OPENSSL_SHLIB_VERSION)).flush();
  const std::string hidden = "LD_LIBRARY_PATH=" + folder.path();
  EXPECT_EQ(maniple({"run", "-n", "2", "--env", hidden, "/bin/true"}).code, 0);
  const auto start = std::chrono::steady_clock::now();
  const Result result = maniple({"run", "-n", "2", "--env", hidden, worker_program(), "join"});
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("OpenSSL, which proves that ranks belong to a job, cannot be loaded"), std::string::npos)
      << result.err;
  EXPECT_NE(result.err.find("apt-get install libssl"), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("handshake"), std::string::npos) << "nobody tried to connect: " << result.err;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << "a handshake is tried for 30 s";
}

TEST(Run, ManyRanksJoin) {
  const Result result = maniple({"run", "-n", "32", "-q", worker_program(), "join"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "");
}

// The secret is in no argument and no variable; the descriptor holds 32 bytes that cannot be changed.
TEST(Run, TheSecretIsInADescriptorOnly) {
  const Result result =
      maniple({"run", "-n", "2", "sh", "-c",
               "f=/proc/self/fd/$MANIPLE_SECRET_FD; hex=$(od -An -v -tx1 $f | tr -d ' \\n'); echo ${#hex}; "
               "case \"$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n')\" in *$hex*) echo "
               "seen;; *) echo unseen;; esac; "
               "(echo x >>$f) 2>/dev/null || echo sealed"});
  EXPECT_EQ(result.out.find("[rank 0] 64\n") != std::string::npos, true) << result.out << result.err;
  EXPECT_NE(result.out.find("[rank 1] unseen\n"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("[rank 1] sealed\n"), std::string::npos) << result.out;
}

TEST(Run, InputEnvironmentAndFolder) {
  const TemporaryDirectory folder;
  const Result result = maniple({"run", "-n", "2", "--env", "COLOUR=deep blue", "--cwd", folder.path(), "sh", "-c",
                                 "read line; echo \"$line|$COLOUR|$(pwd)\""},
                                {.input = "hello\n"});
  EXPECT_NE(result.out.find(fmt::format("[rank 0] hello|deep blue|{}\n", folder.path())), std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find(fmt::format("[rank 1] |deep blue|{}\n", folder.path())), std::string::npos) << result.out;
}

TEST(Run, ScriptsRun) {
  const TemporaryDirectory folder;
  const std::string bare = folder.path() + "/bare";
  std::ofstream(bare) << "echo no hash bang $1\n";
  ::chmod(bare.c_str(), 0755);
  EXPECT_EQ(maniple({"run", bare, "at all"}).out, "[rank 0] no hash bang at all\n");
  if (::access("/usr/bin/python3", X_OK) != 0) GTEST_SKIP() << "no python3";
  const std::string script = folder.path() + "/a.py";
  std::ofstream(script) << "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n";
  EXPECT_EQ(maniple({"run", "-n", "1", script, "-n", "5"}).out, "[rank 0] 0 ['-n', '5']\n") << "options of the program";
}

TEST(Run, ExplainsAndStartsNothing) {
  const Result result = maniple(
      {"run", "--explain", "--nnodes", "2", "--devices-per-node", "4", "--devices-per-process", "2", "/no/such"});
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.out.find("4 ranks on 2 nodes"), std::string::npos);
  EXPECT_NE(result.out.find("     3      1           1  2,3\n"), std::string::npos) << result.out;
}

TEST(Run, DevicesAreSharedOut) {
  const Result result = maniple({"run", "--devices-per-process", "2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"},
                                {.env = {{"CUDA_VISIBLE_DEVICES", "4,5,6,7"}}});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("[rank 0] 4,5\n"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("[rank 1] 6,7\n"), std::string::npos) << result.out;
}

// Where there is no GPU, too, a process learns how many devices it was given.
TEST(Run, WorkersKnowHowManyDevicesTheyHave) {
  const Result given = maniple({"run", "--devices-per-node", "4", "--devices-per-process", "2", "sh", "-c",
                                "echo has ${MANIPLE_DEVICES_PER_PROCESS-none}"});
  EXPECT_NE(given.out.find("[rank 1] has 2\n"), std::string::npos) << given.out << given.err;
  const Result plain = maniple({"run", "-n", "2", "sh", "-c", "echo has ${MANIPLE_DEVICES_PER_PROCESS-none}"},
                               {.env = {{"MANIPLE_DEVICES_PER_PROCESS", "7"}, {"CUDA_VISIBLE_DEVICES", ""}}});
  EXPECT_NE(plain.out.find("[rank 1] has none\n"), std::string::npos) << "left over from outside: " << plain.out;
}

// What people type who come from mpirun and torchrun.
TEST(Run, TakesTheOptionsOfOtherLaunchers) {
  const std::vector<std::vector<std::string>> options = {
      {"-np", "2"},
      {"-q", "--no-prefix", "--color", "never", "-np", "2"},
      {"--standalone", "--nproc_per_node=2"},
      {"--nnodes=1", "--nproc-per-node", "2", "--node_rank=0", "--master_addr", "127.0.0.1", "--master_port=0",
       "--max_restarts=1"},
      {"--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv_id", "7"}};
  for (std::vector<std::string> arguments : options) {
    arguments.insert(arguments.begin(), "run");
    arguments.insert(arguments.end(), {"sh", "-c", "[ $WORLD_SIZE = 2 ] && [ \"$0\" = -np ]", "-np", "9"});
    const Result result = maniple(arguments);
    EXPECT_EQ(result.code, 0) << fmt::format("{}", fmt::join(arguments, " ")) << result.err;
  }
}

struct Mistake {
  std::vector<std::string> arguments;
  int code;
  const char* words;
};
TEST(Run, TwoDashesEndTheOptions) {
  const Result result = maniple({"run", "-n", "2", "--no-prefix", "--", "/bin/echo", "--", "-n", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, "-- -n 3\n-- -n 3\n");
  EXPECT_EQ(maniple({"run", "-n", "2", "--"}).code, 2);
}

TEST(Run, MistakesCostOneLine) {
  const TemporaryDirectory folder;
  const auto program = [&](const char* name, const std::string& contents) {
    const std::string path = folder.path() + "/" + name;
    std::ofstream(path, std::ios::binary) << contents;
    ::chmod(path.c_str(), 0755);
    return path;
  };
  std::ifstream whole(maniple_program(), std::ios::binary);
  std::string part(40, '\0');
  whole.read(part.data(), 40);
  const std::string file = program("file", "text"), cut = program("cut", part), empty = program("empty", "");
  const std::string interpreter = program("interpreter", "#!/no/such/python -u\n"),
                    windows = program("windows", "#!/bin/sh\r\n");
  const Mistake mistakes[] = {
      {{"run"}, 2, "no program given"},
      {{"run", ""}, 2, "no program given"},
      {{"run", "-n", "0", "true"}, 2, "-n is \"0\""},
      {{"run", "-n", "-3", "true"}, 2, "-n is \"-3\""},
      {{"run", "-n", "many", "true"}, 2, "-n is \"many\""},
      {{"run", "-n", "2", "/no/such/program"}, 127, "was not found"},
      {{"run", "no-such-program"}, 127, "not found on PATH"},
      {{"run", "/etc/passwd"}, 126, "not executable"},
      {{"run", folder.path()}, 126, "is a folder"},
      {{"run", "--nnodes", "2", "--master", "::1:29500", "true"}, 2, "stands in brackets"},
      {{"run", "--master", "host.invalid:29500", "true"}, 2, "host.invalid"},
      {{"run", "--heartbeat", "0", "true"}, 2, "--heartbeat is \"0\"; expected a number of seconds, at least 0.01"},
      {{"run", "--heartbeat", "4", "--silence-limit", "10", "true"}, 2, "--silence-limit is 10"},
      {{"run", "--cores-per-process", "-1", "true"},
       2,
       "--cores-per-process is \"-1\"; expected a whole number, at least 1"},
      {{"run", "--cores-per-process", "0", "true"}, 2, "--cores-per-process is \"0\""},
      {{"run", "--devices-per-node", "0", "true"}, 2, "--devices-per-node is \"0\""},
      {{"run", "--devices-per-process", "0", "true"}, 2, "--devices-per-process is \"0\""},
      {{"run", "-n", "2", "--only-rank", "7", "true"}, 2, "--only-rank is 7; expected 0 to 1"},
      {{"run", "--hosts", "a:2", "--only-rank", "2", "true"}, 2, "--only-rank is 2; expected 0 to 1"},
      {{"run", "--hosts", "", "true"}, 2, "--hosts is empty"},
      {{"run", "--hostfile", "", "true"}, 2, "--hostfile is empty"},
      {{"run", "-n", "", "true"}, 2, "-n is empty"},
      {{"run", "--master", "", "true"}, 2, "--master is empty"},
      {{"run", "--master-port", "", "true"}, 2, "--master-port is empty"},
      {{"run", "--cwd", "", "true"}, 2, "--cwd is empty"},
      {{"run", "--log-dir", "", "true"}, 2, "--log-dir is empty"},
      {{"run", "--secret-file", "", "true"}, 2, "--secret-file is empty"},
      {{"run", "--env", "", "true"}, 2, "--env is empty"},
      {{"doctor", "--hosts", ""}, 2, "--hosts is empty"},
      {{"run", "--log-dir", file, "true"}, 2, "--log-dir"},
      {{"run", "--log-dir", "/proc/none", "true"}, 2, "--log-dir /proc/none: /proc/none: "},
      {{"run", "--nnodes", "2", "--master", "127.0.0.1:1", "--secret-file", "/no/such", "true"},
       2,
       "--secret-file is \"/no/such\": "},
      {{"run", "--nnodes", "2", "--master", "127.0.0.1:1", "--secret-file", file, "true"}, 2, "--secret-file is \""},
      {{"run", cut}, 126, "rank 0 of 1 could not be started on host "},
      {{"run", cut}, 126, "it is not a program for this machine, or only a part of one"},
      {{"run", empty}, 126, "it is not a program for this machine, or only a part of one"},
      {{"run", "-n", "2", interpreter}, 126, "its interpreter /no/such/python, named in its first line, is not there"},
      {{"run", windows}, 126, "CR LF"},
      {{"run", "--bind", "sockets", "true"}, 2, "maniple: --bind is \"sockets\"; expected cores or none\n"},
      {{"run", "--", "--unknown"}, 127, "--unknown"},
      {{"run", "--unknown", "true"},
       2,
       "no option --unknown (see maniple run --help); a program of that name: -- --unknown"},
      {{"run", "--max-restart", "1", "true"}, 2, "no option --max-restart; did you mean --max-restarts?"},
      {{"run", "-H", "a,b", "true"}, 2, "no option -H: use --hosts a:4,b:4"},
      {{"run", "--monitor_interval=5", "true"}, 2, "no option --monitor_interval=5: leave it out"},
      {{"run", "--nnodes", "2", "true"}, 2, "needs --master"},
      {{"run", "--nnodes", "4:2", "true"}, 2, "--nnodes"},
      {{"run", "--nnodes", "2", "--node-rank", "2", "--master", "127.0.0.1:1", "true"}, 2, "--node-rank is 2"},
      {{"run", "--nnodes", "2", "--node-rank", "-2", "--master", "127.0.0.1:1", "true"}, 2, "--node-rank is \"-2\""},
      {{"run", "--nnodes", "2", "--master", "host.invalid:29500", "true"}, 2, "host.invalid"},
      {{"run", "--nnodes", "2", "--master", "10.1.2.3:29500", "true"}, 2, "no secret"},
      {{"run", "--nnodes", "2", "--master", "127.0.0.1:x", "true"}, 2, "--master"},
      {{"run", "--devices-per-node", "4", "--devices-per-process", "3", "true"}, 2, "1 would be left over"},
      {{"run", "--max_restarts", "-1", "true"}, 2, "--max_restarts is \"-1\"; expected a whole number, at least 0"},
      {{"run", "--hosts", "a:0", "true"}, 2, "--hosts"},
      {{"run", "--hosts", "host.invalid", "true"}, 2, "host.invalid"},
      {{"run", "--hostfile", "/no/such", "true"}, 2, "/no/such"},
      {{"run", "--cwd", "/no/such", "true"}, 2, "--cwd"},
      {{"run", "--grace", "-1", "true"}, 2, "--grace is \"-1\"; expected a number of seconds"},
      {{"run", "--env", "=1", "true"}, 2, "--env"},
  };
  for (const Mistake& mistake : mistakes) {
    const Result result = maniple(mistake.arguments);
    const std::string what = fmt::format("{}", fmt::join(mistake.arguments, " "));
    EXPECT_EQ(result.code, mistake.code) << what << ": " << result.err;
    EXPECT_NE(result.err.find(mistake.words), std::string::npos) << what << ": " << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << what << ": " << result.err;
    EXPECT_EQ(result.out, "") << what;
  }
}

TEST(Run, ATakenPortIsNamed) {
  Launched holder({"run", "sh", "-c", "echo port $MASTER_PORT; read forever"}, {});
  // Another job cannot have the port that this one holds for its rank 0, except by name.
  const Result first = maniple({"run", "python3", "-c",
                                "import socket,subprocess,sys\ns=socket.socket(); s.bind(('127.0.0.1',0)); s.listen()\n"
                                "r=subprocess.run([sys.argv[1],'run','--master-port',str(s.getsockname()[1]),'true'],"
                                "capture_output=True,text=True)\n"
                                "print(r.returncode, r.stderr)",
                                maniple_program()});
  EXPECT_NE(first.out.find("is held by pid"), std::string::npos) << first.out << first.err;
  EXPECT_NE(first.out.find("[rank 0] 2 maniple: rank 0 cannot listen on 127.0.0.1:"), std::string::npos)
      << "exit code 2: " << first.out;
  EXPECT_EQ(holder.wait(), 1) << "read fails at the end of its input";
}

}  // namespace
}  // namespace maniple::launched
