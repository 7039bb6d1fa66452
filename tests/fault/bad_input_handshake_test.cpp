// Those who speak our handshake, but wrongly: other versions, other secrets, other jobs, recordings and reflections.
#include "fault/bad_input.h"

namespace maniple {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class BadHandshake : public BadInput {};

TEST_P(BadHandshake, N08AHelloSplitAtEveryByteIsAccepted) {
  const std::size_t length = encode_hello(target.hello()).size();
  for (std::size_t cut = 1; cut < length; ++cut) {
    Raw peer(target.address());
    const std::string hello = encode_hello(target.hello());
    peer.send(hello.substr(0, cut));
    peer.wait_until_idle();
    peer.send(hello.substr(cut));
    const std::string challenge = peer.receive(kChallengeBytes);
    ASSERT_EQ(challenge.size(), kChallengeBytes) << cut;
    const std::string prefix = challenge.substr(0, kChallengeBytes - kMacBytes);
    const Mac proof = prove(target.identity.secret, Direction::from_dialler, hello, prefix);
    const std::size_t half = cut % kMacBytes;
    peer.send(as_text(proof).substr(0, half));
    peer.wait_until_idle();
    peer.send(as_text(proof).substr(half));
    ASSERT_EQ(peer.receive(kVerdictHeaderBytes), encode_verdict("")) << cut;
  }
}

TEST_P(BadHandshake, N10OtherVersionsAreNamedToBothSides) {
  const std::string log = logged([&] {
    for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{99}}) {
      Raw peer(target.address());
      std::string hello = encode_hello(target.hello());
      hello[8] = static_cast<char>(version);
      hello[10] = hello[11] = '\xff';  // a length that only the other version could understand
      peer.send(hello);
      const std::string answer = peer.receive(kHeaderBytes);
      ASSERT_EQ(answer.size(), kHeaderBytes);
      EXPECT_EQ(decode_header(answer).version, kProtocolVersion);
      EXPECT_TRUE(peer.closed_by(soon()));
    }
  });
  EXPECT_THAT(log, AllOf(HasSubstr("version 0"), HasSubstr("version " + std::to_string(kProtocolVersion))));
}

TEST(BadServer, N10TheDiallerNamesBothVersions) {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  std::thread server([&] {
    pollfd waiting{.fd = listener.get(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, 20'000);
    const UniqueFd fd(::accept(listener.get(), nullptr, nullptr));
    std::string answer = encode_challenge_prefix(ChallengeStatus::version_refused, {}) + std::string(kMacBytes, '\0');
    answer[8] = 99;
    ::send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    char bytes[1024];
    while (::recv(fd.get(), bytes, sizeof(bytes), 0) > 0) {
    }
  });
  try {
    dial(Address::of_socket(listener.get()), {}, {}, soon());
    ADD_FAILURE() << "accepted";
  } catch (const ProtocolError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("version 99"), HasSubstr("version " + std::to_string(kProtocolVersion))));
  }
  server.join();
}

TEST_P(BadHandshake, N11WithoutTheSecretPeersAreRefused) {
  Identity thief = target.identity;
  thief.secret = Secret::random();
  const std::string log = logged([&] {
    EXPECT_THAT(target.refusal(thief), HasSubstr("secret"));
    thief.secret = Secret::none();
    EXPECT_THAT(target.refusal(thief), HasSubstr("secret"));
    Raw peer(target.address());
    peer.send(encode_hello(target.hello()));
    ASSERT_EQ(peer.receive(kChallengeBytes).size(), kChallengeBytes);
    peer.send(std::string(kMacBytes, 'm'));
    std::string verdict;
    EXPECT_TRUE(peer.closed_by(soon(), &verdict));
    EXPECT_THAT(verdict, HasSubstr("secret"));
    EXPECT_THAT(verdict, testing::Not(HasSubstr("training")));  // nor anything else about the job
  });
  EXPECT_THAT(log, HasSubstr("secret"));
}

TEST_P(BadHandshake, N12N13N16N17AuthenticPeersOfAnotherJobAreRefusedWithAReason) {
  Identity other = target.identity;
  other.job = "another";
  EXPECT_THAT(target.refusal(other), HasSubstr("this is job \"training\", not \"another\""));
  other = target.identity;
  other.generation = 3;
  EXPECT_THAT(target.refusal(other), HasSubstr("superseded by generation 4"));
  other.generation = 5;
  EXPECT_THAT(target.refusal(other), HasSubstr("generation 4 is over"));
  other = target.identity;
  other.world_size = 16;
  EXPECT_THAT(target.refusal(other), AllOf(HasSubstr("world size is 8"), HasSubstr("16"), HasSubstr("127.0.0.1")));
  EXPECT_THAT(target.refusal(target.identity, 8), HasSubstr("rank 8"));
  other = target.identity;
  other.rank = -7;
  EXPECT_THAT(target.refusal(other, -1), HasSubstr("rank -7"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadHandshake, N14AReplayedHandshakeIsRefused) {
  const std::string hello = encode_hello(target.hello());
  std::string proof;
  {
    Raw honest(target.address());
    honest.send(hello);
    const std::string challenge = honest.receive(kChallengeBytes);
    proof = as_text(prove(target.identity.secret, Direction::from_dialler, hello,
                          challenge.substr(0, kChallengeBytes - kMacBytes)));
    honest.send(proof);
    ASSERT_EQ(honest.receive(kVerdictHeaderBytes), encode_verdict(""));
  }
  Raw replay(target.address());
  replay.send(hello + proof);
  std::string answer;
  EXPECT_TRUE(replay.closed_by(soon(), &answer));
  EXPECT_THAT(answer, HasSubstr("secret"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadHandshake, N15AReflectedProofIsRefused) {
  Raw peer(target.address());
  peer.send(encode_hello(target.hello()));
  const std::string challenge = peer.receive(kChallengeBytes);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  peer.send(challenge.substr(kChallengeBytes - kMacBytes));
  std::string answer;
  EXPECT_TRUE(peer.closed_by(soon(), &answer));
  EXPECT_THAT(answer, HasSubstr("secret"));
  EXPECT_TRUE(target.serves());
}

TEST_P(BadHandshake, N21HelloLengthsAreBounded) {
  for (const std::size_t at : {std::size_t{10}, kHeaderBytes + 51}) {  // of the body, and of the job's name
    Raw peer(target.address());
    std::string hello = encode_hello(target.hello());
    hello[at] = hello[at + 1] = '\xff';
    peer.send(hello);
    EXPECT_TRUE(peer.closed_by(soon()));
  }
  EXPECT_TRUE(target.serves());
}

INSTANTIATE_TEST_SUITE_P(All, BadHandshake, kListeners, kListenerName);

}  // namespace
}  // namespace maniple
