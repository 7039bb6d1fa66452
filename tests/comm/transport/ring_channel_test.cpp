#include "comm/transport/ring_channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

class RingTest : public ::testing::Test {
 protected:
  std::span<std::byte> memory(std::size_t capacity) {
    lines_.assign((ring_bytes(capacity) + 63) / 64, Line{});
    return {lines_.data()->bytes, ring_bytes(capacity)};
  }
  static iovec part(void* data, std::size_t size) { return {data, size}; }

 private:
  std::vector<Line> lines_;
};

TEST_F(RingTest, ZeroedMemoryIsAnEmptyRing) {
  const auto shared = memory(64);
  const auto source = make_ring_source(shared);
  char byte = 0;
  const iovec to = part(&byte, 1);
  EXPECT_EQ(source->read_some({&to, 1}), 0U);
  EXPECT_EQ(source->fd(), -1);
}

TEST_F(RingTest, BytesComeOutInOrderWhateverTheSplit) {
  const auto shared = memory(256);
  std::atomic<int> notified{0};
  std::vector<std::uint8_t> sent(100'000);
  std::iota(sent.begin(), sent.end(), std::uint8_t{0});
  std::vector<std::uint8_t> got(sent.size());
  std::thread writer([&] {
    const auto sink = make_ring_sink(shared, [&] { ++notified; });
    for (std::size_t done = 0, step = 1; done < sent.size(); step = step % 97 + 1) {
      const std::size_t size = std::min(step, sent.size() - done);
      const iovec parts[2] = {part(sent.data() + done, size / 2), part(sent.data() + done + size / 2, size - size / 2)};
      const std::size_t moved = sink->write_some(parts);
      if (moved == 0) std::this_thread::yield();
      done += moved;
    }
  });
  {
    const auto source = make_ring_source(shared, [&] { ++notified; });
    for (std::size_t done = 0, step = 1; done < got.size(); step = step % 61 + 1) {
      const iovec to = part(got.data() + done, std::min(step, got.size() - done));
      const std::size_t moved = source->read_some({&to, 1});
      if (moved == 0) std::this_thread::yield();
      done += moved;
    }
    writer.join();
  }
  EXPECT_EQ(got, sent);
  EXPECT_GT(notified.load(), 0);
}

TEST_F(RingTest, BufferedBytesAreReadBeforeTheEndIsReported) {
  const auto shared = memory(64);
  char out[3] = {'a', 'b', 'c'};
  {
    const auto sink = make_ring_sink(shared);
    const iovec from = part(out, sizeof out);
    ASSERT_EQ(sink->write_some({&from, 1}), 3U);
  }
  const auto source = make_ring_source(shared);
  char in[8] = {};
  const iovec to = part(in, sizeof in);
  ASSERT_EQ(source->read_some({&to, 1}), 3U);
  EXPECT_EQ(std::memcmp(in, out, 3), 0);
  EXPECT_THROW(source->read_some({&to, 1}), SystemError);
}

TEST_F(RingTest, WritingToAReaderThatHasGoneThrows) {
  const auto shared = memory(64);
  const auto sink = make_ring_sink(shared);
  make_ring_source(shared).reset();
  char byte = 0;
  const iovec from = part(&byte, 1);
  EXPECT_THROW(sink->write_some({&from, 1}), SystemError);
}

TEST_F(RingTest, TheWriterIsNotifiedOnlyWhenTheRingWasHalfFull) {
  const auto shared = memory(64);
  int notified = 0;
  const auto sink = make_ring_sink(shared);
  const auto source = make_ring_source(shared, [&] { ++notified; });
  char bytes[64] = {};
  const iovec few = part(bytes, 8);
  ASSERT_EQ(sink->write_some({&few, 1}), 8U);
  ASSERT_EQ(source->read_some({&few, 1}), 8U);
  EXPECT_EQ(notified, 0);
  const iovec many = part(bytes, sizeof bytes);
  for (int strides = 0; strides < 4; ++strides) ASSERT_EQ(sink->write_some({&many, 1}), 16U);
  ASSERT_EQ(sink->write_some({&many, 1}), 0U) << "it is full";
  ASSERT_EQ(source->read_some({&few, 1}), 8U);
  EXPECT_EQ(notified, 1);
  ASSERT_EQ(sink->write_some({&many, 1}), 8U) << "the writer sees what was read";
}

// A writer that sleeps until it is notified, and a reader likewise: neither may miss the other.
TEST_F(RingTest, NeitherSideSleepsWhileItCouldProgress) {
  const auto shared = memory(256);
  std::atomic<std::uint32_t> for_writer{0};
  std::atomic<std::uint32_t> for_reader{0};
  const auto notify = [](std::atomic<std::uint32_t>& count) {
    ++count;
    count.notify_all();
  };
  constexpr std::size_t kBytes = 2'000'000;
  std::thread writer([&] {
    const auto sink = make_ring_sink(shared, [&] { notify(for_reader); });
    std::vector<std::byte> from(1000);
    for (std::size_t done = 0; done < kBytes;) {
      const std::uint32_t seen = for_writer;
      const iovec some = part(from.data(), std::min(done % 300 + 1, kBytes - done));
      const std::size_t moved = sink->write_some({&some, 1});
      if (moved == 0) for_writer.wait(seen);
      done += moved;
    }
  });
  {
    const auto source = make_ring_source(shared, [&] { notify(for_writer); });
    std::vector<std::byte> to(1000);
    for (std::size_t done = 0; done < kBytes;) {
      const std::uint32_t seen = for_reader;
      const iovec some = part(to.data(), done % 170 + 1);
      const std::size_t moved = source->read_some({&some, 1});
      if (moved == 0) for_reader.wait(seen);
      done += moved;
    }
  }
  writer.join();
}

TEST_F(RingTest, ContradictingPositionsAreRefusedNotFollowed) {
  const auto shared = memory(64);
  const auto source = make_ring_source(shared);
  const std::uint64_t nonsense = 1'000'000;  // far more written than the ring can hold
  std::memcpy(shared.data(), &nonsense, sizeof nonsense);
  char byte = 0;
  const iovec to = part(&byte, 1);
  EXPECT_THROW(source->read_some({&to, 1}), ProtocolError);
}

TEST_F(RingTest, CapacityMustBeAPowerOfTwo) {
  EXPECT_THROW(ring_bytes(100), InvalidArgument);
  EXPECT_THROW(make_ring_sink(memory(64).first(100)), InvalidArgument);
}

}  // namespace
}  // namespace maniple
