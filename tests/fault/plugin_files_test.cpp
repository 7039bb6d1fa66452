// What ranks leave behind in /dev/shm when one of them is killed: nothing, whatever the backend.
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

/// The files there that this process has mapped, whether they still have a name or not.
std::string mapped_files() {
  std::string all;
  std::ifstream maps("/proc/self/maps");
  for (std::string row; std::getline(maps, row);) {
    if (const std::size_t path = row.find("/dev/shm/"); path != std::string::npos) all += row.substr(path) + "\n";
  }
  return all;
}

TEST(PluginFiles, KilledRankLeavesNone) {
  RunOptions run;
  run.n = 3;
  run.as = As::processes;
  run.timeout = Seconds(60);
  run.limit = Seconds(90);
  run.fault = kill_at(1, 3);
  const RunResult result = run_ranks(run, [](Rank& r) {
    std::vector<float> values(100'000, 1.0f);
    r.world->all_reduce(buffer_of(values));
    r.report("files", mapped_files());
    const Caught caught = catch_error([&] {
      for (;;) {
        r.step();
        r.world->all_reduce(buffer_of(values));
      }
    });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
  });
  int seen = 0;
  for (const auto& [rank, files] : result.texts("files")) {
    std::istringstream in(files);
    for (std::string path; in >> path;) {
      if (path == "(deleted)") continue;
      ++seen;
      EXPECT_NE(::access(path.c_str(), F_OK), 0) << path << " is left behind, mapped by rank " << rank;
    }
  }
  if (result && chosen_backend() == "mpi") {
    EXPECT_GT(seen, 0) << "no rank has reported its files";
  }
}

}  // namespace
}  // namespace maniple::harness
