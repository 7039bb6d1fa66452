// Resources of a process, counted before and after a run: descriptors, threads, named shared memory.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace maniple::harness {

/// Names what a library under the tests starts once for the whole process (threads, descriptors of a driver): called
/// before the first count, so that it is there before and after. The result is for initialisers of static objects.
bool call_before_first_count(void (*warm_up)());

class ProcessResources {
 public:
  static ProcessResources now();

  /// What is held now beyond `before`, one line each; waits a little for threads that are on their way out.
  static std::vector<std::string> leaked_since(const ProcessResources& before);

 private:
  std::vector<std::string> beyond(const ProcessResources& before) const;

  std::set<std::string> descriptors_;  // "7 -> socket:[1234]"
  std::size_t threads_ = 0;
  std::set<std::string> shared_memory_;
};

}  // namespace maniple::harness
