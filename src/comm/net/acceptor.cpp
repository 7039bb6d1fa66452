// A pending connection passes these stages: reading the header, the hello and the proof. Then it is accepted, or it is
// sent the reason and drained, because closing a connection with unread bytes would reset it and could lose the reason.
// All state belongs to the loop's thread.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <optional>

#include <fmt/format.h>
#include "comm/base/check.h"
#include "comm/base/crypto.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "comm/net/handshake_wire.h"

namespace maniple {
namespace {

using Clock = Deadline::Clock;

// A flood of connections must not starve the group members, which share the loop with them.
constexpr int kAcceptsAtOnce = 2;
constexpr std::chrono::milliseconds kDrainLimit{1000};
constexpr std::chrono::milliseconds kDescriptorPause{200};

enum class Stage { header, hello, proof, draining };
enum class PausedFor { nothing, room, descriptors };

struct PendingConnection {
  UniqueFd fd;
  Address peer;
  Clock::time_point since;
  Clock::time_point until;
  Stage stage = Stage::header;
  std::string in;  // bytes of the current stage
  std::size_t needed = kHeaderBytes;
  std::string hello_bytes;  // header and body, as received: the MACs cover them
  std::string challenge_prefix;
  Cipher cipher = Cipher::aes_256_gcm;
  std::optional<KeyExchange> exchange;
  WireHello hello;
  bool watched = false;  // registered with the loop
};

using PendingList = std::list<PendingConnection>;

}  // namespace

struct Acceptor::Impl {
  std::shared_ptr<EventLoop> loop;
  UniqueFd listener;
  Address address;
  Identity identity;
  Owner owner;
  HandshakeLimits limits;
  std::atomic<std::uint64_t> refused{0};

  PendingList pending;  // oldest first
  ThrottledLog log;
  EventLoop::Timer timer = 0;
  PausedFor paused = PausedFor::nothing;
  Clock::time_point paused_until{};
  UniqueFd reserve{::open("/dev/null", O_RDONLY | O_CLOEXEC)};

  void start() {
    // An error of one pending connection must not remove the listener from the loop.
    loop->add(listener.get(), EPOLLIN, [this](std::uint32_t) {
      try {
        accept_some();
      } catch (const std::exception& error) {
        log.warn("failure", fmt::format("{} cannot accept a connection: {}", address.to_string(), error.what()));
        pause(PausedFor::descriptors, Clock::now() + kDescriptorPause);
      }
    });
  }

  void stop() {
    loop->remove(listener.get());
    if (timer != 0) loop->cancel(timer);
    for (auto it = pending.begin(); it != pending.end(); ++it) unwatch(it);
    pending.clear();
    listener.reset();
  }

  // --- accepting connections ---

  void accept_some() {
    for (int i = 0; i < kAcceptsAtOnce; ++i) {
      if (pending.size() >= limits.unauthenticated && !make_room()) return pause(PausedFor::room, next_ripe());
      int fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0 && errno == EMFILE) {
        raise_descriptor_limit();
        fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      }
      if (fd >= 0) {
        admit(kept_from_children(UniqueFd(fd)));
        continue;
      }
      if (errno == EAGAIN) return;
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        return turn_one_away(errno);
      }
      // Other errors (ECONNABORTED, EINTR, pending network errors) concern only that connection.
    }
  }

  /// Closes one connection. It would otherwise stay queued, keep the listener readable and make the loop spin.
  void turn_one_away(int code) {
    log.warn("descriptors", fmt::format("{} cannot accept a connection: {}", address.to_string(),
                                        code == EMFILE ? descriptor_shortage() : errno_text(code)));
    if (reserve) {
      reserve.reset();
      UniqueFd turned_away(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      turned_away.reset();
      reserve.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      ++refused;
    }
    pause(PausedFor::descriptors, Clock::now() + kDescriptorPause);
  }

  /// When a pending connection may be displaced: later after its hello, when it more likely belongs to the job.
  Clock::time_point ripe_at(const PendingConnection& entry) const {
    constexpr int kProofGrace = 4;
    return entry.since + limits.grace * (entry.stage == Stage::proof ? kProofGrace : 1);
  }

  bool make_room() {
    const auto oldest = std::min_element(
        pending.begin(), pending.end(),
        [this](const PendingConnection& a, const PendingConnection& b) { return ripe_at(a) < ripe_at(b); });
    if (ripe_at(*oldest) > Clock::now()) return false;
    refuse_silently(oldest, "too many unauthenticated connections at a time, the oldest is dropped");
    return true;
  }

  Clock::time_point next_ripe() const {
    auto next = Clock::time_point::max();
    for (const PendingConnection& entry : pending) next = std::min(next, ripe_at(entry));
    return next;
  }

  void pause(PausedFor reason, Clock::time_point until) {
    loop->modify(listener.get(), 0);
    paused = reason;
    paused_until = until;
    set_timer();
  }

  void resume() {
    paused = PausedFor::nothing;
    loop->modify(listener.get(), EPOLLIN);
  }

  void admit(UniqueFd fd) {
    PendingConnection entry;
    try {
      entry.peer = Address::of_peer(fd.get());
    } catch (const SystemError&) {
      log_debug("{}: a connection was gone before it could be looked at", address.to_string());
      return;
    }
    if (entry.peer.is_unix() && !is_same_user(fd.get())) {
      ++refused;
      log.warn("another user", fmt::format("{} refused a process of another user", address.to_string()));
      return;
    }
    const int on = 1;
    if (!entry.peer.is_unix()) ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    entry.fd = std::move(fd);
    entry.since = Clock::now();
    entry.until = entry.since + limits.handshake;
    pending.push_back(std::move(entry));
    const auto it = std::prev(pending.end());
    if (!advance(it)) return;  // its bytes have often arrived already, or it is gone
    watch(it);
    if (timer == 0) set_timer();  // a timer already set expires no later
  }

  void watch(PendingList::iterator it) {
    if (it->watched) return;
    const int fd = it->fd.get();
    loop->add(
        fd, EPOLLIN, [this, it](std::uint32_t) { advance(it); },
        [this, fd](const std::string& why) {
          const auto failed = std::find_if(pending.begin(), pending.end(),
                                           [fd](const PendingConnection& n) { return n.fd.get() == fd; });
          if (failed != pending.end()) refuse_silently(failed, "failure", why);
        });
    it->watched = true;
  }

  void unwatch(PendingList::iterator it) {
    if (it->watched) loop->remove(it->fd.get());
    it->watched = false;
  }

  // --- time ---

  void set_timer() {
    if (timer != 0) loop->cancel(timer);
    timer = 0;
    auto next = Clock::time_point::max();
    if (paused != PausedFor::nothing) next = paused_until;
    for (const PendingConnection& entry : pending) next = std::min(next, entry.until);
    if (next == Clock::time_point::max()) return;
    timer = loop->call_at(Deadline(next), [this] { on_timer(); });
  }

  void on_timer() {
    timer = 0;
    const auto now = Clock::now();
    for (auto it = pending.begin(); it != pending.end();) {
      const auto next = std::next(it);
      if (it->until <= now) {
        if (it->stage == Stage::draining) {
          leave(it);
        } else {
          refuse_silently(
              it, fmt::format("no handshake within {:.1f} s", std::chrono::duration<double>(limits.handshake).count()));
        }
      }
      it = next;
    }
    if (paused != PausedFor::nothing && paused_until <= now) resume();
    set_timer();
  }

  // --- one pending connection ---

  /// Reads the available bytes. False when the connection is no longer pending.
  bool advance(PendingList::iterator it) {
    for (;;) {
      if (it->stage == Stage::draining) return drain(it);
      char buffer[kMaxHandshakeBytes];
      const std::size_t missing = it->needed - it->in.size();
      const ssize_t got = ::recv(it->fd.get(), buffer, missing, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return true;
      if (got <= 0) {
        on_hang_up(it);
        return false;
      }
      it->in.append(buffer, got);
      if (it->stage == Stage::header && !may_begin_header(it->in)) {
        refuse_silently(it, describe_foreign_client(it->in));
        return false;
      }
      if (it->in.size() < it->needed) continue;
      try {
        if (!take(it)) return false;
      } catch (const Error& error) {
        refuse_silently(it, "malformed handshake", error.what());
        return false;
      }
    }
  }

  /// False when the connection is no longer pending.
  bool take(PendingList::iterator it) {
    switch (it->stage) {
      case Stage::header: return take_header(it);
      case Stage::hello: return take_hello(it);
      case Stage::proof: return take_proof(it);
      case Stage::draining: break;
    }
    return true;
  }

  bool take_header(PendingList::iterator it) {
    const WireHeader header = decode_header(it->in);
    if (header.version != kProtocolVersion) {
      // The MAC stays empty, because a transcript in another version cannot be authenticated.
      const std::string answer =
          encode_challenge_prefix(ChallengeStatus::version_refused, Nonce{}) + std::string(kMacBytes, '\0');
      tell(it, answer);
      refuse(it, "another protocol version",
             fmt::format("it speaks version {}, this process version {}", header.version, kProtocolVersion));
      return true;
    }
    if (header.length == 0) throw ProtocolError("an empty hello");
    it->hello_bytes = it->in;
    next_stage(it, Stage::hello, header.length);
    return true;
  }

  bool take_hello(PendingList::iterator it) {
    it->hello = decode_hello(it->in);
    it->hello_bytes += it->in;
    Nonce nonce;
    if (it->hello.ephemeral) {
      nonce = it->exchange.emplace().share();
    } else {
      fill_random(nonce);
    }
    const bool both = it->hello.cipher == preferred_cipher();  // otherwise one side lacks AES instructions
    it->cipher = both ? it->hello.cipher : Cipher::chacha20_poly1305;
    it->challenge_prefix = encode_challenge_prefix(ChallengeStatus::ok, nonce, it->cipher);
    const Mac mac = prove(identity.secret, Direction::from_acceptor, it->hello_bytes, it->challenge_prefix);
    tell(it, it->challenge_prefix + std::string(as_text(mac)));
    next_stage(it, Stage::proof, kMacBytes);
    return true;
  }

  bool take_proof(PendingList::iterator it) {
    Mac mac;
    std::copy(it->in.begin(), it->in.end(), mac.begin());
    if (!same_mac(mac, prove(identity.secret, Direction::from_dialler, it->hello_bytes, it->challenge_prefix))) {
      tell_verdict(it, "the secret of the job is another one");
      refuse(it, "wrong secret", "it does not hold the secret of this job");
      return true;
    }
    const Admission admission = judge(identity, address, it->hello, it->peer);
    if (!admission.reason.empty()) {
      tell_verdict(it, admission.reason);
      refuse(it, admission.kind, admission.reason);
      return true;
    }
    return !welcome(it);
  }

  void next_stage(PendingList::iterator it, Stage stage, std::size_t needed) {
    it->stage = stage;
    it->in.clear();
    it->needed = needed;
    MANIPLE_ASSERT(needed <= kMaxHandshakeBytes);
  }

  /// False when the owner refused the connection.
  bool welcome(PendingList::iterator it) {
    const WireHello& said = it->hello;
    const Hello hello{said.role, said.rank, said.topic, said.to, said.encrypt};
    const std::string reason = owner.refusal ? owner.refusal(hello, it->peer) : "";
    if (!reason.empty()) {
      tell_verdict(it, reason);
      refuse(it, "refused", reason);
      return false;
    }
    // Send the verdict first, because another thread may write to the connection as soon as the owner has it.
    tell_verdict(it, {});
    unwatch(it);
    try {
      const auto shared = it->exchange ? std::optional(it->exchange->derive(said.nonce)) : std::nullopt;
      const auto keys =
          keys_of(identity.secret, false, said, it->cipher, it->hello_bytes, it->challenge_prefix, shared);
      owner.accept(SecureConnection(std::move(it->fd), keys), hello, it->peer);
    } catch (const std::exception& error) {
      note(*it, "failure", error.what());  // the connection is closed, which the dialler notices
    }
    pending.erase(it);
    after_leaving();
    return true;
  }

  // --- leaving ---

  static void send_now(int fd, std::string_view bytes) {
    // A peer gets at most half a kilobyte before it is accepted, which always fits into the socket's buffer.
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    (void)sent;  // reading detects a peer that is gone
  }
  void tell(PendingList::iterator it, std::string_view bytes) { send_now(it->fd.get(), bytes); }
  void tell_verdict(PendingList::iterator it, std::string_view reason) {
    const std::string verdict = encode_verdict(reason);
    const Mac mac = prove(identity.secret, Direction::verdict, it->hello_bytes, it->challenge_prefix, verdict);
    tell(it, verdict + std::string(as_text(mac)));
  }

  void note(const PendingConnection& entry, std::string_view kind, std::string_view details) {
    ++refused;
    std::string line = fmt::format("{} refused a connection from {}", address.to_string(), entry.peer.to_string());
    if (entry.stage == Stage::proof) line += fmt::format(" (says rank {})", entry.hello.rank);
    log.warn(kind, fmt::format("{}: {}", line, details));
  }

  /// Called after the reason was sent: gives the peer a moment to read it and hang up.
  void refuse(PendingList::iterator it, std::string_view kind, std::string_view details) {
    note(*it, kind, details);
    ::shutdown(it->fd.get(), SHUT_WR);
    it->stage = Stage::draining;
    it->until = std::min(it->until, Clock::now() + kDrainLimit);
    set_timer();
  }

  void refuse_silently(PendingList::iterator it, std::string_view kind, std::string_view details = {}) {
    note(*it, kind, details.empty() ? kind : details);
    leave(it);
  }

  void on_hang_up(PendingList::iterator it) {
    if (it->stage == Stage::proof) {
      // Maniple's dialler hangs up without a proof when it rejects this side's MAC.
      note(*it, "wrong secret", "it left after our challenge: it holds another secret, or its process ended");
    } else {
      log_debug("{}: {} connected and left, {} bytes sent", address.to_string(), it->peer.to_string(),
                it->hello_bytes.size() + it->in.size());
    }
    leave(it);
  }

  bool drain(PendingList::iterator it) {
    char buffer[4096];
    for (int reads = 0; reads < 16; ++reads) {  // disconnects a peer that keeps sending
      const ssize_t got = ::recv(it->fd.get(), buffer, sizeof(buffer), 0);
      if (got < 0 && errno == EAGAIN) return true;
      if (got <= 0 && errno != EINTR) break;
    }
    leave(it);
    return false;
  }

  void leave(PendingList::iterator it) {
    unwatch(it);
    pending.erase(it);
    after_leaving();
  }

  void after_leaving() {
    if (paused == PausedFor::room && pending.size() < limits.unauthenticated) resume();
  }
};

Acceptor::Acceptor(std::shared_ptr<EventLoop> loop, UniqueFd listener, Identity identity, Owner owner,
                   HandshakeLimits limits)
    : impl_(std::make_shared<Impl>()) {
  crypto_function("HMAC");  // a missing library is an error here, not one per connection
  impl_->loop = std::move(loop);
  impl_->address = Address::of_socket(listener.get());
  impl_->listener = std::move(listener);
  impl_->identity = std::move(identity);
  impl_->owner = std::move(owner);
  impl_->limits = limits;
  impl_->start();
}

Acceptor::~Acceptor() {
  impl_->loop->post_and_wait([this] { impl_->stop(); });
}

const Address& Acceptor::address() const noexcept { return impl_->address; }
std::uint64_t Acceptor::refused() const noexcept { return impl_->refused.load(std::memory_order_relaxed); }

}  // namespace maniple
