// Event files, read back by a reader of the test's own: frames, checksums (bit by bit) and protocol buffers.
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/summary/event.h"
#include <maniple/dist.h>
#include <maniple/train/summary_writer.h>

namespace maniple::harness::summary_writer_test {
namespace {

std::uint32_t crc_bit_by_bit(std::string_view bytes) {
  std::uint32_t crc = 0xffffffffu;
  for (const char byte : bytes) {
    crc ^= static_cast<std::uint8_t>(byte);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

template <class T>
T little_endian(std::string_view bytes) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<T>(static_cast<std::uint8_t>(bytes.at(i))) << (8 * i);
  return value;
}

bool check_fits(std::string_view check, std::string_view bytes) {
  const std::uint32_t crc = crc_bit_by_bit(bytes);
  return little_endian<std::uint32_t>(check) == (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/// The events of a file; what is wrong with it is a failure of the test.
std::vector<std::string> events_of(const std::string& path) {
  std::vector<std::string> events;
  const std::string file = file_text(path);
  std::string_view rest = file;
  while (!rest.empty()) {
    if (rest.size() < 16) {
      ADD_FAILURE() << rest.size() << " bytes are not a record";
      break;
    }
    const auto length = little_endian<std::uint64_t>(rest);
    EXPECT_TRUE(check_fits(rest.substr(8, 4), rest.substr(0, 8)));
    if (length > rest.size() - 16) {
      ADD_FAILURE() << "a record of " << length << " bytes, " << rest.size() << " are left";
      break;
    }
    events.emplace_back(rest.substr(12, length));
    EXPECT_TRUE(check_fits(rest.substr(12 + length, 4), rest.substr(12, length)));
    rest.remove_prefix(16 + length);
  }
  return events;
}

/// A message of protocol buffers: number of the field -> its bytes (numbers as 8 of them), the last one if it is
/// repeated.
using Fields = std::map<unsigned, std::string>;

std::uint64_t varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<std::uint8_t>(bytes.at(0));
    bytes.remove_prefix(1);
    value |= std::uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
}

Fields fields_of(std::string_view message) {
  Fields fields;
  while (!message.empty()) {
    const std::uint64_t key = varint(message);
    std::string& value = fields[static_cast<unsigned>(key >> 3)];
    std::size_t length = 0;
    switch (key & 7) {
      case 0: {
        const std::uint64_t number = varint(message);
        value.assign(reinterpret_cast<const char*>(&number), 8);
        continue;
      }
      case 1: length = 8; break;
      case 2: length = varint(message); break;
      case 5: length = 4; break;
      default: ADD_FAILURE() << "wire type " << (key & 7); return fields;
    }
    EXPECT_LE(length, message.size());
    value = message.substr(0, length);
    message.remove_prefix(std::min(length, message.size()));
  }
  return fields;
}

template <class T>
T as(const std::string& bytes) {
  T value;
  EXPECT_EQ(bytes.size(), sizeof(T));
  std::memcpy(&value, bytes.data(), std::min(sizeof(T), bytes.size()));
  return value;
}

struct Scalar {
  std::string tag;
  float value;
  std::int64_t step;
  bool operator==(const Scalar&) const = default;
};

Scalar scalar_of(const std::string& event) {
  Fields fields = fields_of(event);
  Fields value = fields_of(fields_of(fields[5])[1]);
  return {value[1], as<float>(value[2]), as<std::int64_t>(fields[2])};
}

TEST(SummaryWriter, BytesOfAnEvent) {
  std::string hex;
  for (const char byte : record_of(scalar_event({1.5, 3}, "a", 2.0F)))
    hex += format_text("{:02x}", static_cast<std::uint8_t>(byte));
  EXPECT_EQ(hex,
            "1700000000000000"  // length
            "e7cef81e"          // its check
            "09000000000000f83f"
            "1003"  // wall_time 1.5, step 3
            "2a0a"
            "0a08"
            "0a0161"
            "1500000040"  // summary, value, tag "a", simple_value 2
            "e81c3a9d");
}

TEST(SummaryWriter, AFileThatCanBeReadAtAnyTime) {
  const TemporaryDirectory folder;
  const std::string runs = folder.path() + "/runs/deep/x";
  SummaryWriter writer(runs);
  EXPECT_EQ(writer.log_dir(), runs);
  EXPECT_EQ(writer.path().rfind(runs + "/events.out.tfevents.", 0), 0u) << writer.path();
  EXPECT_NE(writer.path().find(format_text(".{}.", ::getpid())), std::string::npos) << writer.path();
  auto events = events_of(writer.path());
  ASSERT_EQ(events.size(), 1u);
  Fields first = fields_of(events[0]);
  EXPECT_EQ(first[3], "brain.Event:2");
  EXPECT_NEAR(as<double>(first[1]), static_cast<double>(::time(nullptr)), 60);

  writer.add_scalar("train/loss", 0.25, 1);
  EXPECT_EQ(scalar_of(events_of(writer.path()).at(1)), (Scalar{"train/loss", 0.25F, 1})) << "at once";
  writer.add_scalar("train/loss", -1e30, std::int64_t{1} << 40, 12.5);
  writer.add_scalar("gr\u00f6\u00dfe\xff", 3, -1);
  writer.add_scalar("nan", std::nan(""), 2);
  writer.add_scalar("inf", INFINITY, 2);
  writer.add_scalar("much", 1e300, 2);
  writer.add_scalar(std::string(300, 'x'), 1, 0);
  events = events_of(writer.path());
  ASSERT_EQ(events.size(), 8u);
  EXPECT_EQ(scalar_of(events[2]), (Scalar{"train/loss", -1e30F, std::int64_t{1} << 40}));
  EXPECT_EQ(as<double>(fields_of(events[2])[1]), 12.5);
  EXPECT_EQ(scalar_of(events[3]), (Scalar{"gr\u00f6\u00dfe?", 3, -1})) << "valid UTF-8, whatever was given";
  EXPECT_TRUE(std::isnan(scalar_of(events[4]).value));
  EXPECT_EQ(scalar_of(events[5]).value, INFINITY);
  EXPECT_EQ(scalar_of(events[6]).value, INFINITY);
  EXPECT_EQ(scalar_of(events[7]).tag, std::string(300, 'x'));
  EXPECT_THROW(writer.add_scalar("", 1, 1), InvalidArgument);
  EXPECT_EQ(writer.last_error(), "");

  writer.close();
  EXPECT_FALSE(writer.is_open());
  writer.add_scalar("late", 1, 1);
  EXPECT_EQ(events_of(writer.path()).size(), 8u);
  SummaryWriter again(runs, {.purge_step = 7, .filename_suffix = ".resumed"});
  EXPECT_NE(again.path(), writer.path()) << "in the same second too";
  EXPECT_TRUE(again.path().ends_with(".resumed"));
  events = events_of(again.path());
  ASSERT_EQ(events.size(), 2u);
  Fields restart = fields_of(events[1]);
  EXPECT_EQ(as<std::int64_t>(restart[2]), 7);
  EXPECT_EQ(as<std::int64_t>(fields_of(restart[7])[1]), 1) << "SessionLog START";
}

TEST(SummaryWriter, Texts) {
  const TemporaryDirectory folder;
  SummaryWriter writer(folder.path());
  writer.add_text("arguments", "lr **0.1**", 4);
  const auto events = events_of(writer.path());
  ASSERT_EQ(events.size(), 2u);
  Fields value = fields_of(fields_of(fields_of(events[1])[5])[1]);
  EXPECT_EQ(value[1], "arguments/text_summary");
  Fields tensor = fields_of(value[8]);
  EXPECT_EQ(as<std::int64_t>(tensor[1]), 7) << "DT_STRING";
  EXPECT_EQ(tensor[8], "lr **0.1**");
  EXPECT_EQ(as<std::int64_t>(fields_of(fields_of(tensor[2])[2])[1]), 1) << "one element";
  EXPECT_EQ(fields_of(fields_of(value[9])[1])[1], "text") << "the plug-in";
}

/// No file of this process may become longer, until the end of the scope: what a full disk looks like.
class FullDisk {
 public:
  explicit FullDisk(std::size_t longest) : before_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit now = {longest, limit_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, before_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit limit_;
  void (*before_)(int);
};

TEST(SummaryWriter, AFullDiskCostsEventsAndOneWarning) {
  const TemporaryDirectory folder;
  SummaryWriter writer(folder.path());
  writer.add_text("long", std::string(5000, 'x'), 1);  // the warning, captured in a file too, must fit below the limit
  const std::size_t size = file_text(writer.path()).size();
  testing::internal::CaptureStderr();
  {
    const FullDisk full(size + 10);  // ten bytes fit: half a record, which must go again
    for (int i = 2; i < 5; ++i) writer.add_scalar("x", i, i);
  }
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_EQ(printed.find("SummaryWriter: cannot write to " + writer.path()), printed.find("SummaryWriter:")) << printed;
  EXPECT_EQ(printed.find("SummaryWriter:"), printed.rfind("SummaryWriter:")) << "once: " << printed;
  EXPECT_NE(writer.last_error(), "");
  EXPECT_EQ(events_of(writer.path()).size(), 2u);
  writer.add_scalar("x", 5, 5);
  EXPECT_EQ(writer.last_error(), "");
  const auto events = events_of(writer.path());
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(scalar_of(events[2]), (Scalar{"x", 5, 5}));
}

TEST(SummaryWriter, AFileThatBeganOnAFullDiskBeginsRightLater) {
  const TemporaryDirectory folder;
  testing::internal::CaptureStderr();
  auto full = std::make_unique<FullDisk>(5);
  SummaryWriter writer(folder.path());
  writer.add_scalar("x", 1, 1);
  full.reset();
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(file_text(writer.path()), "");
  writer.add_scalar("x", 2, 2);
  const auto events = events_of(writer.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(fields_of(events[0])[3], "brain.Event:2");
}

TEST(SummaryWriter, WrongFolders) {
  const TemporaryDirectory folder;
  std::ofstream(folder.path() + "/file") << "x";
  EXPECT_THROW(SummaryWriter(folder.path() + "/file/x"), SystemError);
  EXPECT_THROW(SummaryWriter(folder.path() + "/file"), SystemError);
  EXPECT_THROW(SummaryWriter(""), InvalidArgument);
  EXPECT_THROW(SummaryWriter(folder.path(), {.filename_suffix = "a/b"}), InvalidArgument);
}

TEST(SummaryWriter, AKilledProcessLeavesAWholeFile) {
  const TemporaryDirectory folder;
  const pid_t child = ::fork();
  if (child == 0) {
    SummaryWriter writer(folder.path() + "/run");
    for (std::int64_t i = 0;; ++i) writer.add_scalar("loss", static_cast<double>(i), i);
  }
  const auto path = [&] {
    const auto names = names_in(folder.path() + "/run");
    return names.empty() ? "" : folder.path() + "/run/" + names.front();
  };
  while (file_text(path()).size() < 100000) std::this_thread::yield();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const auto events = events_of(path());
  EXPECT_GT(events.size(), 1000u);
  EXPECT_EQ(scalar_of(events.back()).step, static_cast<std::int64_t>(events.size()) - 2) << "none is missing";
}

TEST(SummaryWriter, ThreadsDoNotMix) {
  const TemporaryDirectory folder;
  SummaryWriter writer(folder.path());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) writer.add_scalar(std::to_string(t), i, i);
    });
  }
  for (auto& thread : threads) thread.join();
  std::map<std::string, int> counts;
  const auto events = events_of(writer.path());
  for (std::size_t i = 1; i < events.size(); ++i) {
    const Scalar scalar = scalar_of(events[i]);
    EXPECT_EQ(scalar.step, counts[scalar.tag]++) << "in order";
  }
  EXPECT_EQ(counts, (std::map<std::string, int>{{"0", 200}, {"1", 200}, {"2", 200}, {"3", 200}}));
}

TEST(SummaryWriter, OnlyRankZeroWrites) {
  run_ranks({.n = 2, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    SummaryWriter writer(r.dir() + "/one");
    writer.add_scalar("x", r.rank, 1);
    EXPECT_EQ(writer.is_open(), r.rank == 0);
    EXPECT_EQ(writer.path().empty(), r.rank != 0);
    SummaryWriter each(r.dir() + "/all", {.only_rank_0 = false});
    each.add_scalar("x", r.rank, 1);
    barrier();
    EXPECT_EQ(names_in(r.dir() + "/one").size(), 1u);
    EXPECT_EQ(names_in(r.dir() + "/all").size(), 2u);
    EXPECT_EQ(scalar_of(events_of(each.path()).at(1)).value, static_cast<float>(r.rank));
    barrier();
    destroy_process_group();
  });
}

}  // namespace
}  // namespace maniple::harness::summary_writer_test
