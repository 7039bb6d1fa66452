// `maniple run` as a child of a test: its output is collected, its end awaited, and nothing outlives the test.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/unique_fd.h"

namespace maniple::launched {

struct Setting {
  std::vector<std::pair<std::string, std::string>> env = {};
  std::string input = {};
  bool terminal = false;     ///< its outputs are one terminal (all of it in out())
  std::string program = {};  ///< another program instead of maniple
};

class Launched {
 public:
  /// Arguments after `maniple`.
  explicit Launched(const std::vector<std::string>& arguments, const Setting& setting = {});
  ~Launched();
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const noexcept { return pid_; }
  const std::string& out() const noexcept { return out_; }
  const std::string& err() const noexcept { return err_; }

  /// Reads until the text has appeared `times` times. False when it ended, or after `seconds`, without that.
  bool wait_for(const std::string& text, double seconds = 60, int times = 1);
  /// How many times the text has come so far.
  int count(const std::string& text) const;
  void signal(int number) const;
  /// The process that has the workers, and the one between it and the supervisor, which ends what they leave.
  pid_t agent() const;
  pid_t reaper() const;
  /// Nobody reads its standard output any more.
  void close_output() { out_fd_.reset(); }
  /// Reads to the end and waits. The exit code, 128 + signal; -1 if it does not end within `seconds`.
  int wait(double seconds = 60);

 private:
  bool read_some(double seconds);

  pid_t pid_ = -1;
  int code_ = -1;
  UniqueFd out_fd_, err_fd_;
  std::string out_, err_;
};

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};
Result maniple(const std::vector<std::string>& arguments, const Setting& setting = {});

std::string maniple_program();
std::string worker_program();

/// Processes whose environment holds the text: what a job left behind carries a mark of the test.
std::vector<pid_t> processes_with(const std::string& mark);
/// A text that no other process has in its environment: "TEST_MARK=..." for --env.
std::string new_mark();
/// The letter that /proc shows: R, S, T (stopped), Z ...; 0 when it is gone.
char state_of(pid_t pid);
bool becomes_true(const std::function<bool()>& condition, double seconds = 30);

}  // namespace maniple::launched
