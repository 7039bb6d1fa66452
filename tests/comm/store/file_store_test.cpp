#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "comm/store/file_store.h"
#include <maniple/comm/error.h>
#include <maniple/comm/store.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class FileStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/maniple-file-store-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory = name;
    path = directory + "/store";
  }
  void TearDown() override {
    ::unlink(path.c_str());
    ::rmdir(directory.c_str());
  }
  std::string contents() const {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void overwrite(const std::string& bytes) const {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << bytes;
    ::chmod(path.c_str(), 0600);
  }
  std::string directory;
  std::string path;
};

TEST_F(FileStoreTest, IsCreatedForItsOwnerOnly) {
  make_file_store(path)->set("k", "v");
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(FileStoreTest, RefusesAFileOthersCanRead) {
  make_file_store(path);
  ::chmod(path.c_str(), 0644);
  try {
    make_file_store(path);
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("644"));
    EXPECT_THAT(error.what(), HasSubstr(path));
  }
}

TEST_F(FileStoreTest, RefusesOtherFilesAndDirectories) {
  overwrite("something else entirely");
  EXPECT_THROW(make_file_store(path), InvalidArgument);
  EXPECT_EQ(contents(), "something else entirely");
  EXPECT_THROW(make_file_store(directory), Error);
  EXPECT_THROW(make_file_store("/no/such/directory/store"), SystemError);
}

TEST_F(FileStoreTest, EveryTruncationOfTheLastRecordLosesOnlyIt) {
  {
    const auto store = make_file_store(path);
    store->set("first", "1");
    store->set("second", "22");
  }
  const std::string whole = contents();
  const std::size_t last = encode_record({RecordKind::set, "second", "22"}).size();
  for (std::size_t cut = 1; cut <= last; ++cut) {
    overwrite(whole.substr(0, whole.size() - cut));
    const auto store = make_file_store(path);
    EXPECT_EQ(store->get("first", Deadline::after(seconds(1))), "1");
    EXPECT_EQ(store->check(std::vector<std::string>{"second"}), std::vector<bool>{false});
    store->set("third", "3");  // takes the place of the incomplete record
    EXPECT_EQ(make_file_store(path)->multi_get(std::vector<std::string>{"first", "third"}, Deadline::after(seconds(1))),
              (std::vector<std::string>{"1", "3"}));
  }
}

TEST_F(FileStoreTest, DamageInTheMiddleIsNamed) {
  make_file_store(path)->set("first", "1");
  make_file_store(path)->set("second", "2");
  std::string bytes = contents();
  bytes[kFileStoreMagic.size() + 12] ^= 1;  // in the first record's key
  overwrite(bytes);
  try {
    make_file_store(path)->num_keys();
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), HasSubstr("damaged"));
    EXPECT_THAT(error.what(), HasSubstr(path));
  }
}

TEST_F(FileStoreTest, ARemovedFileIsNoticed) {
  const auto store = make_file_store(path);
  store->set("k", "v");
  ::unlink(path.c_str());
  EXPECT_THROW(store->get("other", Deadline::after(seconds(20))), SystemError);
}

TEST_F(FileStoreTest, ProcessesShareIt) {
  constexpr int kProcesses = 4;
  constexpr int kAdds = 100;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();  // no threads are running here
    if (child == 0) {
      try {
        const auto store = make_file_store(path);
        for (int n = 0; n < kAdds; ++n) store->add("count", 1);
        if (store->add("done", 1) == kProcesses) store->set("all", "");
        store->get("all", Deadline::after(seconds(60)));
        ::_exit(store->add("count", 0) == kProcesses * kAdds ? 0 : 1);
      } catch (...) {
        ::_exit(2);
      }
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace maniple
