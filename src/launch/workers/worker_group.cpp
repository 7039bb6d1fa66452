#include "launch/workers/worker_group.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "launch/jobs/job_list.h"
#include "launch/process/process_table.h"
#include "launch/process/start.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kReadBytes = std::size_t{64} << 10;
constexpr std::chrono::duration<double> kLeftoverGrace{0.8};  // for processes that successful workers left behind
constexpr std::chrono::duration<double> kRepeatWindow{0.5};   // time for ranks to end after they report an error
constexpr std::chrono::seconds kDestructorLimit{2};
constexpr std::chrono::duration<double> kUnkillable{4.0};  // after SIGKILL: what is left is stuck in the kernel

std::string search_path_of(const Environment& environment) {
  const std::string* entry = find_variable(environment, "PATH");
  return entry == nullptr ? "/usr/local/bin:/usr/bin:/bin" : entry->substr(std::strlen("PATH="));
}

/// While this job is in the background, the shell owns the terminal.
bool may_read_input() { return ::isatty(STDIN_FILENO) == 0 || in_foreground(); }

}  // namespace

void make_log_folder(const std::string& path) {
  const auto require = [&](bool fine, const std::string& part) {
    MANIPLE_REQUIRE(fine, "--log-dir {}: {}: {}", path, part, errno_text(errno));
  };
  for (std::size_t at = 1; at <= path.size(); ++at) {
    if (at < path.size() && path[at] != '/') continue;
    const std::string part = path.substr(0, at);
    require(::mkdir(part.c_str(), 0777) == 0 || errno == EEXIST, part);
  }
  struct stat status{};
  require(::stat(path.c_str(), &status) == 0, path);
  errno = ENOTDIR;
  require(S_ISDIR(status.st_mode), path);
  require(::access(path.c_str(), W_OK | X_OK) == 0, path);
}

WorkerGroup::WorkerGroup(Poller& poller, Console& console, WorkerGroupSettings settings, Events events)
    : poller_(poller), console_(console), settings_(std::move(settings)), events_(std::move(events)) {
  buffer_.resize(kReadBytes);
  console_.out().on_relief = [this] { resume_all(false); };
  console_.err().on_relief = [this] { resume_all(true); };
}

WorkerGroup::~WorkerGroup() {
  poller_.cancel(timer_);
  poller_.cancel(repeated_timer_);
  if (state_ != State::idle) end_descendants(kDestructorLimit);
  close_outputs();
  if (messages_.own_end() >= 0) poller_.remove(messages_.own_end());
}

std::vector<std::vector<int>> WorkerGroup::choose_cores(const CoreRequest& request, NodeEnvironment& node) {
  CoreBinding binding = bind_part(request, allowed_cpus());
  bool report = settings_.verbose || request.cores_per_rank > 0;
  if (settings_.bind == BindPolicy::none) {
    binding.why_not = "--bind none";
    report = settings_.verbose;
  } else if (settings_.bind == BindPolicy::automatic && !binding.cpus.empty()) {
    if (const auto other = another_job(node.job)) {
      binding.why_not = fmt::format(
          "job {} (pid {}) of this user runs on this machine (--bind cores binds all the same)", other->id, other->pid);
      report = !settings_.quiet;
    }
  }
  if (!binding.why_not.empty()) binding.cpus.clear();
  node.cores = binding.threads * request.count;
  if (binding.cpus.empty() && report) {
    console_.say(fmt::format("maniple: ranks are not bound to cores: {}", binding.why_not));
  }
  return std::move(binding.cpus);
}

void WorkerGroup::start(const std::vector<WorkerAssignment>& assignments, NodeEnvironment node, int cores_first,
                        int cores_total) {
  MANIPLE_ASSERT(state_ == State::idle);
  repeated_ = {};
  program_ = find_program(settings_.command, search_path_of(settings_.environment));
  make_room_for_pipes(static_cast<int>(assignments.size()));
  if (!settings_.log_folder.empty()) make_log_folder(settings_.log_folder);
  const int count = static_cast<int>(assignments.size());
  cpus_ = choose_cores({.first = cores_first,
                        .count = count,
                        .total = std::max(cores_total, cores_first + count),
                        .cores_per_rank = settings_.cores_per_process},
                       node);
  members_.clear();
  open_messages();
  node.init_fd = node.report_fd = messages_.rank_end();
  page_.reset();
  if (settings_.elastic_max > 0) {
    // Workers that leave may still run when others take their places.
    const int places = std::max(count, 2 * settings_.elastic_max);
    node.members_fd = page_.emplace(MembershipPage::create(places)).fd();
  }
  node_ = std::move(node);
  killed_ = false;
  running_ = 0;
  state_ = State::working;
  started_ = Poller::Clock::now();
  try {
    for (std::size_t i = 0; i < assignments.size(); ++i) {
      start_member(assignments[i], node_.joins_late);
      if (settings_.verbose) {
        console_.say(fmt::format("maniple: rank {} is pid {}{}", assignments[i].rank, members_.back()->pid,
                                 cpus_.empty() ? "" : ", on cores " + describe_cpus(cpus_[i])));
      }
    }
  } catch (...) {
    end_descendants(kDestructorLimit);
    become_idle();
    throw;
  }
  if (!page_) messages_.close_rank_end();
}

void WorkerGroup::open_messages() {
  messages_.open();
  waiting_reported_ = absent_reported_ = false;
  poller_.add(messages_.own_end(), EPOLLIN, [this](std::uint32_t) { receive_messages(); });
}

void WorkerGroup::receive_messages() {
  if (messages_.own_end() < 0) return;
  if (!messages_.receive()) {
    poller_.remove(messages_.own_end());
    messages_.close();
  }
  const std::set<int> reporters = messages_.take_reporters();
  for (const auto& member : members_) {
    const int rank = member->assignment.rank;
    if (reporters.count(rank) != 0) take_report(*member, *messages_.failure_of(rank));
  }
  for (const WorkerNotice& notice : messages_.take_notices()) {
    if (page_ && (state_ == State::working || state_ == State::ending)) events_.noticed(notice);
  }
  if (page_) return;
  if (state_ == State::working && messages_.waiting() && !std::exchange(waiting_reported_, true)) {
    events_.waiting(*messages_.waiting());
  }
}

void WorkerGroup::start_member(const WorkerAssignment& assignment, bool joins_late) {
  node_.joins_late = joins_late;
  const Environment environment = rank_environment(settings_.environment, node_, assignment);
  const bool input = settings_.input && assignment.rank == 0 && may_read_input();
  StartedProcess started = start_process(
      {.program = &*program_,
       .environment = &environment,
       .folder = settings_.folder,
       .input = input ? STDIN_FILENO : -1,
       .output = settings_.terminal_output ? StartOutput::terminal : StartOutput::pipes,
       .inherited = {node_.secret_fd, node_.init_fd, node_.members_fd},
       .cpus = cpus_.empty() ? nullptr : &cpus_[static_cast<std::size_t>(assignment.local_rank) % cpus_.size()]});
  auto member = std::make_unique<Member>();
  member->assignment = assignment;
  member->pid = started.pid;
  member->running = true;
  member->tail = std::make_shared<OutputTail>();
  // All start in the launcher's own control group.
  member->counters = members_.empty() ? read_oom_counters(::getpid()) : members_.front()->counters;
  std::shared_ptr<LogFile> file;
  if (!settings_.log_folder.empty()) {
    file = std::make_shared<LogFile>(fmt::format("{}/rank_{}.log", settings_.log_folder, assignment.rank),
                                     node_.generation > 0 || joins_late, [this](const std::string& text) {
                                       if (!std::exchange(warned_about_files_, true)) console_.say(text);
                                     });
    if (node_.generation > 0) file->write(fmt::format("--- start {} ---\n", node_.generation + 1));
    if (joins_late) file->write("--- started again ---\n");
  }
  const auto place = std::find_if(members_.begin(), members_.end(),
                                  [&](const auto& known) { return known->assignment.rank == assignment.rank; });
  Member& placed = place == members_.end() ? *members_.emplace_back(std::move(member)) : *(*place = std::move(member));
  ++running_;
  attach(placed.out, std::move(started.out), placed, false, file);
  attach(placed.err, std::move(started.err), placed, true, file);
}

void WorkerGroup::attach(Output& output, UniqueFd fd, Member& member, bool to_err, std::shared_ptr<LogFile> file) {
  const auto& only = settings_.only_ranks;
  const bool shown =
      !settings_.quiet && (only.empty() || std::find(only.begin(), only.end(), member.assignment.rank) != only.end());
  output.fd = std::move(fd);
  LogPump::Route route{.to_err = to_err, .shown = shown, .prefix = console_.prefix_for(member.assignment.rank, to_err)};
  output.pump = std::make_unique<LogPump>(console_, std::move(route), member.tail, std::move(file));
  poller_.add(output.fd.get(), EPOLLIN, [this, &output](std::uint32_t) { read_from(output, false); });
}

void WorkerGroup::read_from(Output& output, bool until_empty) {
  while (output.fd) {
    const ssize_t got = ::read(output.fd.get(), buffer_.data(), buffer_.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      output.pump->finish();
      poller_.remove(output.fd.get());
      output.fd.reset();
      output.paused = false;  // end-of-file is reported even while paused, and this output will not be resumed
      if (state_ == State::finishing || state_ == State::ending) check_finished();
      return;
    }
    receive_messages();  // a rank reports its failure before it prints it
    output.pump->take(std::string_view(buffer_.data(), static_cast<std::size_t>(got)));
    if (until_empty && !output.pump->congested()) continue;
    pause_if_congested(output);
    return;
  }
}

// All ranks that wait for a lost rank, or that called different operations, report the error, print it and end. The
// first one's output is shown; the others' outputs are held back until they end and then summarised. If a rank goes on
// with the remaining ranks instead, or fails for another reason, its output is shown.
void WorkerGroup::take_report(Member& member, const ErrorInfo& failure) {
  member.tail->stop_looking();
  const bool repeats = repeated_.report(member.assignment.rank, failure);
  if (!member.running || member.err.pump == nullptr) return;
  if (!repeats) {
    if (std::exchange(member.held, false)) show(member);
    return;
  }
  member.held = true;
  member.out.pump->hold();
  member.err.pump->hold();
  if (repeated_timer_ == 0) repeated_timer_ = poller_.call_after(kRepeatWindow, [this] { show_held(); });
}

void WorkerGroup::end_held(Member& member) {
  if (!std::exchange(member.held, false)) return;
  if (member.ok) return show(member);
  // Standard error is the error's. Standard output may hold results, so only the error's line is dropped there.
  const ErrorInfo* failure = messages_.failure_of(member.assignment.rank);
  member.out.pump->drop_repeats(failure != nullptr ? failure->reason : std::string());
  member.err.pump->drop();
  repeated_.failed(member.assignment.rank);
}

void WorkerGroup::show_held() {
  poller_.cancel(repeated_timer_);
  for (const auto& member : members_) {
    if (member->running && std::exchange(member->held, false)) show(*member);
  }
}

void WorkerGroup::show(Member& member) {
  member.out.pump->show();
  member.err.pump->show();
}

void WorkerGroup::pause_if_congested(Output& output) {
  if (output.paused || !output.fd || !output.pump->congested()) return;
  output.paused = true;
  poller_.modify(output.fd.get(), 0);
}

void WorkerGroup::resume_all(bool to_err) {
  for (const auto& member : members_) {
    Output& output = to_err ? member->err : member->out;
    if (!output.paused) continue;
    output.paused = false;
    if (output.fd) poller_.modify(output.fd.get(), EPOLLIN);
  }
}

bool WorkerGroup::child_ended(pid_t pid, int code, int status) {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&](const auto& member) { return member->running && member->pid == pid; });
  if (found == members_.end()) return false;
  Member& member = **found;
  receive_messages();
  const bool on_its_own = state_ == State::working;
  RankExit exit{
      .rank = member.assignment.rank, .node_rank = member.assignment.node_rank, .host = settings_.host, .pid = pid};
  if (code == CLD_EXITED) {
    exit.code = status;
  } else {
    exit.signal = status;
    OomCounters now = read_oom_counters(pid, member.counters.group);
    if (status == SIGKILL && on_its_own) add_kernel_log(now, pid);
    exit.cause = judge_kill(status, !on_its_own, member.counters, now);
  }
  exit.at_us = std::chrono::duration_cast<std::chrono::microseconds>(Poller::Clock::now() - started_).count();
  member.running = false;
  member.ok = !exit.failed();
  --running_;
  if (member.held) {  // how much it printed decides what is shown
    read_from(member.out, true);
    read_from(member.err, true);
  }
  end_held(member);
  if (!on_its_own) return true;
  if (!exit.failed()) events_.exited(exit);
  const bool absent =
      !page_ && !exit.failed() && !messages_.is_initialised(exit.rank) && !std::exchange(absent_reported_, true);
  if (exit.failed() || absent) {
    read_from(member.out, true);
    read_from(member.err, true);
    const ErrorInfo* failure = messages_.failure_of(exit.rank);
    exit.error = failure != nullptr ? describe(*failure) : member.tail->error();
    exit.consequence = failure != nullptr && is_consequence(*failure, exit.rank);
    if (exit.consequence) exit.blamed = blamed_rank(*failure);
    if (exit.consequence) exit.left = left_rank(*failure);
    exit.tail = member.tail->lines(exit.error);
    (absent ? events_.absent : events_.failed)(exit);
  }
  return true;
}

void WorkerGroup::children_reaped() {
  if (state_ == State::working && running_ == 0) {
    const bool all_well = std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->ok; });
    if (page_ || !all_well) return;  // the handler of Events calls end() or finish(), or replaces workers
    wait_for_descendants();
  }
  if (state_ == State::finishing || state_ == State::ending) check_finished();
}

/// The workers' background processes end with the job.
void WorkerGroup::wait_for_descendants() {
  state_ = State::finishing;
  if (!descendants().empty()) signal_descendants(SIGTERM);
  timer_ = poller_.call_after(kLeftoverGrace, [this] { kill_rest(); });
}

void WorkerGroup::end(int signal, std::chrono::duration<double> grace, const std::vector<int>& reported) {
  for (const int rank : reported) repeated_.shown(rank);
  if (state_ == State::idle) {
    events_.ended();
    return;
  }
  state_ = State::ending;
  poller_.cancel(timer_);
  if (signal == SIGKILL) {
    kill_rest();
    if (running_ == 0 && descendants().empty()) {  // only output is left; stop waiting for it
      become_idle();
      events_.ended();
      return;
    }
  } else {
    for (const auto& member : members_) {
      if (member->running) ask_to_end(-member->pid, signal);
    }
    timer_ = poller_.call_after(grace, [this] { kill_rest(); });
  }
  check_finished();
}

void WorkerGroup::signal_all(int signal) {
  for (const auto& member : members_) {
    if (member->running) ::kill(-member->pid, signal);
  }
}

void WorkerGroup::kill_rest() {
  killed_ = true;
  signal_all(SIGKILL);
  signal_descendants(SIGKILL);
  poller_.cancel(timer_);
  timer_ = poller_.call_after(kUnkillable, [this] { give_up(); });
}

void WorkerGroup::give_up() {
  timer_ = 0;
  const std::vector<pid_t> stuck = descendants();
  if (stuck.empty()) return;  // only output is left, for a slow reader
  for (const pid_t pid : stuck) {
    const auto found =
        std::find_if(members_.begin(), members_.end(), [&](const auto& member) { return member->pid == pid; });
    const std::string whose = found == members_.end() ? "" : fmt::format("rank {}, ", (*found)->assignment.rank);
    console_.say(fmt::format("maniple: {}{} does not end even with SIGKILL: the kernel holds it; it is left behind",
                             whose, describe_process(pid)));
  }
  const State was = state_;
  become_idle();
  was == State::finishing ? events_.finished() : events_.ended();
}

/// Checks that all children are gone and all pipes are empty.
void WorkerGroup::check_finished() {
  if (state_ != State::finishing && state_ != State::ending) return;
  if (running_ > 0) return;
  siginfo_t info{};
  const bool alone = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
  if (!alone) {
    // The workers are gone, but not all processes they started. Those got the same signal and grace time; dead ones
    // will be reaped soon.
    if (killed_) signal_descendants(SIGKILL);
    return;
  }
  for (const auto& member : members_) {
    if ((member->out.fd && member->out.pump->congested()) || (member->err.fd && member->err.pump->congested())) return;
  }
  for (const auto& member : members_) {
    // All writers are gone, so the pipe holds all that is left.
    const State was = std::exchange(state_, State::idle);
    read_from(member->out, true);
    read_from(member->err, true);
    state_ = was;
    if (member->out.paused || member->err.paused) return;  // continues when there is room again
  }
  const State was = state_;
  become_idle();
  was == State::finishing ? events_.finished() : events_.ended();
}

void WorkerGroup::become_idle() {
  poller_.cancel(timer_);
  close_outputs();
  show_held();
  if (const std::string text = repeated_.summary(); !text.empty()) console_.say(text);
  repeated_ = {};
  if (messages_.own_end() >= 0) poller_.remove(messages_.own_end());
  messages_.close();
  state_ = State::idle;
}

void WorkerGroup::close_outputs() {
  for (const auto& member : members_) {
    for (Output* output : {&member->out, &member->err}) {
      if (!output->fd) continue;
      poller_.remove(output->fd.get());
      output->fd.reset();
    }
  }
}

}  // namespace maniple::launch
