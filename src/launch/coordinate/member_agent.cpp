// The agent of a node whose coordinator runs on another node.
#include <sys/epoll.h>
#include <unistd.h>

#include <csignal>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "launch/coordinate/agent_link.h"
#include "launch/coordinate/agents.h"
#include "launch/coordinate/job_settings.h"
#include "launch/coordinate/launcher_listener.h"
#include "launch/coordinate/node_agent.h"
#include "launch/jobs/job_record.h"
#include "launch/placement/binding.h"
#include "launch/workers/agent_process.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

constexpr std::chrono::duration<double> kGraceAfterLoss{0.8};
constexpr int kInterruptedBase = 128;
constexpr std::chrono::duration<double> kMemberRecordPeriod{1.0};

class MemberAgent {
 public:
  /// `options` is null for an agent that the coordinator started; the coordinator then sends the options.
  MemberAgent(const LaunchOptions* options, const MasterAddress& place, UniqueFd control, const Secret& secret)
      : place_(place),
        secret_(secret),
        process_(std::move(control), options != nullptr ? options->console : agent_console()) {
    if (options != nullptr) options_ = *options;
    remote_ = options == nullptr;
  }

  int run(int node_rank) {
    node_rank_ = node_rank;
    try {
      connect();
    } catch (const Aborted&) {
      unsigned char signal = SIGTERM;
      const ssize_t got = ::read(process_.control(), &signal, 1);
      return kInterruptedBase + (got == 1 ? signal : SIGTERM);
    }
    if (remote_) {
      // The coordinator holds the other end of standard input. Only end-of-file is still expected.
      process_.poller().add(STDIN_FILENO, EPOLLIN, [this](std::uint32_t) {
        char ignored[256];
        if (::read(STDIN_FILENO, ignored, sizeof ignored) > 0) return;
        process_.poller().remove(STDIN_FILENO);
        shell_ended_ = true;
        on_lost("the connection of the remote shell has ended");
      });
    } else {
      make_node("job");
    }
    return process_.run({
        .interrupted = [this](int signal) { on_interrupt(signal); },
        .passed_on = [this](int signal) { pass_on(signal); },
        .child_ended =
            [this](pid_t pid, int how, int status) {
              if (node_) node_->worker_group().child_ended(pid, how, status);
            },
        .children_reaped =
            [this] {
              if (node_) node_->worker_group().children_reaped();
            },
        .output_closed = [this] { on_interrupt(SIGPIPE); },
        .drained = [this] { return !link_ || link_->drained(); },
    });
  }

 private:
  /// Throws Aborted when a signal arrives or the remote shell ends.
  void connect() {
    const UniqueFd cancel = either(process_.control(), remote_ && !first_connection_ ? STDIN_FILENO : -1);
    first_connection_ = false;
    SecureConnection connection = dial_master(place_, secret_, Deadline::after(options_.join_timeout), cancel.get(),
                                              [this](const std::string& text) { process_.console().say(text); });
    here_ = Address::of_socket(connection.fd.get()).with_port(0);
    link_ = std::make_unique<AgentLink>(
        process_.poller(), std::move(connection),
        AgentLink::Options{.heartbeat = options_.heartbeat, .tolerance = options_.join_timeout, .adopt = true},
        AgentLink::Events{.received = [this](const AgentMessage& message) { on_message(message); },
                          .lost = [this](const std::string& reason) { on_lost(reason); },
                          .silent = [this](std::chrono::duration<double> silence) { on_silence(silence); }});
    message::Join join{.node_rank = node_rank_, .host = own_host_name(), .core_set = core_set_id(), .launcher = id_};
    if (!remote_) {
      join.processes = options_.processes;
      join.devices_per_process = options_.devices_per_process;
      join.min_nodes = options_.nodes.min;
      join.max_nodes = options_.nodes.max;
      join.min_workers = options_.elastic.min;
      join.max_workers = options_.elastic.max;
    }
    link_->send(join);
  }

  /// A descriptor that is readable when `a` or `b` is.
  static UniqueFd either(int a, int b) {
    UniqueFd both(::epoll_create1(EPOLL_CLOEXEC));
    for (const int fd : {a, b}) {
      epoll_event event{};
      event.events = EPOLLIN;
      if (fd >= 0) ::epoll_ctl(both.get(), EPOLL_CTL_ADD, fd, &event);
    }
    return both;
  }

  static ConsoleOptions agent_console() { return {.status = false, .colour = ColourChoice::never}; }

  void make_node(const std::string& job) {
    WorkerGroupSettings worker_group = worker_group_settings(options_);
    worker_group.input = false;
    node_ = std::make_unique<NodeAgent>(process_.poller(), process_.console(),
                                        NodeSettings{.worker_group = std::move(worker_group),
                                                     .job = job,
                                                     .max_restarts = options_.restarts.max_restarts,
                                                     .secret = secret_,
                                                     .master_address = here_},
                                        [this](const AgentMessage& message) { on_report(message); });
  }

  void on_report(const AgentMessage& message) {
    if (link_) link_->send(message);
    if (!std::holds_alternative<message::Stopped>(message)) return;
    if (leaving_) return process_.stop(*leaving_);
    if (returning_) reconnect();
  }

  void on_message(const AgentMessage& message) {
    const auto on_node = [&] {
      if (node_) node_->handle(message);
    };
    std::visit(overloaded{[this](const message::Job& job) {
                            if (node_) return;
                            if (job.options.command.empty()) throw ProtocolError("a job without a program");
                            options_ = job.options;
                            process_.console().set_options(options_.console);
                            make_node(job.name);
                          },
                          [this](const message::Verdict& verdict) { say(verdict.text); },
                          [this](const message::Quit& quit) {
                            say(quit.text);
                            leave(quit.code);
                          },
                          [&](const message::Start& start) {
                            on_node();
                            if (node_ && !remote_) keep_record(start);
                          },
                          [&](const message::Signal& signal) {
                            say(signal.text);
                            on_node();
                          },
                          [&](const auto&) { on_node(); }},
               message);
  }

  /// The user of --hosts sees the coordinator's output instead.
  void say(const std::string& text) {
    if (!text.empty() && !remote_) process_.console().say(text);
  }

  /// For `maniple ps` on this machine. Agents of --hosts keep no record: their job is listed where it was started.
  void keep_record(const message::Start& start) {
    if (!record_) {
      record_ = std::make_unique<JobRecord>(JobInfo{.id = start.job,
                                                    .command = fmt::format("{}", fmt::join(options_.command, " ")),
                                                    .world_size = start.processes,
                                                    .hosts = {own_host_name()},
                                                    .pid = supervisor_pid()});
    }
    restarts_ = start.restarts;
    if (recording_ == 0) update_record();
  }

  void update_record() {
    const int running = node_->worker_group().running();
    record_->update(running, restarts_, running > 0 ? "running" : "restarting");
    recording_ = process_.poller().call_after(kMemberRecordPeriod, [this] { update_record(); });
  }

  /// The master's ranks may still run. The master is lost only when its connection breaks or the link's tolerance ends.
  void on_silence(std::chrono::duration<double> silence) {
    process_.console().say(
        fmt::format("maniple: the master at {} has been silent for {:.1f} s (stopped, overloaded or cut off); the "
                    "ranks of this node go on",
                    to_string(place_), silence.count()));
  }

  void on_lost(const std::string& reason) {
    link_.reset();
    if (leaving_ || process_.stopped()) return;
    // A master whose process has ended does not come back; a master that was cut off may restart the group.
    const bool may_return = !shell_ended_ && !interrupted_ && reason != kLauncherGone &&
                            (options_.restarts.max_restarts > 0 || options_.elastic);
    process_.console().say(fmt::format("maniple: the master at {} is lost: {}; this node ends its workers{}",
                                       to_string(place_), reason, may_return ? " and tries to reconnect" : ""));
    if (!may_return) return leave(1);
    if (std::exchange(returning_, true)) return;
    if (node_ && node_->worker_group().busy()) return node_->worker_group().end(SIGTERM, kGraceAfterLoss);
    reconnect();
  }

  void reconnect() {
    returning_ = false;
    try {
      connect();
    } catch (const Aborted&) {  // the poller reads the signal next
    } catch (const Error& error) {
      process_.console().say(fmt::format("maniple: {}", error.what()));
      process_.stop(1);
    }
  }

  void leave(int code) {
    leaving_ = code;
    if (node_ && node_->worker_group().busy()) return node_->worker_group().end(SIGTERM, kGraceAfterLoss);
    process_.stop(code);
  }

  void pass_on(int signal) {
    if (signal != SIGSTOP && signal != SIGCONT) {
      if (node_) node_->worker_group().signal_all(signal);
      return;
    }
    if (!link_) return;
    link_->send(message::Signal{.signal = signal, .host = own_host_name()});
  }

  void on_interrupt(int signal) {
    if (!link_) return leave(kInterruptedBase + signal);
    link_->send(message::Interrupt{.signal = signal});
    if (std::exchange(interrupted_, true) && node_ && node_->worker_group().busy()) {
      node_->worker_group().end(SIGKILL, std::chrono::duration<double>(0));
    }
  }

  MasterAddress place_;
  Secret secret_;
  LaunchOptions options_;
  bool remote_ = false;
  AgentProcess process_;
  Address here_;
  std::unique_ptr<AgentLink> link_;
  std::unique_ptr<NodeAgent> node_;
  const std::string id_ = new_job_name();  // lets the master recognise this process when it reconnects
  int node_rank_ = -1;
  bool first_connection_ = true;
  bool shell_ended_ = false;
  bool returning_ = false;  // reconnects once the workers have ended
  std::optional<int> leaving_;
  bool interrupted_ = false;
  std::unique_ptr<JobRecord> record_;
  int restarts_ = 0;
  Poller::Timer recording_ = 0;
};

}  // namespace

int run_member(const LaunchOptions& options, UniqueFd control, const Secret& secret) {
  MemberAgent agent(&options, *options.master, std::move(control), secret);
  return agent.run(options.node_rank);
}

int run_started_member(const MasterAddress& coordinator, int node_rank, UniqueFd control, const Secret& secret) {
  MemberAgent agent(nullptr, coordinator, std::move(control), secret);
  return agent.run(node_rank);
}

}  // namespace maniple::launch
