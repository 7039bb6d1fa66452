// What is in a checkpoint folder besides the newest checkpoint: leftovers, damage, other runs. Nothing good is ever
// lost.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/temporary_directory.h"
#include "train/checkpoint/pending_checkpoint.h"
#include <maniple/train/checkpoint.h>

namespace maniple::checkpoint_folder_test {

// Directories that fsync was called for, while somebody listens.
std::vector<std::string>* synced = nullptr;

}  // namespace maniple::checkpoint_folder_test

extern "C" int fsync(int fd) {
  if (auto* list = maniple::checkpoint_folder_test::synced) {
    list->push_back(maniple::link_target(maniple::format_text("/proc/self/fd/{}", fd)));
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace maniple::checkpoint_folder_test {
namespace {

using harness::TemporaryDirectory;
using Steps = std::vector<std::int64_t>;

/// In memory where that can be had: a disk takes its time to sync.
std::string fast_folder() { return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : temporary_folder(); }

/// A process of a job: it saves one number.
struct Job {
  explicit Job(const std::string& folder, int keep_last = 3)
      : checkpoint({.folder = folder, .keep_last = keep_last, .background = false}) {
    checkpoint.add("number", number);
  }
  void save(std::int64_t step, std::int64_t value) {
    number = value;
    checkpoint.save(step);
    EXPECT_EQ(checkpoint.last_error(), "") << "step " << step;
  }
  void save(std::int64_t step) { save(step, step); }
  std::int64_t number = -1;
  Checkpoint checkpoint;
};

/// What a new process finds there: the step and the number, or none.
std::pair<std::int64_t, std::int64_t> found(const std::string& folder) {
  Job run(folder);
  const auto step = run.checkpoint.load();
  return {step.value_or(-1), run.number};
}
using Found = std::pair<std::int64_t, std::int64_t>;

std::string part_of(const std::string& folder, std::int64_t step, const std::string& file = "number.safetensors") {
  return folder + "/" + checkpoint_name(step) + "/" + file;
}

void truncate_part(const std::string& folder, std::int64_t step) {
  ASSERT_EQ(::truncate(part_of(folder, step).c_str(), 20), 0);
}
/// The length stays.
void flip_bit(const std::string& folder, std::int64_t step) {
  std::fstream file(part_of(folder, step), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(12);
  file.put('~');
}

bool has(const std::string& folder, const std::string& name) {
  return ::access((folder + "/" + name).c_str(), F_OK) == 0;
}
bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ---- Writing --------------------------------------------------------------------------------------------------------

TEST(CheckpointFolder, ALeftoverOfAProcessWithThisPidIsIgnored) {
  const TemporaryDirectory folder;
  const std::string left = format_text("{}/.partial-{}-{}", folder.path(), checkpoint_name(2), ::getpid());
  ASSERT_EQ(::mkdir(left.c_str(), 0777), 0);
  ASSERT_EQ(::mkdir((left + "/below").c_str(), 0777), 0);
  std::ofstream(left + "/below/file") << "x";
  Job(folder.path()).save(2);
  EXPECT_EQ(found(folder.path()), Found(2, 2));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{checkpoint_name(2)});
}

TEST(CheckpointFolder, FilesBeingWrittenAreNotLeftovers) {
  const TemporaryDirectory folder;
  PendingCheckpoint first(folder.path(), 2);
  PendingCheckpoint second(folder.path(), 2);  // as a process of another container that has the same number
  EXPECT_NE(first.path_of(""), second.path_of(""));
  EXPECT_EQ(names_in(folder.path()).size(), 2u);
  first.commit();
  second.commit();
  EXPECT_EQ(list_checkpoints(folder.path()), Steps{2});
  EXPECT_EQ(names_in(folder.path()).size(), 1u);
}

TEST(CheckpointFolder, IfOneRenameFailsThoseBeforeItAreUndone) {
  const TemporaryDirectory folder;
  const auto at = [&](const char* name) { return folder.path() + "/" + name; };
  for (const char* name : {"a", "b"}) std::ofstream(at(name)) << name;
  EXPECT_THROW(rename_all({{at("a"), at("c")}, {at("b"), at("a")}, {at("nowhere"), at("b")}}), SystemError);
  EXPECT_EQ(file_text(at("a")), "a");
  EXPECT_EQ(file_text(at("b")), "b");
  EXPECT_FALSE(has(folder.path(), "c"));
}

TEST(CheckpointFolder, OneThatWasReplacedWhenItsWriterDiedIsUsed) {
  const TemporaryDirectory folder;
  Job(folder.path(), 1).save(5, 55);
  const std::string name = checkpoint_name(5);
  ASSERT_EQ(::rename((folder.path() + "/" + name).c_str(), (folder.path() + "/.replaced-" + name).c_str()), 0);
  EXPECT_EQ(found(folder.path()), Found(5, 55));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{name});
}

TEST(CheckpointFolder, TheParentOfANewFolderIsSynced) {
  const TemporaryDirectory top;
  std::vector<std::string> list;
  synced = &list;
  Job(top.path() + "/runs/7").save(1);
  synced = nullptr;
  for (const char* folder : {"", "/runs", "/runs/7"}) {
    EXPECT_EQ(std::count(list.begin(), list.end(), top.path() + folder), 1) << folder << " of " << joined(list, "\n");
  }
}

TEST(CheckpointFolder, AFailureNamesTheCheckpointToResumeFrom) {
  testing::internal::CaptureStderr();
  Job run("/proc/not/there");
  run.checkpoint.save(3);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(mentions(run.checkpoint.last_error(), "step 3 in /proc/not/there was not saved"))
      << run.checkpoint.last_error();
  EXPECT_TRUE(mentions(log, "there is no checkpoint yet")) << log;
}

TEST(CheckpointFolder, NonDirectoriesAreRefused) {
  for (const char* path : {"/dev/null", "/dev/null/below", "/proc/self/exe"}) {
    EXPECT_TRUE(mentions(error_of([&] { Checkpoint({.folder = path}); }), "is not a directory")) << path;
  }
  // What cannot be read may hold checkpoints: no fresh start.
  const TemporaryDirectory folder;
  const std::string loop = folder.path() + "/loop";
  ASSERT_EQ(::symlink("loop", loop.c_str()), 0);
  EXPECT_THROW(Job(loop).checkpoint.load(), SystemError);
}

// ---- Reading --------------------------------------------------------------------------------------------------------

TEST(CheckpointFolder, OnlyRegularFilesOfTheRightLengthAreRead) {
  const std::map<std::string, std::function<void(const std::string&)>> kinds = {
      {"named pipe", [](const std::string& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0666), 0); }},
      {"link to an endless device",
       [](const std::string& path) { ASSERT_EQ(::symlink("/dev/zero", path.c_str()), 0); }},
      {"link to a pipe's name",
       [](const std::string& path) {
         ASSERT_EQ(::mkfifo((path + ".pipe").c_str(), 0666), 0);
         ASSERT_EQ(::symlink((path + ".pipe").c_str(), path.c_str()), 0);
       }},
      {"link to nowhere", [](const std::string& path) { ASSERT_EQ(::symlink("nowhere", path.c_str()), 0); }},
      {"directory", [](const std::string& path) { ASSERT_EQ(::mkdir(path.c_str(), 0777), 0); }},
      {"lengthened file",
       [](const std::string& path) {
         std::ofstream(path) << "x";
         ASSERT_EQ(::truncate(path.c_str(), off_t{1} << 40), 0);  // 1 TiB that takes no room
       }},
  };
  for (const auto& [kind, make] : kinds) {
    for (const std::string file : {"number.safetensors", "random.safetensors", "manifest.json"}) {
      SCOPED_TRACE(testing::Message() << kind << " " << file);
      const TemporaryDirectory folder(fast_folder());
      Job run(folder.path());
      run.save(1);
      run.save(2);
      const std::string path = part_of(folder.path(), 2, file);
      ASSERT_EQ(::unlink(path.c_str()), 0);
      make(path);
      testing::internal::CaptureStderr();
      EXPECT_EQ(found(folder.path()), Found(1, 1));
      const std::string log = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(mentions(log, path)) << log;
      // It is out of the way after the next save, and can be looked at.
      run.save(3);
      EXPECT_EQ(list_checkpoints(folder.path()), (Steps{3, 1}));
      EXPECT_TRUE(has(folder.path(), "aside-" + checkpoint_name(2)));
    }
  }
}

// ---- Which are kept -------------------------------------------------------------------------------------------------

TEST(CheckpointFolder, WhenTheNewestIsDamagedTheRunGoesOnAndKeepsWhatItSaves) {
  for (const auto damage : {&truncate_part, &flip_bit}) {
    const TemporaryDirectory folder(fast_folder());
    {
      Job run(folder.path());
      for (const int step : {100, 200, 300}) run.save(step);
    }
    damage(folder.path(), 300);
    Job run(folder.path(), 1);
    EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(200));
    run.save(210);
    EXPECT_EQ(list_checkpoints(folder.path()), Steps{210});
    EXPECT_TRUE(has(folder.path(), "aside-step-000000000300"));
    const std::string log = run.checkpoint.last_pruned();
    EXPECT_TRUE(mentions(log,
                         "step-000000000300 was set aside as aside-step-000000000300: it is newer than step 200, with "
                         "which this run went on"))
        << log;
    EXPECT_TRUE(mentions(log, "step-000000000200 was removed: 1 newer ones are whole, and keep_last is 1")) << log;
    EXPECT_EQ(found(folder.path()), Found(210, 210));
    run.save(300);
    EXPECT_EQ(found(folder.path()), Found(300, 300));
    EXPECT_EQ(run.checkpoint.last_pruned().find("aside"), std::string::npos) << "300 is this run's own now";
  }
}

TEST(CheckpointFolder, WhatARollbackLeavesBehindIsSetAside) {
  const TemporaryDirectory folder(fast_folder());
  {
    Job run(folder.path(), 10);
    for (const int step : {100, 150, 200, 250, 300}) run.save(step);
  }
  {
    Job looking(folder.path());  // opening it does not roll back
    EXPECT_EQ(looking.checkpoint.load({.step = 100}), std::optional<std::int64_t>(100));
  }
  EXPECT_EQ(found(folder.path()), Found(300, 300));
  for (int again = 1; again <= 2; ++again) {
    Job run(folder.path(), 4);
    EXPECT_EQ(run.checkpoint.load({.step = 150}), std::optional<std::int64_t>(150));
    run.save(200, 1000 * again);  // a number that the run before had, too
    EXPECT_EQ(found(folder.path()), Found(200, 1000 * again));
    EXPECT_EQ(list_checkpoints(folder.path()), (Steps{200, 150, 100}));
    run.save(250);
    EXPECT_EQ(list_checkpoints(folder.path()), (Steps{250, 200, 150, 100}));
    EXPECT_EQ(run.checkpoint.last_pruned(), "");
  }
  for (const char* name : {"aside-step-000000000200", "aside-step-000000000250", "aside-step-000000000300",
                           "aside-step-000000000200-2", "aside-step-000000000250-2"}) {
    EXPECT_TRUE(has(folder.path(), name)) << name;
  }
}

TEST(CheckpointFolder, ANewRunInTheFolderOfAnotherKeepsWhatItSaves) {
  const TemporaryDirectory folder(fast_folder());
  {
    Job run(folder.path());
    for (const int step : {100, 200, 300}) run.save(step);
  }
  Job run(folder.path(), 1);  // it loads nothing
  run.save(10);
  EXPECT_EQ(found(folder.path()), Found(10, 10));
  EXPECT_EQ(list_checkpoints(folder.path()), Steps{10});
  for (const int step : {100, 200, 300}) EXPECT_TRUE(has(folder.path(), "aside-" + checkpoint_name(step)));
  EXPECT_TRUE(mentions(run.checkpoint.last_pruned(), "newer than step 10, which is saved now"))
      << run.checkpoint.last_pruned();
}

TEST(CheckpointFolder, DamagedCheckpointsDoNotCount) {
  const TemporaryDirectory folder(fast_folder());
  Job run(folder.path(), 2);
  for (const int step : {1, 2, 3}) run.save(step);
  truncate_part(folder.path(), 3);
  run.save(4);
  EXPECT_EQ(list_checkpoints(folder.path()), (Steps{4, 2}));
  EXPECT_TRUE(mentions(run.checkpoint.last_pruned(), "step-000000000003 was set aside as aside-step-000000000003: "));
  EXPECT_TRUE(mentions(run.checkpoint.last_pruned(), "has 20 bytes")) << run.checkpoint.last_pruned();
}

// Whatever is saved, damaged, gone back to and started again: what was saved last loads, and what was whole is gone
// only if a save said so.
TEST(CheckpointFolder, ManySavesRestartsAndRollbacks) {
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  for (int story = 0; story < 30; ++story) {
    const TemporaryDirectory folder(fast_folder());
    std::string log;
    std::int64_t step = 0, value = 0;
    auto run = std::make_unique<Job>(folder.path(), 1 + static_cast<int>(below(3)));
    for (int act = 0; act < 25; ++act) {
      const Steps before = list_checkpoints(folder.path());
      switch (before.empty() ? 0 : below(6)) {
        case 0:
        case 1:
        case 2: {
          step += static_cast<std::int64_t>(below(3));  // perhaps the same again
          run->save(step, ++value);
          log += format_text("\n{}: saved {}; {}", act, step, run->checkpoint.last_pruned());
          ASSERT_EQ(found(folder.path()), Found(step, value)) << log;
          for (const std::int64_t old : before) {
            const bool there = has(folder.path(), checkpoint_name(old));
            ASSERT_TRUE(there || mentions(run->checkpoint.last_pruned(), checkpoint_name(old) + " was ")) << old << log;
          }
          break;
        }
        case 3:  // damage the newest, unless nothing else can be gone on from
          if (before.size() < 2) break;
          below(2) == 0 ? truncate_part(folder.path(), before[0]) : flip_bit(folder.path(), before[0]);
          log += format_text("\n{}: damaged {}", act, before[0]);
          [[fallthrough]];
        case 4:
        case 5: {  // a new process; sometimes it goes back
          LoadOptions load;
          if (below(3) == 0) load.step = before[before.size() - 1];
          run = std::make_unique<Job>(folder.path(), 1 + static_cast<int>(below(3)));
          try {
            step = run->checkpoint.load(load).value_or(0);
            log += format_text("\n{}: loaded {}", act, step);
          } catch (const Error& error) {  // the one it expected, or all, were damaged earlier
            log += format_text("\n{}: {}", act, error.what());
          }
          break;
        }
      }
    }
  }
}

}  // namespace
}  // namespace maniple::checkpoint_folder_test
