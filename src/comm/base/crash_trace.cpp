#include "comm/base/crash_trace.h"

#include <execinfo.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "comm/base/environment.h"

namespace maniple {
namespace {

constexpr int kShown = 9;  // with the heading, as many lines as a launcher keeps of a rank's output
constexpr int kOwnFrames = 2;

struct Crash {
  int number;
  const char* name;
};
constexpr std::array kCrashes = {Crash{SIGSEGV, "SIGSEGV"}, Crash{SIGBUS, "SIGBUS"}, Crash{SIGILL, "SIGILL"},
                                 Crash{SIGFPE, "SIGFPE"}, Crash{SIGABRT, "SIGABRT"}};

// After a stack overflow the handler needs another stack. Only the thread that called init() has one.
alignas(16) std::array<char, std::size_t{64} << 10> spare_stack;
std::array<char, 16> rank_text;  // RANK, or empty

/// Builds a line without allocating, so that a signal handler may use it.
class Line {
 public:
  Line& operator<<(const char* text) {
    for (; *text != '\0' && used_ < text_.size(); ++text) text_[used_++] = *text;
    return *this;
  }
  Line& hex(std::uintptr_t value) {
    std::array<char, 2 * sizeof value + 1> digits{};
    std::size_t at = digits.size() - 1;
    do {
      digits[--at] = "0123456789abcdef"[value % 16];
      value /= 16;
    } while (value != 0);
    return *this << "0x" << &digits[at];
  }
  void print() const { [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text_.data(), used_); }

 private:
  std::array<char, 200> text_{};
  std::size_t used_ = 0;
};

void* crashed_at(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<void*>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<void*>(machine.pc);
#else
  (void)machine;
  return nullptr;
#endif
}

void print_stack(int signal, const siginfo_t& info, const void* context) {
  const char* name = "signal";
  for (const Crash& crash : kCrashes) {
    if (crash.number == signal) name = crash.name;
  }
  Line line;
  line << "maniple: ";
  if (rank_text[0] != '\0') line << "rank " << rank_text.data() << ": ";
  line << name;
  if ((signal == SIGSEGV || signal == SIGBUS) && info.si_code > 0) {
    line << " at address ";
    line.hex(reinterpret_cast<std::uintptr_t>(info.si_addr));
  }
  (line << "; the stack of its thread, innermost first (addr2line and c++filt read it):\n").print();
  std::array<void*, kShown + 8> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  int first = std::min(kOwnFrames, count);
  for (int i = 0; i < count; ++i) {
    if (frames[i] == crashed_at(context)) first = i;
  }
  ::backtrace_symbols_fd(frames.data() + first, std::min(count - first, kShown), STDERR_FILENO);
}

// SA_RESETHAND has restored the default action. When this handler returns, a fault recurs at the same place and ends
// the process as if the handler did not exist; abort() raises its signal again by itself; a signal sent by another
// process is raised again here.
void on_crash(int signal, siginfo_t* info, void* context) {
  const int code = errno;
  if (signal != SIGABRT || std::current_exception() == nullptr) print_stack(signal, *info, context);
  if (info->si_code <= 0 && signal != SIGABRT) ::raise(signal);
  if (signal == SIGABRT && info->si_code == SI_USER) ::raise(signal);
  errno = code;
}

void install() {
  if (const char* rank = std::getenv("RANK")) std::strncpy(rank_text.data(), rank, rank_text.size() - 1);
  std::array<void*, 1> frame{};
  ::backtrace(frame.data(), 1);  // the first call loads a library, which a handler must not do
  stack_t present{};
  if (::sigaltstack(nullptr, &present) == 0 && (present.ss_flags & SS_DISABLE) != 0) {
    stack_t own{};
    own.ss_sp = spare_stack.data();
    own.ss_size = spare_stack.size();
    ::sigaltstack(&own, nullptr);
  }
  for (const Crash& crash : kCrashes) {
    struct sigaction action{};
    if (::sigaction(crash.number, nullptr, &action) != 0) continue;
    if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | static_cast<int>(SA_RESETHAND);
    ::sigaction(crash.number, &action, nullptr);
  }
}

}  // namespace

void install_crash_trace() {
  static constinit std::atomic_flag installed;
  if (!knob_flag(Knob::crash_trace)) return;
  if (!installed.test_and_set()) install();
}

}  // namespace maniple
