// Checkpoints that all ranks write, and that any other number of ranks, with any other division of the tensors, reads.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <set>

#include <gtest/gtest.h>

#include "comm/base/files.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/saved_checkpoint.h"
#include "train/models.h"
#include <maniple/train/checkpoint.h>

namespace maniple::harness::sharded_checkpoint_test {

/// The process is killed at the first sync after `syncs_left` syncs, at any stage of a save. -1: never.
int syncs_left = -1;

}  // namespace maniple::harness::sharded_checkpoint_test

extern "C" int fsync(int fd) {
  int& left = maniple::harness::sharded_checkpoint_test::syncs_left;
  if (left >= 0 && left-- == 0) ::kill(::getpid(), SIGKILL);
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace maniple::harness::sharded_checkpoint_test {
namespace {

constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

// ---- Any number of ranks, any division ------------------------------------------------------------------------------

/// How ranks divide a matrix.
enum class Division { whole, flat, rows, columns };
constexpr Division kDivisions[] = {Division::whole, Division::flat, Division::rows, Division::columns};
constexpr std::int64_t kRows = 11, kColumns = 13;

using maniple::testing_models::training_device;

/// A matrix as a rank holds it. Extents that ranks do not divide, and ranks that hold nothing, are the usual case here.
TensorShard shard_of(const torch::Tensor& whole, Division division, int rank, int size) {
  const auto range = [&](std::int64_t extent) {
    return std::pair(extent * rank / size, extent * (rank + 1) / size - extent * rank / size);
  };
  const std::int64_t dim = division == Division::columns ? 1 : 0;
  switch (division) {
    case Division::whole: return TensorShard::whole("w", whole.clone());
    case Division::flat: {
      const auto [begin, count] = range(whole.numel());
      return TensorShard::flat(
          {"w", whole.sizes().vec(), begin, count, whole.flatten().narrow(0, begin, count).clone()});
    }
    default: {
      const auto [begin, count] = range(whole.size(dim));
      return TensorShard::along("w", whole.narrow(dim, begin, count).clone(), dim, begin, whole.size(dim));
    }
  }
}

torch::Tensor numbered(int seed) {
  return (torch::arange(kRows * kColumns, torch::kFloat32).view({kRows, kColumns}) + 1000 * seed).to(training_device());
}
torch::Tensor zeros() { return torch::zeros({kRows, kColumns}, training_device()); }

/// Saves or loads a matrix that is divided so, and a text of each rank.
struct Divided {
  Divided(const std::string& folder, Division division, const torch::Tensor& whole, const Rank& r)
      : Divided(folder, division, whole, r.rank, r.size, r.world) {}
  Divided(const std::string& folder, Division division, const torch::Tensor& whole, int rank = 0, int size = 1,
          std::shared_ptr<ProcessGroup> world = nullptr)
      : shard(shard_of(whole, division, rank, size)),
        checkpoint({.folder = folder, .background = false, .sharded = true, .group = std::move(world)}) {
    checkpoint.add(
        "matrix",
        [this, rank] {
          return ShardedState{.tensors = {shard}, .texts = {{"rank." + std::to_string(rank), "here"}, {"all", "same"}}};
        },
        [this](const SavedPart& saved) {
          saved.read(shard);
          texts = saved.texts();
        });
  }
  TensorShard shard;
  std::map<std::string, std::string> texts;
  Checkpoint checkpoint;
};

TEST(ShardedCheckpoint, LoadsWithAnyNumberOfRanksAndAnyDivision) {
  const SharedFolder shared;
  const auto path = [](Division division) {
    return SharedFolder::here() + "/" + std::to_string(static_cast<int>(division));
  };
  run_ranks({.n = 4, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    for (const Division division : kDivisions) {
      Divided saved(path(division), division, numbered(1), r);
      saved.checkpoint.save(5);
      EXPECT_EQ(saved.checkpoint.last_error(), "");
    }
  });
  for (const int n : {1, 2, 3, 5}) {
    run_ranks({.n = n, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      for (const Division from : kDivisions) {
        for (const Division to : kDivisions) {
          Divided loaded(path(from), to, zeros(), r);
          EXPECT_EQ(loaded.checkpoint.load(), std::optional<std::int64_t>(5));
          EXPECT_TRUE(loaded.shard.local.equal(shard_of(numbered(1), to, r.rank, r.size).local))
              << static_cast<int>(from) << " to " << static_cast<int>(to) << " on " << n;
          EXPECT_EQ(loaded.texts.size(), 5u);
        }
      }
    });
  }
}

// ---- What can go wrong ----------------------------------------------------------------------------------------------

TEST(ShardedCheckpoint, ReplicasThatDifferAreRefusedOnAllRanks) {
  const SharedFolder shared;
  run_ranks({.n = 3, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    const auto trouble = [&](const std::function<void(Checkpoint&)>& add) -> std::string {
      Checkpoint checkpoint({.folder = SharedFolder::here(), .background = false, .sharded = true, .group = r.world});
      add(checkpoint);
      try {
        checkpoint.save(1);
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return checkpoint.last_error();
    };
    const torch::Device device = training_device();
    torch::Tensor mine = torch::full({100}, r.rank == 2 ? 1.0 : 0.0, device), equal = torch::ones({3}, device);
    EXPECT_NE(trouble([&](Checkpoint& c) { c.add("t", mine); }).find("is not the same on ranks 0 and 2"),
              std::string::npos);
    // A pipeline stage with another stage's names: it would be lost.
    torch::manual_seed(static_cast<std::uint64_t>(r.rank));
    torch::nn::Linear stage(3, 4);
    stage->to(device);
    EXPECT_NE(trouble([&](Checkpoint& c) { c.add("model", *stage); }).find("need names of their own"),
              std::string::npos);
    torch::Tensor other = torch::ones({r.rank + 1}, device);
    EXPECT_NE(trouble([&](Checkpoint& c) { c.add("t", other); }).find("must mean the same tensor"), std::string::npos);
    EXPECT_NE(trouble([&](Checkpoint& c) { c.add(r.rank == 1 ? "u" : "t", equal); }).find("another one on rank 1"),
              std::string::npos);
    // A failure of one rank is an error of all; afterwards all of them can save.
    torch::Tensor sparse = torch::eye(2, device).to_sparse();
    EXPECT_NE(trouble([&](Checkpoint& c) {
                c.add("t", r.rank == 1 ? sparse : equal);
              }).find(r.rank == 1 ? "undefined or sparse" : "rank 1 could not save"),
              std::string::npos);
    // An optimizer's parameter is divided in an unknown way.
    torch::nn::Linear same(2, 2);
    same->to(device);
    torch::optim::SGD sgd(same->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (auto& parameter : same->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    sgd.step();
    EXPECT_NE(trouble([&](Checkpoint& c) { c.add("optimizer", sgd); }).find("add its module"), std::string::npos);
    // Texts of one name that differ are noticed when they are put together.
    EXPECT_NE(
        trouble([&](Checkpoint& c) {
          c.add("x", [&] { return ShardedState{.texts = {{"k", std::to_string(r.rank)}}}; }, [](const SavedPart&) {});
        }).find("\"k\" of part \"x\" is \"1\" on rank 1"),
        std::string::npos);
    EXPECT_EQ(trouble([&](Checkpoint& c) { c.add("t", equal); }), "");
  });
}

TEST(ShardedCheckpoint, AFullDiskOnOneRankKeepsThePreviousCheckpointAndIsReportedOnAll) {
  const SharedFolder shared;
  run_ranks({.n = 3, .as = As::processes, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    std::signal(SIGXFSZ, SIG_IGN);
    torch::Tensor large = torch::zeros({3, 1000}, training_device());
    Checkpoint checkpoint({.folder = SharedFolder::here(), .keep_last = 1, .sharded = true, .group = r.world});
    const TensorShard mine = TensorShard::along("w", large.narrow(0, r.rank, 1), 0, r.rank, 3);
    checkpoint.add("large", [&] { return ShardedState{.tensors = {mine}}; }, [&](const SavedPart& s) { s.read(mine); });
    checkpoint.save(1);
    checkpoint.wait();
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    rlimit small = before;
    small.rlim_cur = 600;
    if (r.rank == 1) ::setrlimit(RLIMIT_FSIZE, &small);  // the limit of a file's size stands for the disk's
    large.fill_(2);
    checkpoint.save(2);
    checkpoint.wait();
    if (r.rank == 1) ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_NE(checkpoint.last_error().find("of step 2"), std::string::npos) << checkpoint.last_error();
    EXPECT_NE(checkpoint.last_error().find("was not saved: rank 1: cannot write "), std::string::npos)
        << checkpoint.last_error();
    EXPECT_EQ(names_in(SharedFolder::here()), std::vector<std::string>{checkpoint_name(1)});
    r.phase("looked");
    checkpoint.save(3);
    checkpoint.wait();
    EXPECT_EQ(checkpoint.last_error(), "");
    large.zero_();
    EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(3));
    EXPECT_TRUE(large[r.rank].equal(torch::full({1000}, 2.0, training_device())));
  });
}

TEST(ShardedCheckpoint, KilledAtAnyStageTheOneBeforeLoads) {
  for (const int rank : {0, 1}) {
    const int stages = rank == 0 ? 5 : 1;
    for (int stage = 0; stage < stages; ++stage) {
      const SharedFolder shared;
      const auto killed = run_ranks(
          {.n = 2, .as = As::processes, .limit = kLimit, .expect_dead = {0, 1}, .env = shared.env()}, [&](Rank& r) {
            Divided run(SharedFolder::here(), Division::rows, numbered(1), r);
            run.checkpoint.save(1);
            run.shard = shard_of(numbered(2), Division::rows, r.rank, r.size);
            r.phase("saved");
            if (r.rank == rank) syncs_left = stage;
            run.checkpoint.save(2);
          });
      if (!killed) continue;
      EXPECT_EQ(killed.ended[static_cast<std::size_t>(rank)].signal, SIGKILL) << "rank " << rank << ", stage " << stage;
      // The new one is there from the rename on, which comes before the last sync of rank 0.
      Divided run(SharedFolder::here(), Division::whole, zeros());
      const int expected = rank == 0 && stage == stages - 1 ? 2 : 1;
      EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(expected)) << "rank " << rank << ", stage " << stage;
      EXPECT_TRUE(run.shard.local.equal(numbered(expected)));
      run.checkpoint.save(3);
      EXPECT_EQ(run.checkpoint.last_error(), "");
      for (const std::string& name : names_in(SharedFolder::here()))
        EXPECT_TRUE(name.starts_with("step-")) << name << " was left by rank " << rank << ", stage " << stage;
    }
  }
}

TEST(ShardedCheckpoint, DamageIsNamedAndTheOneBeforeIsUsed) {
  for (const std::string file : {"rank-00001-of-00002.safetensors", "index.json", "manifest.json"}) {
    const SharedFolder shared;
    run_ranks({.n = 2, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      Divided run(SharedFolder::here(), Division::columns, numbered(1), r);
      run.checkpoint.save(1);
      run.shard = shard_of(numbered(2), Division::columns, r.rank, r.size);
      run.checkpoint.save(2);
    });
    const std::string path = SharedFolder::here() + "/" + checkpoint_name(2) + "/" + file;
    if (!is_child()) {
      std::fstream damaged(path, std::ios::binary | std::ios::in | std::ios::out);
      damaged.seekp(-3, std::ios::end);
      damaged.put('\1');
    }
    if (!is_child()) testing::internal::CaptureStderr();  // also of ranks that are processes
    run_ranks({.n = 3, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      Divided run(SharedFolder::here(), Division::rows, zeros(), r);
      EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(1)) << file;
      EXPECT_TRUE(run.shard.local.equal(shard_of(numbered(1), Division::rows, r.rank, r.size).local));
      EXPECT_THROW(run.checkpoint.load({.step = 2}), ProtocolError);
    });
    if (is_child()) continue;
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find(path), std::string::npos) << log;
  }
}

// Hashing a terabyte takes hours: the test ends because the length is compared first.
TEST(ShardedCheckpoint, ALengthenedFileIsRefusedWithoutReadingIt) {
  const SharedFolder shared;
  run_ranks({.n = 2, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    Divided run(SharedFolder::here(), Division::columns, numbered(1), r);
    run.checkpoint.save(1);
    run.checkpoint.save(2);
  });
  const std::string file = SharedFolder::here() + "/" + checkpoint_name(2) + "/rank-00001-of-00002.safetensors";
  EXPECT_TRUE(is_child() || ::truncate(file.c_str(), off_t{1} << 40) == 0) << "a sparse file";
  run_ranks({.n = 2, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    Divided run(SharedFolder::here(), Division::columns, zeros(), r);
    EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(1));
    try {
      run.checkpoint.load({.step = 2});
      ADD_FAILURE() << "a file of 1 TiB was loaded";
    } catch (const ProtocolError& error) {
      EXPECT_NE(std::string(error.what()).find(file + " has 1099511627776 bytes"), std::string::npos) << error.what();
    }
  });
}

TEST(ShardedCheckpoint, AnIndexThatDoesNotFitItsFilesIsRefused) {
  const SharedFolder shared;
  run_ranks({.n = 2, .limit = kLimit, .env = shared.env()},
            [](Rank& r) { Divided(SharedFolder::here(), Division::rows, numbered(1), r).checkpoint.save(1); });
  CheckpointManifest manifest = verify_checkpoint(SharedFolder::here(), 1);
  const std::string path = SharedFolder::here() + "/" + checkpoint_name(1);
  CheckpointIndex index = SavedCheckpoint(path, manifest).index();
  for (IndexedPiece& piece : index.parts["matrix"].tensors["w"].pieces) piece.file = 1 - piece.file;  // 5 rows and 6
  std::ofstream(path + "/index.json") << encode_index(index);
  try {
    SavedCheckpoint(path, manifest).check_files();
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_NE(std::string(error.what()).find("which the index says it has"), std::string::npos) << error.what();
  }
}

torch::Tensor not_contiguous() { return torch::arange(6.0, training_device()).view({3, 2}).t(); }

/// As a sharded optimizer describes itself: the state exists from the first step on.
struct Stepped {
  std::vector<ShardOf> shards() {
    return {{"s", {kRows, kColumns}, begin, end - begin, state}, {"t", {2, 3}, 0, 6, transposed}};
  }
  std::map<std::string, std::string> state_texts() { return {{"steps", "7"}}; }
  std::vector<ShardOf> begin_load(const std::map<std::string, std::string>& texts, const std::set<std::string>& names) {
    EXPECT_EQ(texts.at("steps"), "7");
    EXPECT_EQ(names, (std::set<std::string>{"s", "t"}));
    state = torch::zeros({end - begin}, training_device());
    transposed.zero_();
    return shards();
  }
  Stepped(const Rank& r) : begin(kRows * kColumns * r.rank / r.size), end(kRows * kColumns * (r.rank + 1) / r.size) {}
  std::int64_t begin, end;
  torch::Tensor state, transposed = not_contiguous();
};

TEST(ShardedCheckpoint, WhatDescribesItselfAsShardsIsAdded) {
  const SharedFolder shared;
  for (const int n : {3, 2}) {
    run_ranks({.n = n, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      Stepped part(r);
      Checkpoint checkpoint({.folder = SharedFolder::here(), .background = false, .sharded = true, .group = r.world});
      checkpoint.add("part", part);
      const torch::Tensor all = numbered(0).flatten();
      if (n == 2) {
        EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(3));
      }
      if (n == 3) part.state = all.narrow(0, part.begin, part.end - part.begin).clone();
      EXPECT_TRUE(part.state.equal(all.narrow(0, part.begin, part.end - part.begin)));
      EXPECT_TRUE(part.transposed.equal(not_contiguous()));
      if (n == 3) checkpoint.save(n);
      Checkpoint plain({.folder = SharedFolder::here(), .group = r.world});
      EXPECT_THROW(plain.add("part", part), InvalidArgument);
    });
  }
}

}  // namespace
}  // namespace maniple::harness::sharded_checkpoint_test
