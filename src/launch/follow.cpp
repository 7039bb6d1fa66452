// A node that does what a conductor on another node says.
#include <unistd.h>

#include <csignal>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "launch/agent_link.h"
#include "launch/agent_process.h"
#include "launch/binding.h"
#include "launch/conduct.h"
#include "launch/job_record.h"
#include "launch/job_settings.h"
#include "launch/meeting_point.h"
#include "launch/node_agent.h"

namespace maniple::launch {
namespace {

constexpr std::chrono::duration<double> kGraceAfterLoss{0.8};
constexpr int kInterruptedBase = 128;
constexpr std::chrono::duration<double> kRecordPeriod{1.0};

class Following {
 public:
  /// `options` is null for an agent that is told by the conductor what to run.
  Following(const LaunchOptions* options, const MasterPlace& place, UniqueFd control, const Secret& secret)
      : place_(place),
        secret_(secret),
        process_(std::move(control), options != nullptr ? options->console : agent_console()) {
    if (options != nullptr) options_ = *options;
    told_ = options == nullptr;
  }

  int run(int node_rank) {
    UniqueFd connection;
    try {
      connection = dial_master(place_, secret_, Deadline::after(options_.join_timeout), process_.control(),
                               [this](const std::string& text) { process_.console().say(text); });
    } catch (const Aborted&) {
      unsigned char signal = SIGTERM;
      const ssize_t got = ::read(process_.control(), &signal, 1);
      return kInterruptedBase + (got == 1 ? signal : SIGTERM);
    }
    here_ = Address::of_socket(connection.get()).with_port(0);
    link_ = std::make_unique<AgentLink>(
        process_.poller(), std::move(connection),
        AgentLink::Options{.heartbeat = options_.heartbeat, .adopt = true},
        AgentLink::Events{.received = [this](const AgentMessage& message) { on_message(message); },
                          .lost = [this](const std::string& reason) { on_lost(reason); }});
    AgentMessage join{.kind = AgentMessage::Kind::join};
    join.node_rank = node_rank;
    join.host = own_host_name();
    join.text = core_place();
    if (!told_) {
      join.processes = options_.processes;
      join.devices_per_process = options_.devices_per_process;
      join.min_nodes = options_.nodes.min;
      join.max_nodes = options_.nodes.max;
    } else {
      // The other end of standard input is the conductor's; it has nothing more to say on it but that it is gone.
      process_.poller().watch(STDIN_FILENO, EPOLLIN, [this](std::uint32_t) {
        char ignored[256];
        if (::read(STDIN_FILENO, ignored, sizeof ignored) > 0) return;
        process_.poller().forget(STDIN_FILENO);
        on_lost("the connection of the remote shell has ended");
      });
    }
    link_->send(join);
    if (!told_) make_node("job");
    return process_.run({
        .interrupted = [this](int signal) { on_interrupt(signal); },
        .passed_on =
            [this](int signal) { pass_on(signal); },
        .child_ended =
            [this](pid_t pid, int how, int status) {
              if (node_) node_->crew().child_ended(pid, how, status);
            },
        .children_reaped =
            [this] {
              if (node_) node_->crew().look_around();
            },
        .output_closed = [this] { on_interrupt(SIGPIPE); },
        .drained = [this] { return !link_ || link_->drained(); },
    });
  }

 private:
  static ConsoleOptions agent_console() { return {.status = false, .colour = ColourChoice::never}; }

  void make_node(const std::string& job) {
    CrewSettings crew = crew_settings(options_);
    crew.input = false;
    node_ = std::make_unique<NodeAgent>(process_.poller(), process_.console(),
                                        NodeSettings{.crew = std::move(crew),
                                                     .job = job,
                                                     .max_restarts = options_.restarts.max_restarts,
                                                     .secret = secret_,
                                                     .master_address = here_},
                                        [this](const AgentMessage& message) { on_report(message); });
  }

  void on_report(const AgentMessage& message) {
    if (link_) link_->send(message);
    if (message.kind == AgentMessage::Kind::stopped && leaving_) process_.stop(*leaving_);
  }

  void on_message(const AgentMessage& message) {
    switch (message.kind) {
      case AgentMessage::Kind::job:
        if (node_) return;
        options_ = from_words(message.words);
        process_.console().set_options(options_.console);
        make_node(message.text);
        return;
      case AgentMessage::Kind::verdict:
        if (!told_) process_.console().say(message.text);
        return;
      case AgentMessage::Kind::quit:
        if (!message.text.empty() && !told_) process_.console().say(message.text);
        return leave(message.code);
      case AgentMessage::Kind::start:
        if (!node_) return;
        node_->handle(message);
        if (!told_) keep_record(message);
        return;
      case AgentMessage::Kind::signal:
        if (!message.text.empty() && !told_) process_.console().say(message.text);
        [[fallthrough]];
      default:
        if (node_) node_->handle(message);
        return;
    }
  }

  /// For `maniple ps` on this machine. Agents of --hosts have none: their job is listed where it was started.
  void keep_record(const AgentMessage& start) {
    if (!record_) {
      record_ = std::make_unique<JobRecord>(JobInfo{.id = start.text,
                                                    .command = fmt::format("{}", fmt::join(options_.command, " ")),
                                                    .world_size = start.processes,
                                                    .hosts = {own_host_name()},
                                                    .pid = ::getppid()});
    }
    restarts_ = start.generation;
    if (recording_ == 0) update_record();
  }

  void update_record() {
    const int running = node_->crew().running();
    record_->update(running, restarts_, running > 0 ? "running" : "restarting");
    recording_ = process_.poller().call_after(kRecordPeriod, [this] { update_record(); });
  }

  void on_lost(const std::string& reason) {
    link_.reset();
    if (leaving_ || process_.stopped()) return;
    process_.console().say(fmt::format("maniple: the master at {} is lost: {}; this node ends its workers",
                                       to_string(place_), reason));
    leave(1);
  }

  void leave(int code) {
    leaving_ = code;
    if (node_ && node_->crew().busy()) return node_->crew().end(SIGTERM, kGraceAfterLoss);
    process_.stop(code);
  }

  void pass_on(int signal) {
    if (signal != SIGSTOP && signal != SIGCONT) {
      if (node_) node_->crew().signal_all(signal);
      return;
    }
    if (!link_) return;
    AgentMessage message{.kind = AgentMessage::Kind::signal};
    message.signal = signal;
    message.host = own_host_name();
    link_->send(message);
  }

  void on_interrupt(int signal) {
    if (!link_) return;
    AgentMessage message{.kind = AgentMessage::Kind::interrupt};
    message.signal = signal;
    link_->send(message);
    if (std::exchange(interrupted_, true) && node_ && node_->crew().busy()) {
      node_->crew().end(SIGKILL, std::chrono::duration<double>(0));
    }
  }

  MasterPlace place_;
  Secret secret_;
  LaunchOptions options_;
  bool told_ = false;
  AgentProcess process_;
  Address here_;
  std::unique_ptr<AgentLink> link_;
  std::unique_ptr<NodeAgent> node_;
  std::optional<int> leaving_;
  bool interrupted_ = false;
  std::unique_ptr<JobRecord> record_;
  int restarts_ = 0;
  Poller::Timer recording_ = 0;
};

}  // namespace

int follow(const LaunchOptions& options, UniqueFd control, const Secret& secret) {
  Following following(&options, *options.master, std::move(control), secret);
  return following.run(options.node_rank);
}

int follow_as_agent(const MasterPlace& conductor, int node_rank, UniqueFd control, const Secret& secret) {
  Following following(nullptr, conductor, std::move(control), secret);
  return following.run(node_rank);
}

}  // namespace maniple::launch
