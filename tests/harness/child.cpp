// A rank in a separate process: this program, started again.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <sstream>

#include <fmt/format.h>

#include "harness/failures.h"
#include "harness/messages.h"
#include "harness/modes.h"
#include "harness/mpirun.h"

namespace maniple::harness {
namespace {

std::optional<ChildMode> read_mode() {
  const char* text = std::getenv(kChildVariable);
  if (text == nullptr) return std::nullopt;
  ChildMode mode;
  std::istringstream in{std::string(text)};
  in >> mode.rank >> mode.run_index >> mode.channel >> mode.dir >> mode.init_method >> mode.hosts;
  ::unsetenv(kChildVariable);  // programs that a rank starts are not ranks
  if (mode.channel < 0) mode.channel = report_to_run(mode.dir, mode.rank).release();
  ::fcntl(mode.channel, F_SETFD, FD_CLOEXEC);
  return mode;
}

std::vector<std::string> words(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

class ChildChannel : public ControlChannel {
 public:
  explicit ChildChannel(int fd) : fd_(fd) {}

  std::vector<pid_t> wait_for_pids() {
    const Message message = receive();
    std::vector<pid_t> pids;
    for (std::size_t i = 1; i < message.size(); ++i) pids.push_back(std::atoi(message[i].c_str()));
    return pids;
  }

  void phase(const std::string& name) override { request({"phase", name}); }
  void report(const std::string& key, const std::string& value) override { send({"report", key, value}); }
  void set_link(int host, const std::string& state) override { request({"link", std::to_string(host), state}); }
  void initialised(const std::shared_ptr<ProcessGroup>&) override {}

  void send(Message message) {
    const std::lock_guard lock(mutex_);
    if (!send_message(fd_, std::move(message))) std::_Exit(2);
  }

 private:
  void request(Message message) {
    send(std::move(message));
    receive();
  }
  Message receive() {
    bool gone = false;
    const auto message = receive_message(fd_, true, gone);
    if (!message) std::_Exit(2);  // the parent is gone
    return *message;
  }

  int fd_;
  std::mutex mutex_;
};

}  // namespace

const std::optional<ChildMode>& child_mode() {
  static const std::optional<ChildMode> kMode = read_mode();
  return kMode;
}

std::string encode(const ChildMode& mode) {
  return fmt::format("{} {} {} {} {} {}", mode.rank, mode.run_index, mode.channel, mode.dir, mode.init_method,
                     mode.hosts);
}

void run_as_child(const RunOptions& options, const ChildMode& mode, const Body& body) {
  ChildChannel channel(mode.channel);
  bool failed = false;
  {
    const FailureWatch watch([&](const Failure& failure, bool skip) {
      if (!skip) failed = true;
      channel.send({skip ? "skip" : "failure", failure.file, std::to_string(failure.line), failure.text});
    });
    try {
      InitOptions init = init_options(options, mode.rank);
      init.init_method = mode.init_method;
      Rank self({.rank = mode.rank,
                 .size = options.n,
                 .host = host_of(options, mode.rank),
                 .dir = mode.dir,
                 .init = init,
                 .store = nullptr,
                 .pids = channel.wait_for_pids(),
                 .hosts = words(mode.hosts, ','),
                 .fault = options.fault},
                channel);
      if (options.init) self.init();
      body(self);
    } catch (const InjectedFault&) {
      std::exit(7);
    } catch (...) {
      failed = true;
      channel.send({"failure", "", "-1", "threw " + describe_current_exception()});
    }
  }
  channel.send({"finished"});
  std::exit(failed ? 1 : 0);
}

}  // namespace maniple::harness
