#include "spawn/child_environment.h"

#include <algorithm>
#include <string_view>

namespace maniple::launch {

Variables spawned_variables(const SpawnOptions& options, int index, const MasterEndpoint& endpoint, int omp_threads) {
  const int world_size = options.world_size > 0 ? options.world_size : options.nodes * options.nprocs;
  const auto text = [](int number) { return std::to_string(number); };
  Variables variables = {
      {"LOCAL_RANK", text(index)},
      {"LOCAL_WORLD_SIZE", text(options.nprocs)},
      {"MASTER_ADDR", endpoint.address},
      {"MASTER_PORT", text(endpoint.port)},
      {"NODE_RANK", text(options.node_rank)},
      {"RANK", text(options.node_rank * options.nprocs + index)},
      {"WORLD_SIZE", text(world_size)},
      // Of a job that this process itself belongs to, not of the new one.
      {"MANIPLE_GENERATION", ""},
      {"MANIPLE_INIT_FD", endpoint.joins >= 0 ? text(endpoint.joins) : ""},
      {"MANIPLE_STORE_HOSTED", ""},
      {"MANIPLE_SPAWNED", "1"},
  };
  if (endpoint.secret >= 0) {
    variables.emplace_back("MANIPLE_SECRET_FD", text(endpoint.secret));
    variables.emplace_back("MANIPLE_SECRET_FILE", "");
  }
  if (omp_threads > 0) variables.emplace_back("OMP_NUM_THREADS", text(omp_threads));
  return variables;
}

std::vector<std::string> changed_environment(char* const* environment, const Variables& changes) {
  std::vector<std::string> result;
  for (char* const* variable = environment; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const std::string_view name = text.substr(0, text.find('='));
    if (std::none_of(changes.begin(), changes.end(), [&](const auto& change) { return change.first == name; }))
      result.emplace_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) result.push_back(name + "=" + value);
  }
  return result;
}

}  // namespace maniple::launch
