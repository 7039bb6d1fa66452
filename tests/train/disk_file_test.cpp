#include "train/disk_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <memory>

#include <gtest/gtest.h>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "harness/temporary_directory.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using harness::TemporaryDirectory;
using Names = std::vector<std::string>;

/// The text of the SystemError that a call throws.
template <class Call>
std::string system_error_of(const Call& call) {
  try {
    call();
  } catch (const SystemError& error) {
    return error.what();
  }
  return "no error";
}

TEST(DurableFile, HasItsNameWhenItIsFinished) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/file";
  std::ofstream(path) << "old";
  DurableFile file(path);
  file.write("new ");
  file.write("text");
  EXPECT_EQ(file_text(path), "old");
  const FileDigest digest = file.finish();
  EXPECT_EQ(file_text(path), "new text");
  EXPECT_EQ(digest.bytes, 8u);
  EXPECT_EQ(digest, digest_of(RegularFile(path)));
  EXPECT_EQ(names_in(folder.path()), Names{"file"});
}

TEST(DurableFile, IsHashedOnlyOnDemand) {
  const TemporaryDirectory folder;
  DurableFile file(folder.path() + "/file", DurableFile::Hash::none);
  file.write("text");
  EXPECT_EQ(file.finish(), (FileDigest{4, ""}));
}

TEST(DurableFile, IsRemovedIfItIsNotFinished) {
  const TemporaryDirectory folder;
  {
    DurableFile written(folder.path() + "/written"), synced(folder.path() + "/synced");
    written.write("text");
    synced.sync();
    EXPECT_EQ(names_in(folder.path()).size(), 2u);
  }
  EXPECT_EQ(names_in(folder.path()), Names{});
}

TEST(DurableFile, ALeftoverOfAProcessWithThisPidIsReplaced) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/file";
  std::ofstream(format_text("{}.partial-{}", path, ::getpid())) << "a longer text";
  DurableFile file(path);
  file.write("text");
  file.finish();
  EXPECT_EQ(file_text(path), "text");
  EXPECT_EQ(names_in(folder.path()), Names{"file"});
}

TEST(DurableFile, AChildOfForkLeavesTheFileToItsParent) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/file";
  auto file = std::make_unique<DurableFile>(path);
  file->write("text");
  const pid_t child = ::fork();
  if (child == 0) {
    file.reset();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  file->finish();
  EXPECT_EQ(file_text(path), "text");
}

TEST(DurableFile, SeveralArePublishedTogether) {
  const TemporaryDirectory folder;
  std::deque<DurableFile> files;
  for (const char* name : {"a", "b", "index"}) {
    files.emplace_back(folder.path() + "/" + name, DurableFile::Hash::none).write(name);
    files.back().sync();
  }
  EXPECT_EQ(file_text(folder.path() + "/a"), "");
  DurableFile::publish(files);
  files.clear();
  EXPECT_EQ(names_in(folder.path()).size(), 3u);
  for (const char* name : {"a", "b", "index"}) EXPECT_EQ(file_text(folder.path() + "/" + name), name);
}

TEST(DurableFile, AnErrorNamesThePathAndWhatToDo) {
  const TemporaryDirectory folder;
  const std::string missing = folder.path() + "/missing/file", taken = folder.path() + "/taken";
  EXPECT_EQ(system_error_of([&] { DurableFile{missing}; }),
            format_text("cannot create {}: No such file or directory; make its folder first", missing));
  ASSERT_EQ(::mkdir(taken.c_str(), 0777), 0);
  EXPECT_EQ(
      system_error_of([&] { DurableFile(taken).finish(); }),
      format_text("cannot give its name to {}: Is a directory; a folder has this name; choose another one", taken));
  EXPECT_EQ(names_in(folder.path()), Names{"taken"});
}

TEST(DurableFile, AFileThatCannotGrowLeavesNothing) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/file";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = system_error_of([&] { DurableFile(path).write(std::string(10'000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(text, format_text("cannot write {}: File too large; raise the limit of file sizes (ulimit -f), or choose a "
                              "folder on another file system",
                              path));
  EXPECT_EQ(names_in(folder.path()), Names{});
}

}  // namespace
}  // namespace maniple
