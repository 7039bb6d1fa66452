// Fault 18: /dev/shm is tiny and full, as in many containers. The job does not notice.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

// A /dev/shm of 64 KiB that only this process sees, filled to the brim.
void fill_private_shm() {
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  ASSERT_EQ(::mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k"), 0);
  const int fd = ::open("/dev/shm/full", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  const std::string block(4096, 'x');
  while (::write(fd, block.data(), block.size()) > 0) {
  }
  EXPECT_EQ(errno, ENOSPC);
  ::close(fd);
}

TEST(ShmFull, JobWorksWithoutDevShm) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount a /dev/shm of its own";
  run_ranks({.n = 4, .as = As::processes, .transport = TransportKind::shm, .init = false}, [](Rank& r) {
    fill_private_shm();
    r.init();
    const RegisteredMemory memory = r.world->allocate(8 << 20);
    const auto values = memory.as<float>((8 << 20) / sizeof(float));
    std::fill(values.begin(), values.end(), 1.0f);
    r.world->all_reduce(buffer_of(values));
    EXPECT_EQ(values.back(), 4.0f);
    std::vector<float> ordinary(2'000'000, 1.0f);
    r.world->all_reduce(buffer_of(ordinary));
    EXPECT_EQ(ordinary.back(), 4.0f);
  });
}

// A rank that cannot map what all allocate fails, and with it the group: the others do not go on without it.
TEST(NoMemory, RegisteredMemoryThatOneRankCannotMapFailsOnAll) {
  run_ranks({.n = 3, .as = As::processes, .transport = TransportKind::shm, .backend = "native"}, [](Rank& r) {
    constexpr rlim_t kMax = 256 << 20;
    if (r.rank == 2) {
      const rlimit limit{kMax, kMax};
      ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    }
    const Caught caught = catch_error([&] { r.world->allocate(kMax / 2); });
    EXPECT_TRUE(caught.is(r.rank == 2 ? ErrorKind::system : ErrorKind::aborted)) << caught;
    EXPECT_TRUE(contains(caught.text, "[allocate #") && contains(caught.text, "rank 2/3] ")) << caught;
    expect_aborted_from_now_on(r);
    r.phase("all have seen it");
  });
}

}  // namespace
}  // namespace maniple::harness
