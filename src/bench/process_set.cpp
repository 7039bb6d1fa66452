#include "bench/process_set.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/system_error.h"

namespace maniple::bench {
namespace {

constexpr std::size_t kKeptOutput = 4000;  // bytes of standard error kept for a message
constexpr int kShownLines = 10;
constexpr std::size_t kLongestLine = 64 * 1024;

struct Member {
  explicit Member(const ChildSpec& spec) : child(spec) {}
  Child child;
  std::string line;     // of standard output, not yet complete
  std::string trouble;  // the end of standard error
  bool out_open = true, err_open = true, running = true;
};

/// Reads what is there; false at the end of the stream.
bool read_some(int fd, std::string& into) {
  std::array<char, 4096> bytes;
  const ssize_t got = read(fd, bytes.data(), bytes.size());
  if (got > 0) into.append(bytes.data(), static_cast<std::size_t>(got));
  return got > 0 || (got < 0 && errno == EINTR);
}

void drain_err(Member& member) {
  member.err_open = read_some(member.child.err(), member.trouble);
  if (member.trouble.size() > kKeptOutput) member.trouble.erase(0, member.trouble.size() - kKeptOutput);
}

void drain_out(Member& member, const LineSink& on_line) {
  member.out_open = read_some(member.child.out(), member.line);
  for (std::size_t end; (end = member.line.find('\n')) != std::string::npos; member.line.erase(0, end + 1)) {
    on_line(std::string_view(member.line).substr(0, end));
  }
  if (member.line.size() > kLongestLine) throw ProcessSetFailed(member.child.name() + " printed a line without end");
}

std::string with_trouble(std::string text, const Member& member) {
  std::string trouble = member.trouble;
  while (!trouble.empty() && (trouble.back() == '\n' || trouble.back() == ' ')) trouble.pop_back();
  std::size_t start = trouble.size();
  for (int lines = 0; lines < kShownLines && start != std::string::npos && start > 0; ++lines) {
    start = trouble.rfind('\n', start - 1);
  }
  if (start != std::string::npos && start > 0) trouble.erase(0, start + 1);
  return trouble.empty() ? text : fmt::format("{}; its last words:\n{}", text, trouble);
}

class ProcessSet {
 public:
  ProcessSet(const std::vector<ChildSpec>& specs, const LineSink& on_line, const InterruptWatch& watch)
      : on_line_(on_line), watch_(watch) {
    members_.reserve(specs.size());
    for (const ChildSpec& spec : specs) members_.emplace_back(spec);
  }

  void run(Deadline deadline) {
    while (std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.running || m.out_open; })) {
      if (deadline.expired()) throw ProcessSetFailed(unfinished());
      wait(deadline);
    }
  }

 private:
  void wait(Deadline deadline) {
    std::vector<pollfd> entries = {{watch_.fd(), POLLIN, 0}};
    std::vector<std::function<void()>> handlers = {[this] { watch_.throw_if_signalled(); }};
    const auto add = [&](int fd, std::function<void()> handler) {
      entries.push_back({fd, POLLIN, 0});
      handlers.push_back(std::move(handler));
    };
    for (Member& member : members_) {
      if (member.out_open) add(member.child.out(), [this, &member] { drain_out(member, on_line_); });
      if (member.err_open) add(member.child.err(), [&member] { drain_err(member); });
      if (member.running) add(member.child.end(), [this, &member] { finish(member); });
    }
    if (poll(entries.data(), entries.size(), deadline.poll_ms()) < 0 && errno != EINTR) throw_system_error("poll");
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].revents != 0) handlers[i]();
    }
  }

  void finish(Member& member) {
    member.running = false;
    const std::string outcome = member.child.reap();
    if (outcome.empty()) return;
    drain_rest(member);
    throw ProcessSetFailed(with_trouble(fmt::format("{} ended with {}", member.child.name(), outcome), member));
  }

  /// What a failed child still has in its pipe; a grandchild may hold the pipe open, so only what is there now.
  static void drain_rest(Member& member) {
    pollfd entry{member.child.err(), POLLIN, 0};
    while (member.err_open && poll(&entry, 1, 0) > 0) drain_err(member);
  }

  std::string unfinished() const {
    const auto late = std::find_if(members_.begin(), members_.end(), [](const Member& m) { return m.running; });
    if (late == members_.end()) return "a process kept our pipe open after its parent ended";
    return with_trouble(late->child.name() + " did not finish in time", *late);
  }

  const LineSink& on_line_;
  const InterruptWatch& watch_;
  std::vector<Member> members_;
};

}  // namespace

void run_process_set(const std::vector<ChildSpec>& specs, const LineSink& on_line, Deadline deadline,
              const InterruptWatch& watch) {
  ProcessSet(specs, on_line, watch).run(deadline);
}

void run_tool(ChildSpec spec, const InterruptWatch& watch) {
  if (spec.name.empty()) spec.name = fmt::format("`{}`", fmt::join(spec.argv, " "));
  run_process_set(
      {std::move(spec)}, [](std::string_view) {}, Deadline::after(std::chrono::seconds(20)), watch);
}

}  // namespace maniple::bench
