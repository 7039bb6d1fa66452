// Finds leaks by counting the process's resources before and after a run: descriptors, threads, named shared memory.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace maniple::harness {

/// Registers a function that makes a library start its process-wide resources (threads, driver descriptors). It is
/// called before the first count, so that these resources exist before and after a run. The result is for initialisers
/// of static objects.
bool call_before_first_count(void (*warm_up)());

class ProcessResources {
 public:
  static ProcessResources now();

  /// The resources held now but not in `before`, one line each. Waits briefly for threads that are ending.
  static std::vector<std::string> leaked_since(const ProcessResources& before);

 private:
  std::vector<std::string> beyond(const ProcessResources& before) const;

  std::set<std::string> descriptors_;  // "7 -> socket:[1234]"
  std::size_t threads_ = 0;
  std::set<std::string> shared_memory_;
};

}  // namespace maniple::harness
