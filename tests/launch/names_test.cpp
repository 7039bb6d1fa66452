// Names that resolve slowly, late or not at all: a name server of the test's own, seen only by what the test starts.
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <future>
#include <regex>
#include <thread>

#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kServer = "127.53.77.1";

/// Hears every question and answers after `delay` with 127.0.0.1; a negative delay: never.
class NameServer {
 public:
  explicit NameServer(std::chrono::milliseconds delay)
      : delay_(delay), fd_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_port = htons(53);
    ::inet_pton(AF_INET, kServer, &place.sin_addr);
    works_ = ::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&place), sizeof place) == 0;
    if (works_) thread_ = std::thread([this] { serve(); });
  }
  ~NameServer() {
    end_ = true;
    if (thread_.joinable()) thread_.join();
  }
  bool works() const { return works_; }
  int questions() const { return questions_; }

 private:
  void serve() {
    std::vector<std::pair<Clock::time_point, std::pair<std::string, sockaddr_in>>> due;
    while (!end_) {
      pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&waiting, 1, 20) > 0) {
        char bytes[1024];
        sockaddr_in from{};
        socklen_t length = sizeof from;
        const ssize_t got = ::recvfrom(fd_.get(), bytes, sizeof bytes, 0, reinterpret_cast<sockaddr*>(&from), &length);
        if (got < 12) continue;
        ++questions_;
        if (delay_.count() >= 0)
          due.push_back({Clock::now() + delay_, {answer(std::string(bytes, static_cast<std::size_t>(got))), from}});
      }
      for (auto it = due.begin(); it != due.end();) {
        if (it->first > Clock::now()) {
          ++it;
          continue;
        }
        const auto& [text, to] = it->second;
        ::sendto(fd_.get(), text.data(), text.size(), 0, reinterpret_cast<const sockaddr*>(&to), sizeof to);
        it = due.erase(it);
      }
    }
  }

  /// The question, and for type A the address; for others no record.
  static std::string answer(std::string question) {
    const auto end = question.find('\0', 12) + 5;  // behind name, type and class
    const bool a = question[end - 3] == 1;
    std::string text = question.substr(0, end);
    text[2] = '\x81';  // a response
    text[3] = '\x80';
    text[7] = a ? 1 : 0;
    text[11] = 0;  // no additional records
    if (a) text += std::string("\xc0\x0c\0\1\0\1\0\0\0\1\0\4\x7f\0\0\1", 16);
    return text;
  }

  std::chrono::milliseconds delay_;
  UniqueFd fd_;
  bool works_ = false;
  std::atomic<bool> end_{false};
  std::atomic<int> questions_{0};
  std::thread thread_;
};

/// Starts it where /etc/resolv.conf names that server. The mounts belong to one thread and end with it.
std::unique_ptr<Launched> start_with_slow_names(const std::vector<std::string>& arguments, Setting setting = {}) {
  const harness::TemporaryDirectory folder;
  std::ofstream(folder.path() + "/resolv.conf") << "nameserver " << kServer << "\noptions timeout:30 attempts:1\n";
  std::ofstream(folder.path() + "/nsswitch.conf") << "hosts: files dns\n";
  return std::async(
             std::launch::async,
             [&]() -> std::unique_ptr<Launched> {
               if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
                 return nullptr;
               for (const char* name : {"resolv.conf", "nsswitch.conf"}) {
                 const std::string from = folder.path() + "/" + name, to = std::string("/etc/") + name;
                 if (::mount(from.c_str(), to.c_str(), nullptr, MS_BIND, nullptr) != 0) return nullptr;
               }
               return std::make_unique<Launched>(arguments, setting);
             })
      .get();
}

Setting rank_alone(const std::string& join_timeout) {
  return {.env = {{"RANK", "1"},
                  {"WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "slow.test"},
                  {"MASTER_PORT", "29511"},
                  {"JOIN_TIMEOUT", join_timeout}},
          .program = worker_program()};
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

#define NEED(server, launched) \
  if (!(server).works() || !(launched)) GTEST_SKIP() << "needs root, to listen on port 53 and to mount"

TEST(Names, ASilentServerCostsTheLauncherNoMoreThanTenSeconds) {
  const NameServer server(std::chrono::milliseconds(-1));
  const auto began = Clock::now();
  const auto hosts = start_with_slow_names({"run", "--hosts", "slow.test:2", "true"});
  const auto master = start_with_slow_names({"run", "--nnodes", "2", "--master", "slow.test:29500", "true"});
  const auto single = start_with_slow_names({"run", "--master", "slow.test:29500", "true"});
  NEED(server, hosts && master && single);
  for (const auto* launched : {&hosts, &master, &single}) {
    EXPECT_EQ((*launched)->wait(), 2) << (*launched)->err();
    EXPECT_NE((*launched)->err().find("resolving host \"slow.test\": no answer from the resolver within 10."),
              std::string::npos)
        << (*launched)->err();
  }
  EXPECT_LT(seconds_since(began), 25) << "they waited side by side; the resolver alone would take 30 s and more";
  EXPECT_GE(server.questions(), 3);
}

TEST(Names, CtrlCIsHeardWhileANameIsLookedUp) {
  const NameServer server(std::chrono::milliseconds(-1));
  const auto launched = start_with_slow_names({"run", "--hosts", "slow.test:2", "true"});
  NEED(server, launched);
  ASSERT_TRUE(becomes_true([&] { return server.questions() > 0; })) << launched->err();
  const auto began = Clock::now();
  launched->signal(SIGINT);
  EXPECT_EQ(launched->wait(), 130) << launched->err();
  EXPECT_LT(seconds_since(began), 8);
}

TEST(Names, AShorterDeadlineIsKept) {
  const NameServer server(std::chrono::milliseconds(-1));
  const auto launched =
      start_with_slow_names({"run", "--nnodes", "2", "--join-timeout", "1", "--master", "slow.test:29500", "true"});
  // A rank without a launcher: its own deadline for joining.
  const auto rank = start_with_slow_names({"join"}, rank_alone("1"));
  NEED(server, launched && rank);
  EXPECT_EQ(launched->wait(), 2) << launched->err();
  // What it waited, which is more than one second on a busy machine, and less than the ten of those that have no
  // deadline.
  const std::regex waited("resolving host \"slow.test\": no answer from the resolver within [1-5][.][0-9] s");
  EXPECT_TRUE(std::regex_search(launched->err(), waited)) << launched->err();
  EXPECT_EQ(rank->wait(), 1) << rank->err();
  EXPECT_TRUE(std::regex_search(rank->err(), waited)) << rank->err();
}

// Slow is not wrong.
TEST(Names, ALateAnswerIsTaken) {
  const NameServer server(std::chrono::milliseconds(1500));
  const auto launched = start_with_slow_names({"run", "-n", "2", "--master", "slow.test:0", worker_program(), "join"});
  NEED(server, launched);
  EXPECT_EQ(launched->wait(), 0) << launched->err();
  EXPECT_NE(launched->out().find("[rank 1] sum 1 of 2"), std::string::npos) << launched->out();
}

}  // namespace
}  // namespace maniple::launched
