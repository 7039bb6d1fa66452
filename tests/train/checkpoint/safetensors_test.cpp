// The format and the folder, without a training run: what is written comes back, what is broken is named.
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include <gtest/gtest.h>

#include "comm/base/files.h"
#include "harness/temporary_directory.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/named_state.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/checkpoint/safetensors.h"
#include <maniple/comm/error.h>

namespace maniple::safetensors_test {
namespace {

using harness::TemporaryDirectory;

std::string prefixed(const std::string& header) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes + header;
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string trouble_with(const std::string& header, std::uint64_t data_bytes) {
  try {
    parse_safetensors(header, data_bytes);
  } catch (const ProtocolError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Safetensors, ReadsWhatOtherToolsWrite) {
  // The example of the format's own description, byte for byte.
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/x.safetensors";
  const float values[] = {1.5f, -2.0f};
  std::string bytes =
      prefixed(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})");
  bytes.append(reinterpret_cast<const char*>(values), sizeof values);
  write_file(path, bytes);
  const NamedState state = read_state(path);
  EXPECT_EQ(state.texts.at("format"), "pt");
  EXPECT_TRUE(state.tensors.at("b").equal(torch::tensor({{1.5f, -2.0f}})));
}

TEST(Safetensors, EveryDtypeAndShapeComesBack) {
  const TemporaryDirectory folder;
  NamedState state;
  for (const auto type : {torch::kBool, torch::kUInt8, torch::kInt8, torch::kInt16, torch::kInt32, torch::kInt64,
                          torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
    const std::string name = toString(type);
    state.tensors[name] = torch::arange(12).to(type).view({3, 4});
    state.tensors[name + ".strided"] = torch::arange(12).to(type).view({3, 4}).t();
    state.tensors[name + ".scalar"] = torch::ones({}, type);
    state.tensors[name + ".empty"] = torch::ones({2, 0, 3}, type);
  }
  state.texts = {{"a \"quoted\" name", "line\nbreak"}, {"number", text_of(0.1)}};
  const std::string path = folder.path() + "/x.safetensors";
  const FileDigest digest = write_state(path, snapshot_of(state));
  EXPECT_EQ(digest, digest_of(RegularFile(path)));
  const NamedState again = read_state(path);
  EXPECT_EQ(again.texts, state.texts);
  EXPECT_EQ(real_of(again.texts.at("number")), 0.1) << "exactly";
  ASSERT_EQ(again.tensors.size(), state.tensors.size());
  for (const auto& [name, tensor] : state.tensors) {
    EXPECT_EQ(again.tensors.at(name).dtype(), tensor.dtype()) << name;
    EXPECT_TRUE(again.tensors.at(name).equal(tensor)) << name;
  }
}

TEST(Safetensors, HostileHeadersAreNamed) {
  const auto entry = [](const std::string& text) { return R"({"t":)" + text + "}"; };
  const struct {
    std::string header;
    std::uint64_t data;
    const char* says;
  } cases[] = {
      {"", 0, "begin with"},
      {"[]", 0, "begin with"},
      {"{", 0, "JSON"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} x)", 4, "JSON"},
      {"{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0, "nested"},
      {entry("1"), 0, "not an object"},
      {entry(R"({"dtype":"F32","shape":[1]})"), 4, "needs dtype, shape and data_offsets"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"code":"x"})"), 4, "unknown field"},
      {entry(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"), 4, "unknown dtype"},
      {entry(R"({"dtype":7,"shape":[1],"data_offsets":[0,4]})"), 4, "dtype is not text"},
      {entry(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), 4, "extent"},
      {entry(R"({"dtype":"F32","shape":[1.5],"data_offsets":[0,4]})"), 4, "extent"},
      {entry(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), 0, "larger than any file"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]})"), 4, "make 4 bytes"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[8,4]})"), 8, "before it begins"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})"), 8, "not two numbers"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":["0",4]})"), 4, "not a whole number"},
      {entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"), 4, "truncated"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), 8, "belong to no tensor"},
      {entry(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), 8, "belong to none"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       12, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "twice"},
      {R"({"__metadata__":{"a":1}})", 0, "is not text"},
      {R"({"__metadata__":[]})", 0, "not an object"},
  };
  for (const auto& [header, data, says] : cases) {
    EXPECT_NE(trouble_with(header, data).find(says), std::string::npos)
        << header.substr(0, 120) << "\n -> " << trouble_with(header, data);
  }
  EXPECT_EQ(trouble_with("{}   ", 0), "accepted") << "padding, and no tensor at all";
}

TEST(Safetensors, LengthsAreBoundedBeforeAnythingIsAllocated) {
  const auto length = [](std::uint64_t claimed, std::uint64_t file) {
    std::string prefix;
    for (int i = 0; i < 8; ++i) prefix += static_cast<char>(claimed >> (8 * i));
    return safetensors_header_bytes(prefix, file);
  };
  EXPECT_EQ(length(2, 10), 2u);
  EXPECT_THROW(length(3, 10), ProtocolError);
  EXPECT_THROW(length(~std::uint64_t{0}, 10), ProtocolError);
  EXPECT_THROW(length(kMaxSafetensorsHeaderBytes + 1, ~std::uint64_t{0}), ProtocolError);
  EXPECT_THROW(safetensors_header_bytes("1234567", 7), ProtocolError);
}

TEST(Safetensors, WhatCannotBeSavedIsRefused) {
  const TemporaryDirectory folder;
  NamedState state;
  state.tensors["z"] = torch::zeros({2}, torch::kComplexFloat);
  EXPECT_THROW(write_state(folder.path() + "/x", state), InvalidArgument);
  state.tensors = {{"__metadata__", torch::zeros({1})}};
  EXPECT_THROW(write_state(folder.path() + "/y", state), InvalidArgument);
}

TEST(CheckpointFolder, InconsistentManifestsAreRefused) {
  const std::string hash(64, 'a');
  EXPECT_EQ(
      parse_manifest(encode({.step = 7, .files = {{"m.safetensors", {3, hash}}}})).files.at("m.safetensors").bytes, 3u);
  for (const std::string& text : {
           std::string("{"),
           std::string("[]"),
           std::string(R"({"format":"other","step":1,"files":{}})"),
           std::string(R"({"format":"maniple-checkpoint-1","step":-1,"files":{}})"),
           std::string(R"({"format":"maniple-checkpoint-1","step":1})"),
           R"({"format":"maniple-checkpoint-1","step":1,"files":{"../../etc/passwd":{"bytes":1,"sha256":")" + hash +
               "\"}}}",
           std::string(R"({"format":"maniple-checkpoint-1","step":1,"files":{"a":{"bytes":1,"sha256":"b"}}})"),
           std::string(R"({"format":"maniple-checkpoint-1","step":1,"files":{"a":7}})"),
       }) {
    EXPECT_THROW(parse_manifest(text), ProtocolError) << text;
  }
}

// ---- Killed while saving --------------------------------------------------------------------------------------------

void save_parts(const std::string& folder, std::int64_t step, int keep = 2, int parts = 12) {
  PendingCheckpoint pending(folder, step);
  for (int part = 0; part < parts; ++part) {
    NamedState state;
    state.tensors["x"] = torch::full({100}, static_cast<double>(step));
    const std::string file = "part" + std::to_string(part) + ".safetensors";
    pending.add(file, write_state(pending.path_of(file), state));
  }
  pending.commit();
  prune_checkpoints(folder, keep, step);
}

/// Saves `step` in a child that is killed at its n-th stop at the border of the kernel. True if it was done before.
bool killed_at(int stop, const std::string& folder, std::int64_t step, int keep = 2, int parts = 12) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    save_parts(folder, step, keep, parts);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSTOPPED(status));
  for (int i = 0; i < stop; ++i) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) return true;
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return false;
}

TEST(CheckpointFolder, KilledAtAnyMomentTheNewestCompleteOneLoads) {  // faults 21
  // In memory where that can be had: a disk syncs for minutes here.
  const TemporaryDirectory folder(::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : temporary_folder());
  save_parts(folder.path(), 1);
  std::int64_t newest = 1;
  int kills = 0;
  for (int stop = 1;; ++stop) {
    const std::int64_t step = newest + 1;
    const bool done = killed_at(stop, folder.path(), step);
    const auto steps = list_checkpoints(folder.path());
    ASSERT_FALSE(steps.empty()) << "killed at stop " << stop;
    ASSERT_TRUE(steps.front() == newest || steps.front() == step) << steps.front();
    for (const std::int64_t found : steps)
      ASSERT_NO_THROW(verify_checkpoint(folder.path(), found)) << "killed at stop " << stop;
    const auto state = read_state(folder.path() + "/" + checkpoint_name(steps.front()) + "/part11.safetensors");
    ASSERT_TRUE(state.tensors.at("x").equal(torch::full({100}, static_cast<double>(steps.front()))));
    newest = steps.front();
    if (done) break;
    ++kills;
  }
  EXPECT_GE(kills, 200);
  save_parts(folder.path(), newest + 1);  // and what the dead left behind is cleared away
  int entries = 0;
  for (const std::int64_t step : list_checkpoints(folder.path())) entries += step > 0 ? 1 : 0;
  EXPECT_EQ(entries, 2);
  EXPECT_EQ(::system(("test $(ls -A " + folder.path() + " | wc -l) -eq 2").c_str()), 0)
      << "only the two checkpoints are left";
}

TEST(CheckpointFolder, KilledWhileItReplacesTheOnlyOneOfTheTwoLoads) {
  const TemporaryDirectory folder(::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : temporary_folder());
  save_parts(folder.path(), 1, 1, 2);
  for (int stop = 1;; ++stop) {
    const bool done = killed_at(stop, folder.path(), 1, 1, 2);
    restore_replaced(folder.path());
    ASSERT_EQ(list_checkpoints(folder.path()), std::vector<std::int64_t>{1}) << "killed at stop " << stop;
    ASSERT_NO_THROW(verify_checkpoint(folder.path(), 1)) << "killed at stop " << stop;
    if (done) break;
  }
  EXPECT_EQ(names_in(folder.path()).size(), 1u) << "what the dead left behind is cleared away";
}

}  // namespace
}  // namespace maniple::safetensors_test
