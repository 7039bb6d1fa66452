#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/crypto.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "comm/net/handshake.h"
#include "comm/net/handshake_wire.h"

namespace maniple {
namespace {

/// The acceptor closed the connection without a reason. It does so to unauthenticated peers, but also to the oldest
/// pending connection when very many ranks connect at once, so another try is worthwhile.
struct HungUp {
  std::string text;
};

/// Blocking reads and writes on a non-blocking socket, with one deadline.
class Conversation {
 public:
  Conversation(int fd, const Address& peer, Deadline deadline, int cancel)
      : fd_(fd), peer_(peer), deadline_(deadline), cancel_(cancel) {}

  void send_all(std::string_view bytes) {
    while (bytes.remove_prefix(maniple::send_all(fd_, bytes)), !bytes.empty()) wait_or_throw(POLLOUT);
  }

  std::string receive(std::size_t count) {
    std::string bytes(count, '\0');
    std::size_t got = 0;
    while (got < count) {
      const ssize_t more = ::recv(fd_, bytes.data() + got, count - got, 0);
      if (more == 0) throw HungUp{"connection closed during the handshake"};
      if (more > 0) {
        got += more;
      } else {
        wait_or_throw(POLLIN);
      }
    }
    return bytes;
  }

 private:
  void wait_or_throw(short events) {
    if (errno == EINTR) return;
    if (errno == ECONNRESET || errno == EPIPE) throw HungUp{errno_text(errno) + " during the handshake"};
    if (errno != EAGAIN) throw_system_error(fmt::format("handshake with {}", peer_.to_string()));
    // The handshake is short, and cancelling it at once would make the other side warn of an unauthenticated peer.
    constexpr std::chrono::milliseconds kUnbroken{300};
    const Deadline unbroken(start_ + kUnbroken);
    const bool may_break = unbroken.expired();
    pollfd waiting[2] = {{.fd = fd_, .events = events, .revents = 0},
                         {.fd = may_break ? cancel_ : -1, .events = POLLIN, .revents = 0}};
    const int ready = ::poll(waiting, 2, (may_break ? deadline_ : Deadline::sooner(deadline_, unbroken)).poll_ms());
    if (ready > 0 && waiting[0].revents == 0)
      throw Aborted(fmt::format("handshake with {}: given up", peer_.to_string()));
    if (ready == 0 && deadline_.expired()) {
      const std::chrono::duration<double> waited = Deadline::Clock::now() - start_;
      throw Timeout(
          fmt::format("handshake with {}: connected, but no answer within {:.1f} s", peer_.to_string(), waited.count()),
          {}, waited.count());
    }
  }

  int fd_;
  const Address& peer_;
  Deadline deadline_;
  int cancel_;
  Deadline::Clock::time_point start_ = Deadline::Clock::now();
};

std::optional<ConnectionKeys> shake_hands(int fd, const Address& address, const Identity& identity,
                                          const WireHello& hello, const std::optional<KeyExchange>& exchange,
                                          Deadline deadline, int cancel) {
  const std::string where = address.to_string();
  crypto_function("HMAC");  // load the library before connecting to the other side
  Conversation peer(fd, address, deadline, cancel);
  const std::string hello_bytes = encode_hello(hello);
  peer.send_all(hello_bytes);

  const std::string header_bytes = peer.receive(kHeaderBytes);
  if (!may_begin_header(header_bytes)) {
    throw ProtocolError(fmt::format("{} does not speak Maniple: {}", where, describe_foreign_client(header_bytes)));
  }
  const WireHeader header = decode_header(header_bytes);
  if (header.version != kProtocolVersion) {
    throw ProtocolError(
        fmt::format("{} speaks protocol version {}, this process speaks version {}: run the same release "
                    "of Maniple on all ranks",
                    where, header.version, kProtocolVersion));
  }
  if (header.length != kChallengeBytes - kHeaderBytes) {
    throw ProtocolError(fmt::format("{} sent a challenge of {} bytes", where, header.length));
  }
  const WireChallenge challenge = decode_challenge(peer.receive(header.length));
  const std::string prefix = encode_challenge_prefix(challenge.status, challenge.nonce, challenge.cipher);
  if (challenge.status == ChallengeStatus::version_refused) {
    throw ProtocolError(fmt::format("{} refused protocol version {}", where, kProtocolVersion));
  }
  if (!same_mac(challenge.mac, prove(identity.secret, Direction::from_acceptor, hello_bytes, prefix))) {
    throw ProtocolError(
        fmt::format("{} does not hold the secret of this job (\"{}\"): another job listens there, or the "
                    "secret was not passed to all processes",
                    where, identity.job));
  }
  peer.send_all(as_text(prove(identity.secret, Direction::from_dialler, hello_bytes, prefix)));

  std::string verdict = peer.receive(kVerdictHeaderBytes);
  const auto length = decode_verdict_header(verdict);
  if (length) verdict += peer.receive(*length);
  Mac mac;
  std::ranges::copy(peer.receive(kMacBytes), mac.begin());
  if (!same_mac(mac, prove(identity.secret, Direction::verdict, hello_bytes, prefix, verdict))) {
    throw ProtocolError(
        fmt::format("{}: its answer is not authentic: something between the two processes changed it", where));
  }
  if (length) throw ProtocolError(fmt::format("refused by {}: {}", where, verdict.substr(kVerdictHeaderBytes)));
  const auto shared = exchange ? std::optional(exchange->derive(challenge.nonce)) : std::nullopt;
  return keys_of(identity.secret, true, hello, challenge.cipher, hello_bytes, prefix, shared);
}

/// A key exchange where the connection's records could be recorded on their way.
std::optional<KeyExchange> exchange_for(const Address& address, const Hello& hello) {
  const bool leaves_host = !address.is_unix() && !address.is_loopback();
  if (!uses_records(hello.role, hello.encrypt) || !(leaves_host || hello.ephemeral)) return std::nullopt;
  if (KeyExchange::available()) return KeyExchange();
  warn_once(
      "this system's OpenSSL lacks X25519 (is it restricted to FIPS algorithms?): connections between hosts have no "
      "forward secrecy");
  return std::nullopt;
}

}  // namespace

SecureConnection dial(const Address& address, const Identity& identity, const Hello& hello, Deadline deadline,
                      bool retry, int cancel) {
  constexpr std::chrono::seconds kRetryLimit{30};
  const Deadline retry_until = Deadline::sooner(deadline, Deadline::after(kRetryLimit));
  std::chrono::milliseconds pause{5};
  for (int attempt = 1;; ++attempt) {
    UniqueFd fd = connect_to(address, deadline, retry, cancel);
    WireHello wire{.role = hello.role,
                   .generation = identity.generation,
                   .world_size = identity.world_size,
                   .rank = hello.rank >= 0 ? hello.rank : identity.rank,
                   .nonce = {},
                   .job = identity.job,
                   .topic = hello.topic,
                   .to = hello.to,
                   .cipher = preferred_cipher(),
                   .encrypt = hello.encrypt};
    const std::optional<KeyExchange> exchange = exchange_for(address, hello);
    wire.ephemeral = exchange.has_value();
    if (exchange) {
      wire.nonce = exchange->share();
    } else {
      fill_random(wire.nonce);
    }
    try {
      const auto keys = shake_hands(fd.get(), address, identity, wire, exchange, deadline, cancel);
      return SecureConnection(std::move(fd), keys);
    } catch (const HungUp& hung_up) {
      if (retry_until.remaining() <= pause) {
        throw ProtocolError(fmt::format("{}: {} ({} tries); its log says why if it is a Maniple process",
                                        address.to_string(), hung_up.text, attempt));
      }
    }
    // Waits between half and all of `pause`, so that ranks refused together do not return together.
    // sleep: until the next attempt, because the acceptor was full
    std::this_thread::sleep_for(pause * (256 + wire.nonce[0]) / 512);
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

}  // namespace maniple
