// main of every program that uses run_ranks: the program itself, and each of its ranks when it starts itself again.
#include <gtest/gtest.h>

#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "harness/chosen_files.h"
#include "harness/failures.h"
#include "harness/modes.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* files = std::getenv("MANIPLE_TEST_FILES"); files != nullptr && !maniple::harness::choose_files(files)) return 2;
  const auto& mode = maniple::harness::child_mode();
  if (mode) {
    // The parent tells the story; a rank must not outlive it.
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  }
  maniple::harness::install_listener();
  const int result = RUN_ALL_TESTS();
  if (!mode) return result;
  std::fprintf(stderr, "rank %d: the test ended before its run_ranks call number %d\n", mode->rank, mode->run_index);
  return 3;
}
