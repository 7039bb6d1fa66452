// A killed rank, a mismatched call, a deadline: with a plugin backend the errors are the same, and nothing hangs.
#include <fmt/format.h>

#include "comm/backend/backend.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "harness/sanitizers.h"

namespace maniple::harness {
namespace {

constexpr int kRanks = 3;
constexpr double kSoon = 20;  // seconds; far below the limit of an operation

RunOptions options() {
  RunOptions run;
  run.n = kRanks;
  run.as = As::processes;
  run.timeout = Seconds(60);
  run.limit = Seconds(120);
  return run;
}

void expect_aborted_soon(Rank& r) {
  // A call may find all it needs in what was sent before the others heard of the failure; a later one cannot.
  Caught later;
  for (int attempt = 0; attempt < 3 && !later.any; ++attempt) {
    int value = 0;
    later = catch_error([&] { r.world->all_reduce(buffer_of(value)); });
  }
  EXPECT_TRUE(later.is(ErrorKind::aborted)) << later;
  EXPECT_NE(r.world->error(), nullptr);
}

void expect_loss_of(Rank& r, int victim, const Caught& caught) {
  EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
  EXPECT_EQ(caught.lost_rank, victim) << caught;
  EXPECT_TRUE(names_rank(caught.text, victim)) << caught;
  EXPECT_LT(caught.took, kSoon);
  expect_aborted_soon(r);
}

TEST(Plugin, IsTheRequestedOne) {
  run_ranks(options(), [](Rank& r) {
    EXPECT_EQ(r.world->backend(), chosen_backend());
    float x = 1;
    r.world->all_reduce(buffer_of(x), ReduceOp::avg);
    EXPECT_EQ(x, 1.0f);
  });
}

TEST(Plugin, KilledRankBetweenCalls) {
  RunOptions run = options();
  run.fault = kill_at(1, 5);
  run_ranks(run, [](Rank& r) {
    std::vector<float> values(10'000, 1.0f);
    const Caught caught = catch_error([&] {
      for (;;) {
        r.step();
        r.world->all_reduce(buffer_of(values));
      }
    });
    EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
    expect_loss_of(r, 1, caught);
  });
}

// The others are inside the plugin, not comparing what was called, when the rank is lost.
TEST(Plugin, KilledRankInsideThePlugin) {
  RunOptions run = options();
  run.fault = kill_at(2, 5);
  run.env = {{"MANIPLE_CHECKS", "0"}};
  run_ranks(run, [](Rank& r) {
    std::vector<float> values(300'000, 1.0f);
    const Caught caught = catch_error([&] {
      for (;;) {
        r.step();
        r.world->all_reduce(buffer_of(values));
      }
    });
    EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
    expect_loss_of(r, 2, caught);
  });
}

TEST(Plugin, KilledSender) {
  RunOptions run = options();
  run.fault = kill_at(0, 1);
  run_ranks(run, [](Rank& r) {
    r.world->barrier();
    r.phase("all are through the barrier");
    if (r.rank == 0) r.step();
    int x = 0;
    const Caught caught = catch_error([&] { r.world->recv(buffer_of(x), 0); });
    // By its message; by its number where the loss was known before the call.
    const bool by_message = contains(caught.text, fmt::format("[recv from rank 0 tag 0 world rank {}/3]", r.rank));
    EXPECT_TRUE(by_message || names_call(caught.text, "recv", r)) << caught;
    expect_loss_of(r, 0, caught);
  });
}

TEST(Plugin, MismatchIsReportedToAll) {
  run_ranks(options(), [](Rank& r) {
    r.world->barrier();
    std::vector<float> x(r.rank == 2 ? 1001 : 1000);
    const Caught caught = catch_error([&] { r.world->all_reduce(buffer_of(x)); });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    EXPECT_TRUE(contains(caught.text, "1000") && contains(caught.text, "1001")) << caught;
    EXPECT_TRUE(names_rank(caught.text, 2)) << caught;
    EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
    EXPECT_LT(caught.took, kSoon);
    expect_aborted_soon(r);
    r.phase("all have seen it");
  });
}

void give_up_on_the_last(Rank& r) {
  r.world->barrier();
  std::vector<float> x(10'000);
  if (r.rank != r.size - 1) {
    const Caught caught =
        catch_error([&] { r.world->all_reduce(buffer_of(x), ReduceOp::sum, {.timeout = Seconds(0.5)}); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::timeout, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(names_call(caught.text, "all_reduce", r)) << caught;
    EXPECT_LT(caught.took, kSoon);
    r.report("said", caught.text);
    expect_aborted_soon(r);
  }
  r.phase("the others have given up");
}

TEST(Plugin, DeadlineNamesTheLateRank) {
  const auto result = run_ranks(options(), give_up_on_the_last);
  if (!result) return;
  bool progress_reported = false;  // by the rank that gave up first; the others get its error
  for (const auto& [rank, text] : result.texts("said")) {
    EXPECT_TRUE(names_rank(text, kRanks - 1)) << text;
    progress_reported = progress_reported || (contains(text, "waiting for rank 2") && contains(text, " received"));
  }
  EXPECT_TRUE(progress_reported);
}

TEST(Plugin, DeadlineInsideThePlugin) {
  RunOptions run = options();
  run.env = {{"MANIPLE_CHECKS", "0"}};
  run_ranks(run, give_up_on_the_last);
}

TEST(Plugin, OneGroupsDeadlineLeavesTheWorldAlone) {
  run_ranks(options(), [](Rank& r) {
    const auto group = r.world->split(0, 0, {.timeout = Seconds(0.5), .transport = {}, .algorithm = {}});
    group->barrier({.timeout = Seconds(30)});
    if (r.rank != 0) {
      EXPECT_TRUE(catch_error([&] { group->barrier(); }).is_one_of({ErrorKind::timeout, ErrorKind::aborted}));
    }
    r.phase("others have given up");
    int x = 1;
    r.world->all_reduce(buffer_of(x));
    EXPECT_EQ(x, r.size);
  });
}

TEST(Plugin, MissingOnesAreNamedWithHowToInstallThem) {
  InitOptions join;
  join.rank = 0;
  join.world_size = 1;
  join.backend = "nccl";
  const Caught absent = catch_error([&] { maniple::init(make_memory_store(), join); });
  if (const Caught missing = catch_error([] { find_backend("nccl"); }); missing.any) {
    EXPECT_TRUE(absent.is(ErrorKind::unsupported)) << absent;
    EXPECT_TRUE(contains(absent.text, "NCCL") || contains(absent.text, "NVIDIA")) << absent;
  } else {
    EXPECT_FALSE(absent.any) << absent;  // a machine with a GPU
  }
  join.backend = "plugin-pigeon";
  const Caught unknown = catch_error([&] { maniple::init(make_memory_store(), join); });
  EXPECT_TRUE(unknown.is(ErrorKind::unsupported)) << unknown;
  EXPECT_TRUE(contains(unknown.text, "native")) << unknown;
}

}  // namespace
}  // namespace maniple::harness
