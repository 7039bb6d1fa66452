// A rank leaves its group while others still wait for something of it: they get an error at once, with every backend,
// and receive all that it sent before.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::harness::plugin_leave_test {
namespace {

constexpr int kLeaver = 1;
constexpr double kSoon = 10;  // seconds; far below the limit of an operation

// The leaver ends by a signal when all is over: an MPI would have it wait for the ranks whose group has failed.
RunOptions options() {
  RunOptions run;
  run.n = 3;
  run.as = As::processes;
  run.timeout = Seconds(60);
  run.limit = Seconds(90);
  run.expect_dead = {kLeaver};
  return run;
}

using Part = std::function<void(Rank&)>;

struct Parts {
  Part before = [](Rank&) {};  // of the leaver, before it leaves
  Part first = [](Rank&) {};   // of the others, when it has left
  Part then;                   // of the others, when all are through that
};

void run_with_leaver(const Parts& parts) {
  run_ranks(options(), [&](Rank& r) {
    r.world->barrier();
    if (r.rank == kLeaver) {
      parts.before(r);
      r.world.reset();
    }
    r.phase("it has left");
    if (r.rank != kLeaver) parts.first(r);
    r.phase("the others have had their first part");
    if (r.rank != kLeaver) parts.then(r);
    r.phase("the others know");
    if (r.rank == kLeaver) r.kill_self();
  });
}

void expect_left(const Caught& caught) {
  EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
  EXPECT_EQ(caught.lost_rank, kLeaver) << caught;
  // Over TCP, by which gloo notices it, a rank that leaves and one that ends look alike.
  const bool closed = caught.info.loss == LossKind::left_or_ended && chosen_backend() != "mpi";
  EXPECT_TRUE(caught.info.loss == LossKind::left || closed) << caught;
  EXPECT_TRUE(names_rank(caught.text, kLeaver)) << caught;
  EXPECT_LT(caught.took, kSoon) << caught;
}

TEST(PluginLeave, Collective) {
  run_with_leaver({.then = [](Rank& r) {
    std::vector<float> values(10'000, 1.0f);
    expect_left(catch_error([&] { r.world->all_reduce(buffer_of(values)); }));
  }});
}

TEST(PluginLeave, Barrier) {
  run_with_leaver({.then = [](Rank& r) { expect_left(catch_error([&] { r.world->barrier(); })); }});
}

TEST(PluginLeave, Receive) {
  run_with_leaver({.then = [](Rank& r) {
    int x = 0;
    expect_left(catch_error([&] { r.world->recv(buffer_of(x), kLeaver); }));
  }});
}

TEST(PluginLeave, SendOfMoreThanFitsInTransit) {
  run_with_leaver({.then = [](Rank& r) {
    std::vector<float> values(4'000'000, 1.0f);
    expect_left(catch_error([&] { r.world->send(buffer_of(values), kLeaver); }));
  }});
}

TEST(PluginLeave, WhatItSentBeforeIsReceived) {
  constexpr int kTags = 2;
  constexpr int kCount = 2000;  // more than an MPI sends eagerly
  const auto value = [](int to, int tag, int i) { return static_cast<float>(to * 100'000 + tag * 10'000 + i); };
  Parts parts;
  parts.before = [&](Rank& r) {
    std::vector<float> values(kCount);
    for (const int to : {0, 2}) {
      for (int tag = 0; tag < kTags; ++tag) {
        for (int i = 0; i < kCount; ++i) values[static_cast<std::size_t>(i)] = value(to, tag, i);
        r.world->send(buffer_of(values), to, tag);
      }
    }
  };
  parts.first = [&](Rank& r) {
    std::vector<float> values(kCount);
    for (int tag = kTags - 1; tag >= 0; --tag) {
      r.world->recv(buffer_of(values), kLeaver, tag);
      for (int i = 0; i < kCount; ++i) EXPECT_EQ(values[static_cast<std::size_t>(i)], value(r.rank, tag, i));
    }
  };
  parts.then = [](Rank& r) {
    int x = 0;
    expect_left(catch_error([&] { r.world->recv(buffer_of(x), kLeaver); }));
  };
  run_with_leaver(parts);
}

// MPI uses the numbers of a communicator again when it is gone.
TEST(PluginLeave, AnUnreceivedMessageIsNotReceivedInALaterGroup) {
  RunOptions run = options();
  run.expect_dead = {};
  run_ranks(run, [](Rank& r) {
    for (int round = 0; round < 8; ++round) {
      const auto group = r.world->split(0, round % 2 == 0 ? r.rank : -r.rank);
      const int next = (group->rank() + 1) % group->size();
      const int previous = (group->rank() + group->size() - 1) % group->size();
      const int mine = round * 10 + group->rank();
      int got = -1;
      auto sent = group->isend(buffer_of(mine), next);
      group->recv(buffer_of(got), previous);
      sent.wait();
      EXPECT_EQ(got, round * 10 + previous);
      group->send(buffer_of(got), next);  // the one that is not received
      int sum = 1;
      group->all_reduce(buffer_of(sum));
      EXPECT_EQ(sum, r.size);
    }
  });
}

// Exit handlers that a backend registered run in a child as well; they must not take the rank out of its groups.
TEST(PluginLeave, AForkedChildThatExits) {
  run_ranks({.n = 2, .as = As::processes, .timeout = Seconds(60), .limit = Seconds(90)}, [](Rank& r) {
    int value = 1;
    r.world->all_reduce(buffer_of(value));
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      std::exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    r.phase("both children have ended");
    value = 1;
    r.world->all_reduce(buffer_of(value));
    EXPECT_EQ(value, 2);
    int sent = r.rank, received = -1;
    const Work arrival = r.world->irecv(buffer_of(received), 1 - r.rank);
    r.world->send(buffer_of(sent), 1 - r.rank);
    arrival.wait();
    EXPECT_EQ(received, 1 - r.rank);
  });
}

}  // namespace
}  // namespace maniple::harness::plugin_leave_test
