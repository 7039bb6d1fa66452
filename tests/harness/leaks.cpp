#include "harness/leaks.h"

#include <chrono>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "harness/sanitizers.h"

namespace maniple::harness {
namespace {

constexpr auto kGrace = std::chrono::seconds(3);

std::vector<void (*)()>& warm_ups() {
  static std::vector<void (*)()> all;  // filled before main()
  return all;
}

}  // namespace

bool call_before_first_count(void (*warm_up)()) {
  warm_ups().push_back(warm_up);
  return true;
}

ProcessResources ProcessResources::now() {
  // The thread sanitizer starts a thread of its own together with the first thread; make it exist before counting.
  static const bool first_thread = [] {
    std::thread([] {}).join();
    for (const auto warm_up : warm_ups()) warm_up();
    return true;
  }();
  (void)first_thread;
  ProcessResources held;
  for (const std::string& name : names_in("/proc/self/fd")) {
    const std::string target = link_target("/proc/self/fd/" + name);
    // The listing's own descriptor shows up in the listing.
    if (target.empty() || target.starts_with("/proc/")) continue;
    // LibTorch 2.6 reads the cache sizes on first use, and leaves the files open.
    if (target.starts_with("/sys/devices/system/cpu/")) continue;
    // A sanitizer opens pipes to its symbolizer on first use.
    if (kSanitized && target.starts_with("pipe:")) continue;
    held.descriptors_.insert(fmt::format("{} -> {}", name, target));
  }
  held.threads_ = names_in("/proc/self/task").size();
  for (const std::string& name : names_in("/dev/shm")) {
    const bool of_a_test = name.starts_with("maniple-test-");  // another test's TemporaryDirectory
    if (name.find("maniple") != std::string::npos && !of_a_test) held.shared_memory_.insert("/dev/shm/" + name);
  }
  return held;
}

std::vector<std::string> ProcessResources::leaked_since(const ProcessResources& before) {
  const auto until = std::chrono::steady_clock::now() + kGrace;
  for (;;) {
    std::vector<std::string> leaks = now().beyond(before);
    if (leaks.empty() || std::chrono::steady_clock::now() >= until) return leaks;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // sleep: between two polls of /proc
  }
}

std::vector<std::string> ProcessResources::beyond(const ProcessResources& before) const {
  std::vector<std::string> more;
  if (descriptors_.size() > before.descriptors_.size()) {
    for (const std::string& fd : descriptors_) {
      if (!before.descriptors_.contains(fd)) more.push_back("descriptor " + fd);
    }
  }
  if (threads_ > before.threads_) more.push_back(fmt::format("{} threads, {} before", threads_, before.threads_));
  for (const std::string& name : shared_memory_) {
    if (!before.shared_memory_.contains(name)) more.push_back("shared memory " + name);
  }
  return more;
}

}  // namespace maniple::harness
