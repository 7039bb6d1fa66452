#include "comm/net/secure_connection.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

const TrafficSecret kKey = [] {
  TrafficSecret key{};
  key[7] = 42;
  return key;
}();

std::string pattern(std::size_t size) {
  std::string bytes(size, '\0');
  std::minstd_rand random(static_cast<unsigned>(size));
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

/// What comes out when `bytes` come in by `step` at a time, up to the error if there is one.
struct Outcome {
  std::string plain;
  bool failed = false;
};
Outcome open_all(RecordOpener& opener, std::string bytes, std::size_t step = std::size_t(-1)) {
  Outcome outcome;
  try {
    for (std::size_t at = 0; at < bytes.size();) {
      std::span<char> part(bytes.data() + at, std::min(step, bytes.size() - at));
      at += part.size();
      while (const auto record = opener.next(part)) outcome.plain += *record;
      EXPECT_TRUE(part.empty());
    }
  } catch (const ProtocolError&) {
    outcome.failed = true;
  }
  return outcome;
}

class Records : public testing::TestWithParam<Cipher> {
 protected:
  RecordSealer sealer(std::uint64_t per_key = kRecordsPerKey) const { return {GetParam(), kKey, per_key}; }
  RecordOpener opener(std::uint64_t per_key = kRecordsPerKey) const { return {GetParam(), kKey, per_key}; }
};

TEST_P(Records, EverySizeSurvivesTheTripInPiecesOfAnySize) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{1000},
                                 kMaxRecordBytes - 1, kMaxRecordBytes, kMaxRecordBytes + 1, 3 * kMaxRecordBytes + 7}) {
    const std::string plain = pattern(size);
    for (const std::size_t step : {std::size_t{7}, std::size_t{4096}, std::size_t(-1)}) {
      RecordSealer out = sealer();
      RecordOpener in = opener();
      std::string sealed;
      out.seal(plain, sealed);
      EXPECT_EQ(sealed.size(), size + (size + kMaxRecordBytes - 1) / kMaxRecordBytes * kRecordOverhead);
      EXPECT_EQ(sealed.find(plain.substr(0, 100)), size < 4 ? sealed.find(plain) : std::string::npos);
      const Outcome outcome = open_all(in, sealed, step);
      EXPECT_FALSE(outcome.failed);
      EXPECT_EQ(outcome.plain, plain) << size << " by " << step;
    }
  }
}

TEST_P(Records, PartsAreJoined) {
  const std::string large = pattern(kMaxRecordBytes + 5);
  const std::string_view parts[] = {"", "head", "", large, "tail"};
  RecordSealer out = sealer();
  RecordOpener in = opener();
  std::string sealed = "before";
  out.seal(parts, sealed);
  EXPECT_EQ(open_all(in, sealed.substr(6), 1000).plain, "head" + large + "tail");
  sealed.clear();
  out.seal("", sealed);
  EXPECT_TRUE(sealed.empty());
}

TEST_P(Records, AnyChangedByteIsNoticedAndNothingComesOutAfterIt) {
  RecordSealer out = sealer();
  std::string sealed;
  for (const char* text : {"first", "second", "third"}) out.seal(text, sealed);
  for (std::size_t i = 0; i < sealed.size(); ++i) {
    for (const int bit : {1, 0x80}) {
      std::string changed = sealed;
      changed[i] = static_cast<char>(changed[i] ^ bit);
      RecordOpener in = opener();
      const Outcome outcome = open_all(in, changed);
      EXPECT_TRUE(std::string("firstsecondthird").starts_with(outcome.plain)) << i;
      EXPECT_LT(outcome.plain.size(), 16u) << i;
      if (outcome.failed) {
        EXPECT_TRUE(open_all(in, sealed).failed) << "it went on after an error";
      }
    }
    RecordOpener shortened = opener();
    EXPECT_LT(open_all(shortened, sealed.substr(0, i) + sealed.substr(i + 1)).plain.size(), 16u) << i;
    RecordOpener lengthened = opener();
    const Outcome longer = open_all(lengthened, sealed.substr(0, i) + "x" + sealed.substr(i));
    EXPECT_LT(longer.plain.size(), 16u) << i;
  }
}

TEST_P(Records, RecordsLeftOutRepeatedOrExchangedAreNoticed) {
  RecordSealer out = sealer();
  std::vector<std::string> records(4);
  for (std::size_t i = 0; i < records.size(); ++i) out.seal("record " + std::to_string(i), records[i]);
  const auto outcome = [&](std::initializer_list<std::size_t> order) {
    RecordOpener in = opener();
    std::string bytes;
    for (const std::size_t i : order) bytes += records[i];
    return open_all(in, bytes);
  };
  EXPECT_EQ(outcome({0, 1, 2, 3}).plain, "record 0record 1record 2record 3");
  for (const auto& order : {std::initializer_list<std::size_t>{1}, {0, 2}, {0, 0}, {0, 1, 0}, {0, 2, 1}, {0, 1, 1}}) {
    EXPECT_TRUE(outcome(order).failed);
  }
}

TEST_P(Records, AnotherKeyOrTheOtherDirectionOpensNothing) {
  const std::vector<std::uint8_t> secret(32, 5);
  const ConnectionKeys here = derive_keys(GetParam(), secret, "transcript", true);
  const ConnectionKeys there = derive_keys(GetParam(), secret, "transcript", false);
  RecordSealer out(here.cipher, here.send);
  std::string sealed;
  out.seal("bytes", sealed);
  RecordOpener meant(there.cipher, there.receive);
  EXPECT_EQ(open_all(meant, sealed).plain, "bytes");
  RecordOpener reflected(here.cipher, here.receive);
  EXPECT_TRUE(open_all(reflected, sealed).failed);
  const ConnectionKeys other = derive_keys(GetParam(), secret, "another transcript", false);
  RecordOpener elsewhere(other.cipher, other.receive);
  EXPECT_TRUE(open_all(elsewhere, sealed).failed);
}

TEST_P(Records, ImpossibleLengthsEndAtOnce) {
  for (const std::uint32_t length : {0u, std::uint32_t{kMaxRecordBytes} + 1, 0x7fffffffu, 0xffffffffu}) {
    std::string header(4, '\0');
    for (std::size_t i = 0; i < 4; ++i) header[i] = static_cast<char>(length >> (8 * i));
    RecordOpener in = opener();
    EXPECT_TRUE(open_all(in, header).failed) << length;
  }
}

TEST_P(Records, KeysChangeOnBothSidesAfterTheSameNumberOfRecords) {
  RecordSealer out = sealer(3);
  RecordSealer unchanged = sealer();
  RecordOpener in = opener(3);
  std::string sealed;
  std::string plain;
  for (int i = 0; i < 20; ++i) {
    std::string mine;
    std::string other;
    out.seal(std::to_string(i), mine);
    unchanged.seal(std::to_string(i), other);
    EXPECT_EQ(mine == other, i < 3) << i;
    sealed += mine;
    plain += std::to_string(i);
  }
  EXPECT_EQ(open_all(in, sealed, 11).plain, plain);
}

INSTANTIATE_TEST_SUITE_P(Ciphers, Records, testing::Values(Cipher::aes_256_gcm, Cipher::chacha20_poly1305),
                         [](const auto& cipher) { return cipher.param == Cipher::aes_256_gcm ? "Aes" : "ChaCha"; });

}  // namespace
}  // namespace maniple
