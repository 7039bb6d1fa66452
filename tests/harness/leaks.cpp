#include "harness/leaks.h"

#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>

#include <fmt/format.h>

namespace maniple::harness {
namespace fs = std::filesystem;
namespace {

constexpr auto kPatience = std::chrono::seconds(3);

// Entries of a directory that may vanish while we look.
template <class Visit>
void visit_entries(const char* directory, Visit visit) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) visit(entry->path());
}

}  // namespace

Holdings Holdings::now() {
  // The thread sanitizer starts a thread of its own with the first one; it is there before we count.
  static const bool first_thread = [] {
    std::thread([] {}).join();
    return true;
  }();
  (void)first_thread;
  Holdings held;
  visit_entries("/proc/self/fd", [&](const fs::path& path) {
    std::error_code gone;
    const fs::path target = fs::read_symlink(path, gone);
    // The listing's own descriptor shows up in the listing.
    if (gone || target.string().starts_with("/proc/")) return;
    held.descriptors_.insert(fmt::format("{} -> {}", path.filename().string(), target.string()));
  });
  visit_entries("/proc/self/task", [&](const fs::path&) { ++held.threads_; });
  visit_entries("/dev/shm", [&](const fs::path& path) {
    if (path.filename().string().find("maniple") != std::string::npos) held.shared_memory_.insert(path.string());
  });
  return held;
}

std::vector<std::string> Holdings::leaked_since(const Holdings& before) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    std::vector<std::string> leaks = now().beyond(before);
    if (leaks.empty() || std::chrono::steady_clock::now() >= until) return leaks;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // sleep: between two looks at /proc
  }
}

std::vector<std::string> Holdings::beyond(const Holdings& before) const {
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

std::vector<std::string> files_under(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    files.push_back(entry->path().string());
  }
  return files;
}

}  // namespace maniple::harness
