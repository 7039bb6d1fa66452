// What spawned processes find in their environment: who they are and where the others are. Pure but for its inputs.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <maniple/launch/spawn.h>

namespace maniple::launch {

using Variables = std::vector<std::pair<std::string, std::string>>;

/// Where the processes of a spawn meet.
struct MasterEndpoint {
  std::string address;
  int port = 0;
  int secret = -1;  ///< descriptor; -1: none
  int joins = -1;   ///< MANIPLE_INIT_FD, see init_notices.h; -1: none
};

/// Variables that change, in the order of their names; an empty value: the variable is taken away.
Variables spawned_variables(const SpawnOptions& options, int index, const MasterEndpoint& endpoint, int omp_threads);

/// `environ` with the changes, each "NAME=value".
std::vector<std::string> changed_environment(char* const* environment, const Variables& changes);

}  // namespace maniple::launch
