#include "comm/rendezvous/secret_source.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <gmock/gmock.h>

#include "comm/base/unique_fd.h"
#include "comm/rendezvous/clean_environment.h"
#include "comm/shm/sleeper.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using testing::HasSubstr;

class SecretSource : public CleanEnvironment {
 protected:
  void SetUp() override {
    char name[] = "/tmp/maniple-secret-XXXXXX";
    fd.reset(::mkstemp(name));
    path = name;
  }
  void TearDown() override { ::unlink(path.c_str()); }
  void write(std::string_view text) {
    ASSERT_EQ(::ftruncate(fd.get(), 0), 0);
    ASSERT_EQ(::pwrite(fd.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  }
  static std::string complaint() {
    try {
      secret_from_environment();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  }
  UniqueFd fd;
  std::string path;
};

TEST_F(SecretSource, HexAndRaw) {
  const Secret secret = Secret::random();
  EXPECT_EQ(parse_secret(hex_of(secret))->bytes, secret.bytes);
  EXPECT_EQ(parse_secret(hex_of(secret) + "\n")->bytes, secret.bytes);
  const std::string raw(secret.bytes.begin(), secret.bytes.end());
  EXPECT_EQ(parse_secret(raw)->bytes, secret.bytes);
  EXPECT_FALSE(parse_secret("").has_value());
  EXPECT_FALSE(parse_secret(std::string(64, 'g')).has_value());
  EXPECT_FALSE(parse_secret(std::string(64, '0')).has_value());
  EXPECT_FALSE(parse_secret(hex_of(secret) + "0").has_value());
}

TEST_F(SecretSource, NoneWithoutVariables) { EXPECT_FALSE(secret_from_environment().has_value()); }

TEST_F(SecretSource, FromAFile) {
  const Secret secret = Secret::random();
  write(hex_of(secret));
  set("MANIPLE_SECRET_FILE", path.c_str());
  EXPECT_EQ(secret_from_environment()->bytes, secret.bytes);
  ::chmod(path.c_str(), 0640);
  EXPECT_THAT(complaint(), testing::AllOf(HasSubstr("MANIPLE_SECRET_FILE"), HasSubstr(path), HasSubstr("640")));
  ::chmod(path.c_str(), 0600);
  write("short");
  EXPECT_THAT(complaint(), HasSubstr("5 bytes"));
  EXPECT_THAT(complaint(), testing::Not(HasSubstr("short")));
  set("MANIPLE_SECRET_FILE", "/no/such/file");
  EXPECT_THAT(complaint(), HasSubstr("/no/such/file"));
}

TEST_F(SecretSource, FromADescriptorAnyNumberOfTimes) {
  const Secret secret = Secret::random();
  write(hex_of(secret));
  set("MANIPLE_SECRET_FD", std::to_string(fd.get()).c_str());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(secret_from_environment()->bytes, secret.bytes);

  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string hex = hex_of(Secret::random());
  ASSERT_EQ(::write(ends[1], hex.data(), hex.size()), static_cast<ssize_t>(hex.size()));
  ::close(ends[1]);
  set("MANIPLE_SECRET_FD", std::to_string(ends[0]).c_str());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(hex_of(*secret_from_environment()), hex);
  ::close(ends[0]);
}

/// The read end has this number: what came from a pipe is known by the number as long as the process lives.
struct PipeAt {
  explicit PipeAt(int number) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe(ends), 0);
    EXPECT_EQ(::dup2(ends[0], number), number);
    ::close(ends[0]);
    out.reset(number);
    in.reset(ends[1]);
  }
  void put(const std::string& text) {
    EXPECT_EQ(::write(in.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    in.reset();
  }
  UniqueFd out, in;
};

/// Whether a child of this process gets this secret.
bool child_gets(const std::string& hex) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // a hang ends by a signal, which the parent sees
    ::_exit(hex_of(*secret_from_environment()) == hex ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The child reads another descriptor: nothing is to be had from the one that the parent reads.
TEST_F(SecretSource, AChildDoesNotWaitForAThreadOfItsParentThatReads) {
  PipeAt pipe(100);
  set("MANIPLE_SECRET_FD", "100");
  std::string read;
  Sleeper reader([&read] { read = hex_of(*secret_from_environment()); });
  ASSERT_TRUE(reader.falls_asleep());
  const std::string hex = hex_of(Secret::random());
  write(hex);
  set("MANIPLE_SECRET_FD", std::to_string(fd.get()).c_str());
  EXPECT_TRUE(child_gets(hex));
  pipe.put(hex);
  reader.join();
  EXPECT_EQ(read, hex);
}

TEST_F(SecretSource, AChildKnowsWhatItsParentReadFromAPipe) {
  PipeAt pipe(101);
  const std::string hex = hex_of(Secret::random());
  pipe.put(hex);
  set("MANIPLE_SECRET_FD", "101");
  EXPECT_EQ(hex_of(*secret_from_environment()), hex);
  EXPECT_TRUE(child_gets(hex));
}

TEST_F(SecretSource, AnEmptyVariableIsNotTakenForNone) {
  set("MANIPLE_SECRET_FILE", "");
  EXPECT_THAT(complaint(), HasSubstr("MANIPLE_SECRET_FILE is set, but empty"));
  set("MANIPLE_SECRET_FILE", nullptr);
  set("MANIPLE_SECRET_FD", "");
  EXPECT_THAT(complaint(), HasSubstr("MANIPLE_SECRET_FD is set, but empty"));
}

TEST_F(SecretSource, FileAndDescriptorTogetherAreRefused) {
  set("MANIPLE_SECRET_FD", "5");
  set("MANIPLE_SECRET_FILE", path.c_str());
  EXPECT_THAT(complaint(), HasSubstr("expected one of them"));
  set("MANIPLE_SECRET_FILE", nullptr);
  set("MANIPLE_SECRET_FD", "987654");
  EXPECT_THAT(complaint(), HasSubstr("MANIPLE_SECRET_FD is 987654"));
}

}  // namespace
}  // namespace maniple
