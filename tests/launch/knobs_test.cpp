// MANIPLE_ variables in the environment of `maniple run`: wrong values end it before anything is started, unknown names
// are spoken of once.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <string>

#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

using harness::TemporaryDirectory;

int count(const std::string& text, const std::string& part) {
  int times = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
  return times;
}

TEST(RunKnobs, AWrongValueEndsItBeforeAnythingIsStarted) {
  const TemporaryDirectory folder;
  const std::string trace = folder.path() + "/started";
  const Result result = maniple({"run", "-n", "2", "touch", trace}, {.env = {{"MANIPLE_TCP_STREAMS", "17"}}});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err, "maniple: MANIPLE_TCP_STREAMS is \"17\"; expected a whole number from 1 to 16\n");
  EXPECT_NE(::access(trace.c_str(), F_OK), 0);
}

TEST(RunKnobs, SeveralAreNamedInOneLine) {
  const Result result =
      maniple({"run", "-n", "2", "--env", "MANIPLE_STAGE_KIB=8", "--env", "MANIPLE_ALGORITHM=magic", "true"},
              {.env = {{"MANIPLE_CHECKS", "yes"}, {"MANIPLE_INTERFACE", "nope9"}, {"MANIPLE_LOG", "a\nb"}}});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  for (const char* part : {"MANIPLE_LOG is \"a\\x0ab\"; expected one of", "MANIPLE_CHECKS is \"yes\"; expected 0 or 1",
                           "MANIPLE_STAGE_KIB is \"8\"; expected 0 or a whole number from 16",
                           "MANIPLE_ALGORITHM is \"magic\"", "MANIPLE_INTERFACE is \"nope9\""}) {
    EXPECT_NE(result.err.find(part), std::string::npos) << part << " is missing: " << result.err;
  }
}

// What the workers get counts, not what the launcher has.
TEST(RunKnobs, AnOptionReplacesAWrongValue) {
  const Result result =
      maniple({"run", "-n", "2", "--env", "MANIPLE_TCP_STREAMS=4", "sh", "-c", "echo $MANIPLE_TCP_STREAMS"},
              {.env = {{"MANIPLE_TCP_STREAMS", "17"}}});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "] 4\n"), 2) << result.out;
  EXPECT_EQ(maniple({"run", "--env", "MANIPLE_TCP_STREAMS=", "true"}, {.env = {{"MANIPLE_TCP_STREAMS", "17"}}}).code, 0)
      << "an empty one counts as unset";
}

TEST(RunKnobs, OtherHostsAreNotCalledEither) {
  const TemporaryDirectory folder;
  const std::string trace = folder.path() + "/called";
  const Result result = maniple({"run", "--hosts", "host.invalid:2", "--rsh", "touch " + trace, "true"},
                                {.env = {{"MANIPLE_HEARTBEAT", "2,5"}, {"MANIPLE_TCP_CONGESTION", "of another host"}}});
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.err, "maniple: MANIPLE_HEARTBEAT is \"2,5\"; expected a number from 0 to 1000000\n")
      << "what only that host knows is left to it";
  EXPECT_NE(::access(trace.c_str(), F_OK), 0);
}

TEST(RunKnobs, UnknownNamesAreSpokenOfOnce) {
  const Result result = maniple({"run", "-n", "4", "--env", "MANIPLE_STAGE_KB=1", worker_program(), "join"},
                                {.env = {{"MANIPLE_HEARTBEATS", "1"}, {"MANIPLE_FROBNICATE", "1"}}});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err,
            "maniple: warning: MANIPLE_FROBNICATE is not known. "
            "MANIPLE_HEARTBEATS is not known; did you mean MANIPLE_HEARTBEAT? "
            "MANIPLE_STAGE_KB is not known; did you mean MANIPLE_STAGE_KIB? `maniple knobs` lists what can be set\n");
}

TEST(RunKnobs, UnknownNamesAreNoMatterForThoseWhoWantSilence) {
  const Result result = maniple({"run", "-n", "2", worker_program(), "join"},
                                {.env = {{"MANIPLE_FROBNICATE", "1"}, {"MANIPLE_LOG", "error"}}});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
}

// The launcher did not see it: the first rank of the host speaks, and only that.
TEST(RunKnobs, WithoutALauncherThatKnowsTheFirstRankSpeaks) {
  const Result result =
      maniple({"run", "-n", "4", "sh", "-c", "MANIPLE_HEARTBEATS=1 exec \"$0\" join", worker_program()});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.err, "MANIPLE_HEARTBEATS is not known"), 1) << result.err;
  EXPECT_NE(
      result.err.find("[rank 0] maniple: warning: MANIPLE_HEARTBEATS is not known; did you mean MANIPLE_HEARTBEAT?"),
      std::string::npos)
      << result.err;
}

}  // namespace
}  // namespace maniple::launched
