// Fault 19: few file descriptors. The soft limit is raised as far as it may be; if that is not enough, an error says
// so.
#include <dirent.h>
#include <sys/resource.h>

#include "comm/base/host.h"
#include "comm/base/unique_fd.h"
#include "fault/expect_error.h"
#include "fault/ways.h"

namespace maniple::harness {
namespace {

class FdLimit : public EveryTransport {};
INSTANTIATE_TEST_SUITE_P(Faults, FdLimit, process_transports(), transport_name);

void set_limit(rlim_t soft, rlim_t hard) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = soft;
  limit.rlim_max = std::min(hard, limit.rlim_max);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

int open_descriptors() {
  int count = -3;  // ".", "..", and the folder itself
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

void talk_to_all(Rank& r) {
  std::vector<float> in(100 * r.size, static_cast<float>(r.rank)), out(in.size());
  r.world->all_to_all(buffer_of(in), buffer_of(out));
  for (int rank = 0; rank < r.size; ++rank) EXPECT_EQ(out[100 * rank], static_cast<float>(rank));
  r.world->all_reduce(buffer_of(in));
}

TEST_P(FdLimit, SoftLimitOf64IsRaised) {
  run_ranks({.n = 16, .as = As::processes, .transport = GetParam(), .init = false}, [](Rank& r) {
    set_limit(64, RLIM_INFINITY);
    r.init();
    talk_to_all(r);
  });
}

TEST_P(FdLimit, ASoftLimitReachedInInitIsRaised) {
  for (rlim_t spare = 0; spare < 24; ++spare) {
    run_ranks({.n = 2, .as = As::processes, .transport = GetParam(), .init = false}, [&](Rank& r) {
      set_limit(open_descriptors() + spare, RLIM_INFINITY);
      r.init();
      talk_to_all(r);
    });
  }
}

// Whichever descriptor is the first over the soft limit: of a group, a connection, its acceptance, its second use,
// memory.
TEST_P(FdLimit, ASoftLimitReachedAnywhereIsRaised) {
  run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .init = false}, [](Rank& r) {
    r.init();
    for (const bool as_group_is_made : {true, false}) {
      for (rlim_t spare = 0; spare < 24; ++spare) {
        r.world->barrier();
        if (as_group_is_made) set_limit(open_descriptors() + spare, RLIM_INFINITY);
        const auto group = r.world->split(0);
        if (!as_group_is_made) set_limit(open_descriptors() + spare, RLIM_INFINITY);
        std::vector<float> in(100 * r.size, static_cast<float>(r.rank)), out(in.size());
        group->all_to_all(buffer_of(in), buffer_of(out));
        group->all_reduce(buffer_of(in));
        set_limit(4096, RLIM_INFINITY);
      }
    }
  });
}

TEST_P(FdLimit, FourRanksLiveWith64) {
  run_ranks({.n = 4, .as = As::processes, .transport = GetParam(), .init = false}, [](Rank& r) {
    set_limit(64, 64);
    r.init();
    talk_to_all(r);
  });
}

TEST_P(FdLimit, TooFewDescriptorsAreReported) {
  const RunResult result = run_ranks(
      {.n = 4, .as = As::processes, .transport = GetParam(), .init = false, .timeout = Seconds(10)}, [](Rank& r) {
        if (r.rank == 1) set_limit(8, 8);
        const Caught caught = catch_error([&] {
          r.init();
          talk_to_all(r);
        });
        EXPECT_TRUE(caught.any) << "rank 1 cannot have worked with 8 descriptors";
        r.report("error", caught.text);
        r.report("is system error", caught.is(ErrorKind::system) ? 1 : 0);
      });
  if (!result) return;
  EXPECT_EQ(result.numbers("is system error").at(1), 1) << result.texts("error").at(1);
  EXPECT_TRUE(contains(result.texts("error").at(1), "open files") ||
              contains(result.texts("error").at(1), "descriptor"))
      << result.texts("error").at(1);
}

// Otherwise it would seem to be on a host of its own, and use TCP.
TEST(FdLimitOfFiles, ARankThatReachedItKnowsItsHost) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const std::string key = host_identity().key;
  const auto lowest_free = static_cast<rlim_t>(UniqueFd(::dup(STDERR_FILENO)).get());
  set_limit(lowest_free, RLIM_INFINITY);
  ASSERT_LT(::dup(STDERR_FILENO), 0);
  EXPECT_EQ(host_identity().key, key);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

// The others wait for it: they get an error, long before their deadline. (By TCP it may also be that a connection is
// not accepted.)
TEST(FdLimitOfGroups, AGroupThatOneRankCannotMakeFailsOnAll) {
  for (const int spare : {0, 1, 2, 3, 5}) {  // the lack of one more shows in other places
    run_ranks({.n = 3, .as = As::processes, .transport = TransportKind::shm}, [&](Rank& r) {
      r.world->barrier();
      if (r.rank == 2) set_limit(open_descriptors() + spare, open_descriptors() + spare);
      r.phase("rank 2 has few descriptors");
      std::vector<std::shared_ptr<ProcessGroup>> groups;
      const Caught caught = catch_error([&] {
        for (int i = 0; i < 20; ++i) {
          groups.push_back(r.world->split(0));
          int one = 1;
          groups.back()->all_reduce(buffer_of(one));
        }
      });
      EXPECT_TRUE(caught.is(r.rank == 2 ? ErrorKind::system : ErrorKind::aborted)) << spare << " to spare: " << caught;
      EXPECT_TRUE(contains(caught.text, "rank 2/3] ")) << spare << " to spare: " << caught;
      r.phase("all have seen it");
    });
  }
}

}  // namespace
}  // namespace maniple::harness
