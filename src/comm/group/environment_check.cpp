#include "comm/group/environment_check.h"

#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/own_variables.h"
#include "comm/collective/algorithms.h"
#include "comm/net/address.h"
#include "comm/rendezvous/schedulers.h"
#include "comm/transport/tcp_channel.h"

namespace maniple {
namespace {

// For values that only their use can validate.
template <class Use>
void try_out(const ReadVariable& read, Knob knob, std::vector<std::string>& wrong, const Use& use) {
  const char* name = info(knob).name;
  const auto value = read(name);
  if (!value) return;
  try {
    use(*value);
  } catch (const InvalidArgument& error) {
    wrong.push_back(fmt::format("{} is \"{}\": {}", name, shown(*value), error.what()));
  }
}

// Whether this is the first rank on its host; without a local rank, the first in the world; if unknown, true.
bool is_first_of_host(const InitOptions& options) {
  if (const auto local = environment_text("LOCAL_RANK")) return *local == "0";
  if (options.rank >= 0) return options.rank == 0;
  if (const auto rank = environment_text("RANK")) return *rank == "0";
  try {
    const auto assignment = detect_scheduler(environment_text);
    return !assignment || assignment->local_rank.value_or(assignment->rank) == 0;
  } catch (const InvalidArgument&) {  // reported where the scheduler's variables are needed
    return true;
  }
}

}  // namespace

void require_good_knobs(const ReadVariable& read, bool here) {
  std::vector<std::string> wrong = wrong_knobs(read);
  try_out(read, Knob::algorithm, wrong, [](const std::string& name) { require_algorithm(name); });
  if (here) {
    try_out(read, Knob::interface_name, wrong, [](const std::string& name) { Address::of_interface(name); });
    try_out(read, Knob::tcp_congestion, wrong, [](const std::string& name) { require_congestion(name); });
  }
  if (!wrong.empty()) throw InvalidArgument(fmt::format("{}", fmt::join(wrong, ". ")));
}

void check_environment(const InitOptions& options) {
  if (is_first_of_host(options)) warn_of_unknown_variables();
  require_good_knobs(environment_text);
}

}  // namespace maniple
