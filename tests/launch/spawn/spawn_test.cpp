// Functions that run in processes of their own: arguments, environment, start methods, numbers of processes.
#include "launch/spawn/spawn_fixture.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "harness/start_process.h"
#include <maniple/comm.h>

namespace maniple {
namespace {

struct Plan {
  int epochs = 0;
  std::string data;
};
void encode(ArgumentWriter& out, const Plan& plan) {
  out.put(plan.epochs);
  out.put(plan.data);
}
void decode(ArgumentReader& in, Plan& plan) {
  in.get(plan.epochs);
  in.get(plan.data);
}

// A static object with a constructor: it must have run before a spawned function does.
const std::vector<std::string> kMadeBeforeMain = {"static", "objects"};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "(none)";
}

void write_rank(int rank, const std::string& path) { append_line(path, std::to_string(rank)); }

class SpawnCounts : public SpawnTest, public testing::WithParamInterface<std::tuple<int, StartMethod>> {};

TEST_P(SpawnCounts, EveryRankRunsOnce) {
  const auto [count, method] = GetParam();
  spawn(write_rank, {.nprocs = count, .start_method = method}, file("ranks"));
  std::multiset<std::string> ranks;
  std::istringstream lines(contents(file("ranks")));
  for (std::string line; std::getline(lines, line);) ranks.insert(line);
  std::multiset<std::string> expected;
  for (int rank = 0; rank < count; ++rank) expected.insert(std::to_string(rank));
  EXPECT_EQ(ranks, expected);
}

INSTANTIATE_TEST_SUITE_P(Spawn, SpawnCounts,
                         testing::Combine(testing::Values(1, 2, 5, 32),
                                          testing::Values(StartMethod::reexec, StartMethod::fork)),
                         [](const auto& each) {
                           return std::to_string(std::get<0>(each.param)) +
                                  (std::get<1>(each.param) == StartMethod::fork ? "_fork" : "_reexec");
                         });

void take_all(int rank, bool yes, double number, const std::string& text, std::vector<std::string> list,
              std::string_view view, const char* words, Plan plan, std::map<std::string, int>& table,
              std::optional<int>&& maybe) {
  require(rank == 0, "rank");
  require(yes && number == 0.25 && text == "text" && list == std::vector<std::string>{"a", "b"}, "plain arguments");
  require(view == "view" && std::string(words) == "words", "text that is only looked at");
  require(plan.epochs == 3 && plan.data == "here", "a type of our own");
  require(table.at("x") == 7 && maybe == 4, "containers");
  require(kMadeBeforeMain.size() == 2 && kMadeBeforeMain[1] == "objects", "static objects");
}

TEST_F(SpawnTest, ArgumentsArrive) {
  for (const StartMethod method : {StartMethod::reexec, StartMethod::fork}) {
    spawn(take_all, {.start_method = method}, true, 0.25f, "text", std::vector<std::string>{"a", "b"}, "view", "words",
          Plan{3, "here"}, std::map<std::string, int>{{"x", 7}}, 4);
  }
}

TEST_F(SpawnTest, LambdasThatCaptureNothing) {
  spawn([](int rank, const std::string& path) { write_rank(rank, path); }, {.nprocs = 2}, file("typed"));
  spawn(
      [](auto rank, const auto& path, auto... more) { require(sizeof...(more) == 2, "more"), write_rank(rank, path); },
      {.nprocs = 2}, file("generic"), 1, 2);
  EXPECT_EQ(count_lines(file("typed")), 2u);
  EXPECT_EQ(count_lines(file("generic")), 2u);
}

TEST_F(SpawnTest, LargeArguments) {
  std::vector<double> numbers(2'000'000);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i);
  spawn(
      [](int, const std::vector<double>& got) {
        require(got.size() == 2'000'000 && got.back() == 1'999'999, "all of them");
      },
      {.nprocs = 2}, numbers);
}

TEST_F(SpawnTest, EnvironmentSaysWhoAndWhere) {
  ::unsetenv("OMP_NUM_THREADS");
  spawn(
      [](int rank) {
        require(variable("RANK") == std::to_string(rank) && variable("LOCAL_RANK") == std::to_string(rank), "ranks");
        require(variable("WORLD_SIZE") == "3" && variable("LOCAL_WORLD_SIZE") == "3" && variable("NODE_RANK") == "0",
                "sizes");
        require(variable("MASTER_ADDR") == "127.0.0.1" && std::stoi(variable("MASTER_PORT")) > 0, "master");
        require(std::stoi(variable("OMP_NUM_THREADS")) >= 1, "threads");
        require(variable("MANIPLE_SPAWN_FD") == "(none)", "spawn's own variable is gone");
      },
      {.nprocs = 3});
  ::setenv("OMP_NUM_THREADS", "7", 1);
  spawn([](int) { require(variable("OMP_NUM_THREADS") == "7", "what is set stays"); });
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(variable("RANK"), "(none)");
}

TEST_F(SpawnTest, EnvironmentCanBeLeftAlone) {
  ::setenv("MASTER_PORT", "4242", 1);
  spawn([](int) { require(variable("MASTER_PORT") == "4242" && variable("RANK") == "(none)", "as it was"); },
        {.nprocs = 2, .set_environment = false});
  ::unsetenv("MASTER_PORT");
}

// world size = nodes x gpus, rank = node x gpus + gpu: here one machine plays both.
TEST_F(SpawnTest, TwoMachinesFormOneWorld) {
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  const auto worker = [](int gpu, int gpus, int port) {
    require(variable("MASTER_PORT") == std::to_string(port), "port");
    auto world = init();
    require(world->size() == 4 && world->rank() % gpus == gpu, "assignments");
    int sum = world->rank();
    world->all_reduce(buffer_of(sum));
    require(sum == 6, "sum of ranks");
  };
  int port = 0;
  spawn([](int, const std::string& path) { append_line(path, variable("MASTER_PORT")); }, {}, file("port"));
  port = std::stoi(contents(file("port")));
  SpawnContext first =
      spawn(worker, {.nprocs = 2, .join = false, .nodes = 2, .node_rank = 0, .master_port = port}, 2, port);
  spawn(worker, {.nprocs = 2, .nodes = 2, .node_rank = 1, .master_port = port}, 2, port);
  EXPECT_TRUE(first.join());
  ::unsetenv("MASTER_ADDR");
}

// The same arithmetic in the program's own hands, as the tutorials of PyTorch have it: spawn knows of one machine only.
TEST_F(SpawnTest, TheProgramMayDoTheArithmeticOfTwoMachines) {
  harness::write_secret(file("secret"));
  const std::string port = std::to_string(harness::free_loopback_port());
  ::setenv("MANIPLE_SECRET_FILE", file("secret").c_str(), 1);
  const auto worker = [](int gpu, int node, int gpus, int nodes, const std::string& place) {
    auto world = init({.init_method = place, .rank = node * gpus + gpu, .world_size = nodes * gpus});
    int sum = world->rank();
    world->all_reduce(buffer_of(sum));
    require(sum == 6, "sum of ranks");
  };
  for (const std::string& place : {"tcp://127.0.0.1:" + port, std::string("env://")}) {
    if (place == "env://") {
      ::setenv("MASTER_ADDR", "127.0.0.1", 1);
      ::setenv("MASTER_PORT", std::to_string(harness::free_loopback_port()).c_str(), 1);
    }
    SpawnContext first = spawn(worker, {.nprocs = 2, .join = false}, 0, 2, 2, place);
    spawn(worker, {.nprocs = 2}, 1, 2, 2, place);
    EXPECT_TRUE(first.join());
  }
  // A job inside of a rank does not get the rank's own variables.
  spawn([](int) {
    spawn([](int, const std::string& outer) { require(variable("MASTER_PORT") != outer, "a port of its own"); }, {},
          variable("MASTER_PORT"));
  });
  for (const char* name : {"MANIPLE_SECRET_FILE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
}

TEST_F(SpawnTest, RanksJoinWithoutAnythingElse) {
  for (const StartMethod method : {StartMethod::reexec, StartMethod::fork}) {
    spawn(
        [](int rank) {
          for (int round = 0; round < 2; ++round) {
            auto world = init();
            int sum = world->rank() + 1;
            world->all_reduce(buffer_of(sum));
            require(world->rank() == rank && sum == 6, "sum of ranks");
          }
        },
        {.nprocs = 3, .start_method = method});
  }
}

TEST_F(SpawnTest, WorksInAProcessWithThreadsWhereForkIsRefused) {
  std::atomic<bool> stop{false};
  std::thread other([&] { stop.wait(false); });
  spawn(write_rank, {.nprocs = 2}, file("ranks"));
  EXPECT_EQ(count_lines(file("ranks")), 2u);
  try {
    spawn(write_rank, {.nprocs = 2, .start_method = StartMethod::fork}, file("ranks"));
    ADD_FAILURE() << "fork with two threads was not refused";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("fork with 2 threads"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("use StartMethod::reexec"), std::string::npos) << error.what();
  }
  EXPECT_EQ(count_lines(file("ranks")), 2u);
  stop = true;
  stop.notify_all();
  other.join();
}

void outer(int rank, const std::string& path) {
  spawn([](int inner, int of, const std::string& where) { append_line(where, std::to_string(10 * of + inner)); },
        {.nprocs = 2}, rank, path);
}

TEST_F(SpawnTest, SpawnedProcessesMaySpawn) {
  spawn(outer, {.nprocs = 2}, file("nested"));
  std::multiset<std::string> lines;
  std::istringstream in(contents(file("nested")));
  for (std::string line; std::getline(in, line);) lines.insert(line);
  EXPECT_EQ(lines, (std::multiset<std::string>{"0", "1", "10", "11"}));
}

TEST_F(SpawnTest, StandardInputIsEmptyAndNothingElseIsInherited) {
  const int mine = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  for (const StartMethod method : {StartMethod::reexec, StartMethod::fork}) {
    spawn(
        [](int, int fd, bool exec) {
          char byte;
          require(::read(STDIN_FILENO, &byte, 1) == 0, "end of input");
          if (exec) require(::fcntl(fd, F_GETFD) == -1, "close-on-exec works");
        },
        {.nprocs = 2, .start_method = method}, mine, method == StartMethod::reexec);
  }
  ::close(mine);
}

TEST_F(SpawnTest, ClosedStandardDescriptorsAreNoTrouble) {
  // In a process of its own, because it closes its standard input.
  spawn([](int) {
    ::close(STDIN_FILENO);
    spawn(
        [](int) {
          auto world = init();
          world->barrier();
        },
        {.nprocs = 2});
    spawn(
        [](int) {
          auto world = init();
          world->barrier();
        },
        {.nprocs = 2, .start_method = StartMethod::fork});
  });
}

TEST_F(SpawnTest, FromAThreadThatEnds) {
  std::optional<SpawnContext> context;
  std::thread([&] {
    context = spawn(
        [](int rank, const std::string& go) {
          require(eventually([&] { return !contents(go).empty(); }), "the file that lets it go on");
          require(rank < 2, "rank");
        },
        {.nprocs = 2, .join = false, .daemon = true}, file("go"));
  }).join();
  EXPECT_FALSE(context->join(Seconds(0.05)));
  append_line(file("go"), "go");
  EXPECT_TRUE(context->join());
}

TEST_F(SpawnTest, SeveralThreadsSpawnAtATime) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&failures] {
      try {
        spawn(
            [](int) {
              auto world = init();
              world->barrier();
            },
            {.nprocs = 2});
      } catch (const std::exception& error) {
        ++failures;
        std::fprintf(stderr, "%s\n", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace maniple
