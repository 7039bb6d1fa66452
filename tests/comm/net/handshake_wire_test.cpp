#include "comm/net/handshake_wire.h"

#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

WireHello sample() {
  WireHello hello{.role = Role::data,
                  .generation = 7,
                  .world_size = 8,
                  .rank = 3,
                  .nonce = {},
                  .job = "job",
                  .topic = "lane",
                  .to = 5,
                  .cipher = Cipher::chacha20_poly1305,
                  .encrypt = true,
                  .ephemeral = true};
  fill_random(hello.nonce);
  return hello;
}

TEST(HandshakeWire, HelloSurvivesTheTrip) {
  const WireHello hello = sample();
  const std::string bytes = encode_hello(hello);
  ASSERT_LE(bytes.size(), kMaxHandshakeBytes);
  const WireHeader header = decode_header(bytes.substr(0, kHeaderBytes));
  EXPECT_EQ(header.version, kProtocolVersion);
  ASSERT_EQ(header.length, bytes.size() - kHeaderBytes);
  const WireHello back = decode_hello(bytes.substr(kHeaderBytes));
  EXPECT_EQ(back.role, hello.role);
  EXPECT_EQ(back.generation, 7u);
  EXPECT_EQ(back.world_size, 8);
  EXPECT_EQ(back.rank, 3);
  EXPECT_EQ(back.nonce, hello.nonce);
  EXPECT_EQ(back.job, "job");
  EXPECT_EQ(back.topic, "lane");
  EXPECT_EQ(back.to, 5);
  EXPECT_EQ(back.cipher, Cipher::chacha20_poly1305);
  EXPECT_TRUE(back.encrypt);
  EXPECT_TRUE(back.ephemeral);
}

TEST(HandshakeWire, TheLongestHelloFits) {
  WireHello hello = sample();
  hello.job = std::string(kMaxJobBytes, 'j');
  hello.topic = std::string(kMaxTopicBytes, 't');
  EXPECT_LE(encode_hello(hello).size(), kMaxHandshakeBytes);
  hello.topic += 't';
  EXPECT_THROW(encode_hello(hello), InvalidArgument);
}

TEST(HandshakeWire, EveryTruncationAndExtensionIsRefused) {
  const std::string body = encode_hello(sample()).substr(kHeaderBytes);
  for (std::size_t length = 0; length < body.size(); ++length) {
    EXPECT_THROW(decode_hello(body.substr(0, length)), ProtocolError) << length;
  }
  EXPECT_THROW(decode_hello(body + "x"), ProtocolError);
}

TEST(HandshakeWire, UnknownRolesAndHugeStringsAreRefused) {
  std::string body = encode_hello(sample()).substr(kHeaderBytes);
  std::string wrong = body;
  wrong[0] = 9;
  EXPECT_THROW(decode_hello(wrong), ProtocolError);
  wrong[0] = 0;
  EXPECT_THROW(decode_hello(wrong), ProtocolError);
  wrong = body;
  wrong[1] = 3;  // cipher
  EXPECT_THROW(decode_hello(wrong), ProtocolError);
  wrong = body;
  wrong[2] = 2;  // encrypt
  EXPECT_THROW(decode_hello(wrong), ProtocolError);
  wrong = body;
  wrong[3] = 2;  // ephemeral
  EXPECT_THROW(decode_hello(wrong), ProtocolError);
  const std::size_t job_length = 4 + 4 + 4 + 4 + 4 + kNonceBytes;
  for (std::size_t i = 0; i < 4; ++i) body[job_length + i] = '\xff';
  EXPECT_THROW(decode_hello(body), ProtocolError);
}

TEST(HandshakeWire, HeadersAreJudgedByTheirFirstBytes) {
  const std::string good = encode_hello(sample());
  for (std::size_t i = 0; i <= good.size(); ++i) EXPECT_TRUE(may_begin_header(good.substr(0, i)));
  EXPECT_FALSE(may_begin_header("G"));
  std::string wrong = good.substr(0, kHeaderBytes);
  wrong[7] ^= 1;
  EXPECT_FALSE(may_begin_header(wrong));
  EXPECT_THROW(decode_header(wrong), ProtocolError);
  std::string too_long = good.substr(0, kHeaderBytes);
  too_long[10] = too_long[11] = '\xff';
  EXPECT_THROW(decode_header(too_long), ProtocolError);
}

TEST(HandshakeWire, ProofsDependOnEverything) {
  const Secret secret = Secret::random();
  const std::string hello = encode_hello(sample());
  Nonce nonce;
  fill_random(nonce);
  const std::string challenge = encode_challenge_prefix(ChallengeStatus::ok, nonce);
  const Mac mac = prove(secret, Direction::from_dialler, hello, challenge);
  EXPECT_TRUE(same_mac(mac, prove(secret, Direction::from_dialler, hello, challenge)));
  EXPECT_FALSE(same_mac(mac, prove(secret, Direction::from_acceptor, hello, challenge)));
  EXPECT_FALSE(same_mac(mac, prove(Secret::random(), Direction::from_dialler, hello, challenge)));
  for (std::size_t i = 0; i < hello.size(); ++i) {
    std::string other = hello;
    other[i] ^= 1;
    EXPECT_FALSE(same_mac(mac, prove(secret, Direction::from_dialler, other, challenge)));
  }
  EXPECT_FALSE(same_mac(mac, prove(secret, Direction::from_dialler, hello, challenge, encode_verdict(""))));
  // Moving a byte from one part to the other is another transcript.
  EXPECT_FALSE(same_mac(mac, prove(secret, Direction::from_dialler, hello + challenge[0], challenge.substr(1))));
}

TEST(HandshakeWire, KeysDependOnEverythingAndOnTheDirection) {
  const Secret secret = Secret::random();
  WireHello hello = sample();
  const std::string bytes = encode_hello(hello);
  const std::string challenge = encode_challenge_prefix(ChallengeStatus::ok, Nonce{});
  const auto keys = [&](const Secret& with, bool dialler, const std::string& said, const std::string& answered) {
    return keys_of(with, dialler, hello, Cipher::aes_256_gcm, said, answered).value();
  };
  const ConnectionKeys here = keys(secret, true, bytes, challenge);
  const ConnectionKeys there = keys(secret, false, bytes, challenge);
  EXPECT_EQ(here.send, there.receive);
  EXPECT_EQ(here.receive, there.send);
  EXPECT_NE(here.send, here.receive);
  EXPECT_NE(keys(Secret::random(), true, bytes, challenge).send, here.send);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string other = bytes;
    other[i] ^= 1;
    EXPECT_NE(keys(secret, true, other, challenge).send, here.send);
  }
  for (std::size_t i = 0; i < challenge.size(); ++i) {
    std::string other = challenge;
    other[i] ^= 1;
    EXPECT_NE(keys(secret, true, bytes, other).receive, here.receive);
  }
}

TEST(HandshakeWire, KeysDependOnTheKeyExchange) {
  const Secret secret = Secret::random();
  const WireHello hello = sample();
  const auto keys = [&](const std::optional<SharedKey>& shared) {
    return keys_of(secret, true, hello, Cipher::aes_256_gcm, encode_hello(hello), "challenge", shared).value();
  };
  const KeyExchange one;
  const KeyExchange other;
  const SharedKey shared = one.derive(other.share());
  EXPECT_EQ(keys(shared).send, keys(other.derive(one.share())).send);
  EXPECT_NE(keys(shared).send, keys(std::nullopt).send);
  EXPECT_NE(keys(shared).send, keys(one.derive(KeyExchange().share())).send);
}

TEST(KeyExchange, SidesAgreeAndSharesAreFresh) {
  ASSERT_TRUE(KeyExchange::available());
  const KeyExchange one;
  const KeyExchange other;
  EXPECT_NE(one.share(), other.share());
  EXPECT_EQ(one.derive(other.share()), other.derive(one.share()));
  EXPECT_NE(one.derive(other.share()), one.derive(KeyExchange().share()));
}

TEST(KeyExchange, PredictableSharesAreRefused) {
  const KeyExchange mine;
  KeyShare weak{};  // of order 4, and 1: the results are always zero
  EXPECT_THROW(mine.derive(weak), ProtocolError);
  weak[0] = 1;
  EXPECT_THROW(mine.derive(weak), ProtocolError);
  EXPECT_NO_THROW(mine.derive(KeyExchange().share()));
}

TEST(HandshakeWire, WhatIsInRecordsFollowsFromTheRole) {
  const auto sealed = [](Role role, bool encrypt) {
    WireHello hello = sample();
    hello.role = role;
    hello.encrypt = encrypt;
    return keys_of(Secret::random(), true, hello, Cipher::aes_256_gcm, encode_hello(hello), "challenge").has_value();
  };
  EXPECT_TRUE(sealed(Role::store, false));
  EXPECT_TRUE(sealed(Role::control, false));
  EXPECT_FALSE(sealed(Role::data, false));
  EXPECT_TRUE(sealed(Role::data, true));
  EXPECT_FALSE(sealed(Role::segment, false));
}

TEST(HandshakeWire, Verdicts) {
  EXPECT_EQ(decode_verdict_header(encode_verdict("").substr(0, 3)), std::nullopt);
  EXPECT_EQ(decode_verdict_header(encode_verdict("no").substr(0, 3)), std::optional<std::uint16_t>(2));
  EXPECT_EQ(encode_verdict(std::string(5000, 'x')).size(), kVerdictHeaderBytes + kMaxReasonBytes);
  EXPECT_THROW(decode_verdict_header(std::string_view("\1\0\0", 3)), ProtocolError);
  EXPECT_THROW(decode_verdict_header(std::string_view("\0\5\0", 3)), ProtocolError);
  EXPECT_THROW(decode_verdict_header(std::string_view("\1\xff\xff", 3)), ProtocolError);
  EXPECT_THROW(decode_verdict_header(std::string_view("\7\1\0", 3)), ProtocolError);
}

TEST(Admission, NamesWhatDiffers) {
  Identity here;
  here.job = "mine";
  here.generation = 4;
  here.world_size = 8;
  const Address at = Address::parse("10.0.0.1:1");
  const Address from = Address::parse("10.0.0.2:2");
  const WireHello good{
      .role = Role::data, .generation = 4, .world_size = 8, .rank = 7, .nonce = {}, .job = "mine", .topic = ""};
  const auto judged = [&](auto change) {
    WireHello hello = good;
    change(hello);
    return judge(here, at, hello, from).reason;
  };
  const auto nothing = [](WireHello&) {};
  EXPECT_EQ(judged(nothing), "");
  EXPECT_EQ(judged([](WireHello& h) { h.rank = -1; }), "");
  EXPECT_EQ(judged([](WireHello& h) { h.world_size = -1; }), "");
  EXPECT_EQ(judged([](WireHello& h) { h.job = "yours"; }), "this is job \"mine\", not \"yours\"");
  EXPECT_EQ(judged([](WireHello& h) { h.generation = 3; }), "generation 3 is superseded by generation 4");
  EXPECT_NE(judged([](WireHello& h) { h.generation = 5; }), "");
  EXPECT_EQ(judged([](WireHello& h) { h.world_size = 4; }),
            "world size is 8 at 10.0.0.1:1 but 4 at 10.0.0.2:2 (rank 7)");
  EXPECT_EQ(judged([](WireHello& h) { h.rank = 8; }), "rank 8 of 10.0.0.2:2 does not exist: expected 0 to 7");
  EXPECT_NE(judged([](WireHello& h) { h.rank = -2; }), "");
}

TEST(ForeignClient, IsRecognised) {
  EXPECT_EQ(describe_foreign_client("GET / HTTP/1.1"), "HTTP client on training port");
  EXPECT_EQ(describe_foreign_client("\x16\x03\x01\x02"), "TLS client on a training port that does not speak TLS");
  EXPECT_EQ(describe_foreign_client("SSH-2.0-x"), "SSH client on training port");
  EXPECT_EQ(describe_foreign_client("*1\r\n$4\r\nPING"), "Redis client on training port");
  EXPECT_EQ(describe_foreign_client("zzz"), "not a Maniple peer (wrong magic)");
}

}  // namespace
}  // namespace maniple
