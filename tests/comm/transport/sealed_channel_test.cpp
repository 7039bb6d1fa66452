#include "comm/transport/sealed_channel.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

/// A stream in memory that takes and gives as many bytes at a time as requested.
struct Pipe {
  std::string bytes = {};
  std::size_t room = 0;       // that may be written now
  std::size_t available = 0;  // that may be read now
};

class PipeSink final : public ByteSink {
 public:
  explicit PipeSink(Pipe& pipe) : pipe_(pipe) {}
  std::size_t write_some(std::span<const iovec> parts) override {
    std::size_t moved = 0;
    for (const iovec& part : parts) {
      const std::size_t step = std::min(part.iov_len, pipe_.room);
      pipe_.bytes.append(static_cast<const char*>(part.iov_base), step);
      pipe_.room -= step;
      moved += step;
    }
    return moved;
  }
  int fd() const noexcept override { return 7; }

 private:
  Pipe& pipe_;
};

class PipeSource final : public ByteSource {
 public:
  explicit PipeSource(Pipe& pipe) : pipe_(pipe) {}
  std::size_t read_some(std::span<const iovec> parts) override {
    std::size_t moved = 0;
    for (const iovec& part : parts) {
      const std::size_t step = std::min({part.iov_len, pipe_.available, pipe_.bytes.size()});
      std::memcpy(part.iov_base, pipe_.bytes.data(), step);
      pipe_.bytes.erase(0, step);
      pipe_.available -= step;
      moved += step;
    }
    return moved;
  }
  int fd() const noexcept override { return 7; }

 private:
  Pipe& pipe_;
};

struct Ends {
  explicit Ends(Pipe& pipe)
      : sink(make_sealed_sink(std::make_unique<PipeSink>(pipe),
                              derive_keys(preferred_cipher(), TrafficSecret{}, "t", true))),
        source(make_sealed_source(std::make_unique<PipeSource>(pipe),
                                  derive_keys(preferred_cipher(), TrafficSecret{}, "t", false))) {}
  std::size_t write(std::string_view bytes) const {
    const std::size_t half = bytes.size() / 2;
    const iovec parts[2] = {{const_cast<char*>(bytes.data()), half},
                            {const_cast<char*>(bytes.data()) + half, bytes.size() - half}};
    return sink->write_some(parts);
  }
  std::string read(std::size_t most) const {
    std::string bytes(most, '\0');
    const std::size_t half = most / 3;
    const iovec parts[2] = {{bytes.data(), half}, {bytes.data() + half, most - half}};
    bytes.resize(source->read_some(parts));
    return bytes;
  }
  std::unique_ptr<ByteSink> sink;
  std::unique_ptr<ByteSource> source;
};

TEST(SealedChannel, CarriesAllBytesThroughBuffersOfAnySize) {
  std::minstd_rand random(7);
  Pipe pipe;
  const Ends ends(pipe);
  EXPECT_TRUE(ends.sink->authenticates());
  std::string sent;
  std::string received;
  for (int message = 0; message < 60; ++message) {
    std::string bytes(1 + random() % (message % 10 == 0 ? 700'000 : 3000), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    std::string_view left = bytes;
    while (!left.empty()) {
      pipe.room = random() % 3 == 0 ? 0 : random() % 200'000;
      const std::size_t taken = ends.write(left);
      ASSERT_LE(taken, left.size());
      left.remove_prefix(taken);
      pipe.available = random() % 3 == 0 ? 0 : random() % 200'000;
      received += ends.read(1 + random() % 100'000);
    }
    sent += bytes;
    ASSERT_TRUE(sent.starts_with(received));
  }
  pipe.available = pipe.bytes.size();
  for (std::string more = "."; !more.empty() || ends.source->holds_bytes(); received += more) more = ends.read(1 << 20);
  EXPECT_TRUE(received == sent);
  EXPECT_FALSE(ends.source->holds_bytes());
}

TEST(SealedChannel, TheLastByteCountsWhenAllHasLeft) {
  Pipe pipe;
  const Ends ends(pipe);
  EXPECT_EQ(ends.write("hello"), 4u) << "taken, but not sent";
  pipe.room = 10;
  EXPECT_EQ(ends.write("o"), 0u);
  pipe.room = 1000;
  EXPECT_EQ(ends.write("o"), 1u);
  EXPECT_EQ(pipe.bytes.size(), 5 + kRecordOverhead);
  pipe.available = 1000;
  EXPECT_EQ(ends.read(3), "hel");
  EXPECT_TRUE(ends.source->holds_bytes()) << "although no descriptor is readable";
  EXPECT_EQ(ends.read(3), "lo");
  EXPECT_FALSE(ends.source->holds_bytes());
}

TEST(SealedChannel, NothingOfARecordThatIsNotAuthenticIsHandedOut) {
  const auto written = [] {
    Pipe pipe{.room = 1 << 20};
    const Ends ends(pipe);
    EXPECT_EQ(ends.write("first"), 5u);
    EXPECT_EQ(ends.write("second"), 6u);
    return pipe.bytes;
  };
  const std::string good = written();
  const std::size_t first = 5 + kRecordOverhead;
  const auto opened = [](std::string bytes) {
    Pipe pipe{.bytes = std::move(bytes), .available = 1 << 20};
    const Ends ends(pipe);
    std::string plain;
    try {
      for (std::string more = "."; !more.empty();) plain += more = ends.read(100);
      return plain + " (no error)";
    } catch (const ProtocolError&) {
      EXPECT_THROW(ends.read(100), ProtocolError);
      return plain;
    }
  };
  EXPECT_EQ(opened(good), "firstsecond (no error)");
  for (std::size_t i = kRecordHeaderBytes; i < good.size(); ++i) {
    std::string changed = good;
    changed[i] = static_cast<char>(changed[i] ^ 4);
    const std::string plain = opened(changed);
    EXPECT_TRUE(plain == "" || plain == "first" || plain == "first (no error)") << i << ": " << plain;
  }
  EXPECT_EQ(opened(good.substr(first)), "") << "one left out";
  const std::string repeated = opened(good.substr(0, first) + good.substr(0, first));
  EXPECT_TRUE(repeated.empty() || repeated == "first") << repeated;
  EXPECT_EQ(opened(good.substr(first) + good.substr(0, first)), "") << "exchanged";
}

}  // namespace
}  // namespace maniple
