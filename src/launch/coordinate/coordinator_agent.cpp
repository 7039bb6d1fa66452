#include "launch/coordinate/agents.h"

#include <unistd.h>

#include <csignal>
#include <deque>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "launch/coordinate/agent_link.h"
#include "launch/coordinate/coordinator.h"
#include "launch/coordinate/job_settings.h"
#include "launch/coordinate/launcher_listener.h"
#include "launch/coordinate/node_agent.h"
#include "launch/coordinate/remote_start.h"
#include "launch/jobs/job_control.h"
#include "launch/jobs/job_record.h"
#include "launch/placement/binding.h"
#include "launch/workers/agent_process.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

constexpr Node kOwnNode = 0;
constexpr int kOutputClosed = 128 + SIGPIPE;
constexpr std::chrono::duration<double> kRecordPeriod{1.0};

CoordinatorOptions coordinator_options(const LaunchOptions& options) {
  CoordinatorOptions result = options;
  result.starts_agents = !options.hosts.empty();
  return result;
}

class CoordinatorAgent {
 public:
  CoordinatorAgent(const LaunchOptions& options, UniqueFd control, UniqueFd listener, Address master,
                   const Secret& secret)
      : options_(options),
        process_(std::move(control), options.console),
        job_(new_job_name()),
        coordinator_(coordinator_options(options)) {
    if (listener) master = Address::of_socket(listener.get()).with_port(0);
    if (options.hosts.empty()) {
      node_ = std::make_unique<NodeAgent>(
          process_.poller(), process_.console(),
          NodeSettings{.worker_group = worker_group_settings(options),
                       .job = job_,
                       .max_restarts = options.restarts.max_restarts,
                       .secret = secret,
                       .own_secrets = !listener,
                       .master_address = master},
          [this](const AgentMessage& message) { happened(event::Received{kOwnNode, message}); });
    }
    if (listener) {
      listener_ =
          std::make_unique<LauncherListener>(process_.poller(), std::move(listener), launcher_identity(secret),
                                             [this](SecureConnection connection) { accept(std::move(connection)); });
    }
    if (!options.hosts.empty()) {
      remote_ =
          std::make_unique<RemoteStart>(process_.poller(), process_.console(), options, listener_->address(), secret,
                                        [this](int host, const std::string& why) { on_remote_end(host, why); });
    }
  }

  int run() {
    happened(event::Begin());
    if (node_) {
      happened(event::Joined{kOwnNode,
                             {.node_rank = 0,
                              .processes = options_.processes,
                              .devices_per_process = options_.devices_per_process,
                              .host = own_host_name(),
                              .core_set = core_set_id()}});
    }
    process_.console().set_status([this] { return status(); });
    record();
    const int code = process_.run({
        .interrupted = [this](int signal) { happened(event::Interrupted{signal, own_host_name()}); },
        .passed_on = [this](int signal) { pass_on(signal); },
        .child_ended =
            [this](pid_t pid, int how, int status) {
              if (node_ && node_->worker_group().child_ended(pid, how, status)) return;
              if (remote_) remote_->child_ended(pid, how, status);
            },
        .children_reaped =
            [this] {
              if (node_) node_->worker_group().children_reaped();
            },
        .output_closed = [this] { happened(event::Broken{{}, kOutputClosed}); },
        .drained = [this] { return drained(); },
    });
    remote_.reset();
    links_.clear();
    return code;
  }

 private:
  /// Takes an event to the coordinator and carries out its effects. What happens meanwhile, for instance because this
  /// launcher's own node replies at once, waits for its turn.
  void happened(Event event) {
    events_.push_back(std::move(event));
    if (handling_) return;
    {
      struct Handling {  // an effect may throw
        explicit Handling(CoordinatorAgent& agent) : agent_(agent) { agent_.handling_ = true; }
        ~Handling() {
          agent_.handling_ = false;
          agent_.events_.clear();
        }
        CoordinatorAgent& agent_;
      } const handling(*this);
      for (; !events_.empty(); events_.pop_front()) {
        for (const Effect& effect : coordinator_.handle(events_.front(), now())) carry_out(effect);
      }
    }
    process_.poller().cancel(timer_);
    if (const auto due = coordinator_.next_timer()) {
      timer_ = process_.poller().call_after(std::max(*due - now(), Coordinator::Time(0)), [this] {
        timer_ = 0;
        happened(event::Tick());
      });
    }
  }

  Coordinator::Time now() const { return Poller::Clock::now() - began_; }

  void carry_out(const Effect& effect) {
    std::visit(overloaded{[this](const effect::Send& send) { this->send(send.node, send.message); },
                          [this](const effect::Print& print) { process_.console().say(print.text); },
                          [this](const effect::StartAgents&) {
                            if (!remote_) return;
                            remote_->start_missing([this] {
                              return coordinator_.state() == Coordinator::State::gathering ||
                                     (options_.elastic && coordinator_.state() == Coordinator::State::running);
                            });
                          },
                          [this](const effect::Answer& answer) { answer_ = {answer.accepted, answer.text}; },
                          [this](const effect::Done& done) { process_.stop(done.code); }},
               effect);
  }

  void send(Node node, const AgentMessage& message) {
    if (node == kOwnNode && node_) {
      const auto* signal = std::get_if<message::Signal>(&message);
      if (signal != nullptr && !signal->text.empty()) process_.console().say(signal->text);
      return node_->handle(message);
    }
    const auto found = links_.find(node);
    if (found == links_.end()) return;
    const auto* start = std::get_if<message::Start>(&message);
    if (start == nullptr) return found->second->send(message);
    message::Start named = *start;
    named.job = job_;
    found->second->send(named);
  }

  void accept(SecureConnection connection) {
    const Node node = next_node_++;
    links_[node] = std::make_unique<AgentLink>(
        process_.poller(), std::move(connection), AgentLink::Options{.heartbeat = options_.heartbeat},
        AgentLink::Events{.received = [this, node](const AgentMessage& message) { on_message(node, message); },
                          .lost = [this, node](const std::string& reason) { on_lost(node, reason); }});
  }

  void on_lost(Node node, const std::string& reason) {
    const auto gone = std::move(links_[node]);
    links_.erase(node);
    const auto agent = agents_.find(node);
    if (agent != agents_.end() && remote_) remote_->lost(agent->second.host);
    if (agent != agents_.end()) agents_.erase(agent);
    happened(event::Lost{node, reason});
  }

  /// Drops the old connection of a launcher that has reconnected before this side noticed the loss.
  void drop_earlier(const std::string& id) {
    for (const auto& [node, agent] : agents_) {
      if (agent.id == id) return on_lost(node, "its connection broke, and it has connected again");
    }
  }

  void on_message(Node node, const AgentMessage& message) {
    const auto* joins = std::get_if<message::Join>(&message);
    if (joins == nullptr) return happened(event::Received{node, message});
    message::Join join = *joins;
    if (!join.launcher.empty()) drop_earlier(join.launcher);
    if (remote_) {
      if (!remote_->joined(join.node_rank)) {
        return links_.at(node)->send(message::Quit{.code = 1, .text = "maniple: this host has an agent already"});
      }
      const HostSlots& host = options_.hosts[static_cast<std::size_t>(join.node_rank)];
      join.host = host.host;
      join.processes = host.slots > 0 ? host.slots : options_.processes;
      join.devices_per_process = options_.devices_per_process;
      links_.at(node)->send(message::Job{.name = job_, .options = options_for_agents(options_, process_.console())});
    }
    agents_[node] = {.id = join.launcher, .host = join.node_rank};
    happened(event::Joined{node, join});
  }

  /// Ctrl-Z stops the workers on all nodes, and SIGCONT continues them. If only some were stopped, the others would
  /// wait for them and take them for dead. SIGUSR1 and SIGUSR2 go only to the workers that this launcher has started.
  void pass_on(int signal) {
    if (signal == SIGSTOP || signal == SIGCONT) process_.console().pause(signal == SIGSTOP);
    if (signal == SIGSTOP || signal == SIGCONT || remote_)
      return happened(event::PassOn{kOwnNode, signal, own_host_name()});
    if (node_) node_->worker_group().signal_all(signal);
  }

  void on_remote_end(int host, const std::string& why) {
    happened(event::Broken{
        fmt::format("maniple: host {}: {}", options_.hosts[static_cast<std::size_t>(host)].host, why), 2});
  }

  bool drained() const {
    for (const auto& [node, link] : links_) {
      if (!link->drained()) return false;
    }
    return !remote_ || remote_->gone();
  }

  /// For `maniple ps`: written when the ranks are up, then updated about once a second.
  void record() {
    if (!record_ && coordinator_.state() == Coordinator::State::running) {
      JobInfo info{.id = job_,
                   .command = fmt::format("{}", fmt::join(options_.command, " ")),
                   .world_size = coordinator_.world_size(),
                   .pid = supervisor_pid()};  // the process that takes signals
      for (const HostSlots& host : options_.hosts) info.hosts.push_back(host.host);
      if (info.hosts.empty()) info.hosts.push_back(own_host_name());
      record_ = std::make_unique<JobRecord>(std::move(info));
      if (options_.elastic) {
        control_ = std::make_unique<JobControl>(process_.poller(), job_,
                                                [this](std::string_view request) { return answer(request); });
      }
    }
    if (record_) {
      const bool own = node_ && coordinator_.node_count() == 1;
      const bool running = coordinator_.state() == Coordinator::State::running;
      record_->update(own       ? node_->worker_group().running()
                      : running ? coordinator_.world_size()
                                : 0,
                      coordinator_.restarts(), running ? "running" : "restarting", coordinator_.world_size());
    }
    process_.poller().call_after(kRecordPeriod, [this] { record(); });
  }

  /// "resize N", from job_control.h.
  ControlAnswer answer(std::string_view request) {
    constexpr std::string_view kResize = "resize ";
    const auto workers = request.starts_with(kResize) ? whole_number(request.substr(kResize.size())) : std::nullopt;
    if (!workers) return {.text = "it does not know this request; its launcher may be of another version"};
    answer_ = {};
    happened(event::Resize{*workers});
    return answer_;
  }

  std::string status() const {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Poller::Clock::now() - began_).count();
    std::string text = "maniple: ";
    if (coordinator_.state() == Coordinator::State::gathering) {
      text += fmt::format("{} of {} nodes joined", coordinator_.node_count(), options_.nodes.min);
    } else if (node_ && coordinator_.node_count() == 1) {
      text += fmt::format("{} of {} ranks up", node_->worker_group().running(), coordinator_.world_size());
    } else {
      text += fmt::format("{} ranks on {} nodes", coordinator_.world_size(), coordinator_.node_count());
    }
    if (coordinator_.restarts() > 0) {
      text += fmt::format(", {} restart{}", coordinator_.restarts(), coordinator_.restarts() == 1 ? "" : "s");
    }
    return text + fmt::format(", {}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
  }

  const LaunchOptions& options_;
  AgentProcess process_;
  std::string job_;
  Coordinator coordinator_;
  std::deque<Event> events_;
  bool handling_ = false;
  Poller::Timer timer_ = 0;
  std::unique_ptr<NodeAgent> node_;
  std::unique_ptr<LauncherListener> listener_;
  std::map<Node, std::unique_ptr<AgentLink>> links_;
  struct Agent {
    std::string id;  // identifies its process
    int host = -1;   // with --hosts: its index in the list
  };
  std::map<Node, Agent> agents_;  // agents that have joined
  std::unique_ptr<RemoteStart> remote_;
  std::unique_ptr<JobRecord> record_;
  std::unique_ptr<JobControl> control_;  // of an elastic job
  ControlAnswer answer_;                 // to the last request
  Node next_node_ = kOwnNode + 1;
  Poller::Clock::time_point began_ = Poller::Clock::now();
};

}  // namespace

int run_coordinator(const LaunchOptions& options, UniqueFd control, UniqueFd listener, const Address& master,
                    const Secret& secret) {
  CoordinatorAgent agent(options, std::move(control), std::move(listener), master, secret);
  return agent.run();
}

}  // namespace maniple::launch
