#include "session/control.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <set>

#include <fmt/format.h>

#include "base/check.h"
#include "base/codec.h"
#include "base/log.h"
#include "base/system_error.h"
#include "net/address.h"

namespace maniple {
namespace {

using Kind = ControlMessage::Kind;
using Clock = Deadline::Clock;

// The state letter of a process of this host: 'T' stopped, 'R' running, 'S' sleeping, ...; 0 if there is none.
char process_state(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const auto end = line.rfind(')');  // the name in parentheses may hold anything
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

}  // namespace

struct Control::Impl : std::enable_shared_from_this<Control::Impl> {
  struct Link {
    UniqueFd fd;
    std::string incoming;
    std::string outgoing;
    Clock::time_point heard = Clock::now();
    bool said_bye = false;
  };
  // A mismatch whose ranks are being asked what they called.
  struct Inquiry {
    ControlMessage abort;
    ControlMessage question;
    std::map<int, std::string> answers;
    std::set<int> awaited;
  };

  std::shared_ptr<EventLoop> loop;
  int rank = 0;
  std::vector<PeerInfo> peers;
  double heartbeat_s = 0;
  Events events;
  std::map<int, Link> links;
  std::set<int> gone;
  std::map<std::string, Inquiry> inquiries;
  std::set<std::string> failed;  // groups, on the hub
  EventLoop::Timer timer = 0;
  std::set<EventLoop::Timer> once;  // they hold this object, which holds the loop: cancelled when it stops
  Clock::time_point last_tick = Clock::now();
  bool stopped = false;

  bool hub() const { return rank == 0; }
  std::string name(int r) const { return peers[static_cast<std::size_t>(r)].describe(r); }

  void adopt(int peer, UniqueFd connection) {
    if (stopped) return;
    const int fd = connection.get();
    set_liveness(fd, heartbeat_s);
    Link& link = links[peer];
    link.fd = std::move(connection);
    link.heard = Clock::now();
    auto self = shared_from_this();
    loop->add(fd, EPOLLIN | EPOLLRDHUP, [self, peer](std::uint32_t ready) { self->on_ready(peer, ready); });
  }

  void on_ready(int peer, std::uint32_t ready) {
    const auto it = links.find(peer);
    if (it == links.end()) return;
    if ((ready & EPOLLOUT) != 0) flush(peer);
    if ((ready & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) read(peer);
  }

  void read(int peer) {
    char bytes[16 * 1024];
    for (;;) {
      const auto it = links.find(peer);
      if (it == links.end()) return;
      const ssize_t got = ::recv(it->second.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got <= 0) return on_closed(peer, got == 0 ? "its process ended without leaving the group (killed, crashed, or exited early)"
                                                     : "its connection broke: " + errno_text(errno));
      it->second.incoming.append(bytes, static_cast<std::size_t>(got));
      it->second.heard = Clock::now();
      if (!take_messages(peer)) return;
    }
  }

  bool take_messages(int peer) {
    for (;;) {
      const auto it = links.find(peer);
      if (it == links.end()) return false;
      std::string& incoming = it->second.incoming;
      if (incoming.size() < 4) return true;
      try {
        const auto length = ByteReader(incoming).get<std::uint32_t>();
        if (length > kMostControlBytes) throw ProtocolError(fmt::format("a control message of {} bytes", length));
        if (incoming.size() < 4 + std::size_t{length}) return true;
        const ControlMessage message = decode_control_message(std::string_view(incoming).substr(4, length));
        incoming.erase(0, 4 + std::size_t{length});
        on_message(peer, message);
      } catch (const ProtocolError& error) {
        on_closed(peer, fmt::format("it sent {}", error.what()));
        return false;
      }
    }
  }

  void on_message(int peer, const ControlMessage& message) {
    switch (message.kind) {
      case Kind::heartbeat: return;
      case Kind::bye: links.at(peer).said_bye = true; return;
      case Kind::lost:
        if (hub()) return;  // only the hub decides who is lost
        gone.insert(message.rank);
        return events.lost(message.rank, message.text);
      case Kind::abort:
        if (!hub()) return events.aborted(message);
        {
          ControlMessage reported = message;
          reported.origin = peer;
          return spread(reported);
        }
      case Kind::question: {
        ControlMessage answer = message;
        answer.kind = Kind::answer;
        answer.rank = rank;
        answer.text = events.called(message.group, message.seq);
        return send(peer, answer);
      }
      case Kind::answer:
        if (hub()) answered(message);
        return;
    }
  }

  void on_closed(int peer, const std::string& why) {
    const auto it = links.find(peer);
    if (it == links.end()) return;
    const bool good = it->second.said_bye;
    loop->remove(it->second.fd.get());
    links.erase(it);
    gone.insert(peer);
    if (!good && !stopped) declare_lost(peer, why);
  }

  void declare_lost(int peer, const std::string& why) {
    ControlMessage message;
    message.kind = Kind::lost;
    message.rank = peer;
    message.text = fmt::format("{} is lost: {}", name(peer), why);
    if (hub()) {
      for (auto& [other, link] : links) send(other, message);
    }
    events.lost(peer, message.text);
  }

  void send(int peer, const ControlMessage& message) {
    const auto it = links.find(peer);
    if (it == links.end()) return;
    it->second.outgoing += encode(message);
    flush(peer);
  }

  void flush(int peer) {
    const auto it = links.find(peer);
    if (it == links.end()) return;
    Link& link = it->second;
    while (!link.outgoing.empty()) {
      const ssize_t sent = ::send(link.fd.get(), link.outgoing.data(), link.outgoing.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) break;  // full, or broken: the reading side notices that
      link.outgoing.erase(0, static_cast<std::size_t>(sent));
    }
    loop->modify(link.fd.get(), EPOLLIN | EPOLLRDHUP | (link.outgoing.empty() ? 0U : static_cast<std::uint32_t>(EPOLLOUT)));
    // A peer that reads nothing while we write megabytes is stuck; its heartbeat tells, not our memory.
    if (link.outgoing.size() > 4 * kMostControlBytes) link.outgoing.clear();
  }

  void tick() {
    if (stopped || heartbeat_s <= 0) return;
    const auto now = Clock::now();
    const auto period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(heartbeat_s / 10));
    // If this thread itself was held up (the machine slept, this process was stopped), others' silence proves nothing.
    const bool held_up = now - last_tick > period * 4;
    last_tick = now;
    std::vector<std::pair<int, std::string>> silent;
    for (auto& [peer, link] : links) {
      if (held_up) link.heard = now;
      const double silence = std::chrono::duration<double>(now - link.heard).count();
      if (silence <= heartbeat_s * 0.9) continue;
      const PeerInfo& info = peers[static_cast<std::size_t>(peer)];
      const bool same_host = info.host_key == peers[static_cast<std::size_t>(rank)].host_key;
      const char state = same_host ? process_state(info.pid) : '\0';
      if (same_host && state != 'T' && state != 't' && state != '\0' && silence < heartbeat_s * 10) continue;
      silent.emplace_back(peer, state == 'T' || state == 't'
                                    ? fmt::format("its process is stopped (no heartbeat for {:.1f} s)", silence)
                                    : fmt::format("no heartbeat for {:.1f} s (stopped, overloaded, or cut off)", silence));
    }
    for (const auto& [peer, why] : silent) on_closed(peer, why);
    ControlMessage beat;
    beat.rank = rank;
    std::vector<int> all;
    for (const auto& [peer, link] : links) all.push_back(peer);
    for (const int peer : all) send(peer, beat);
    schedule();
  }

  void schedule() {
    auto self = shared_from_this();
    timer = loop->call_at(Deadline::after(std::chrono::duration<double>(heartbeat_s / 10)), [self] { self->tick(); });
  }

  // ---- Aborts --------------------------------------------------------------------------------------------------

  void spread(const ControlMessage& message) {
    if (!hub()) return send(0, message);
    if (inquiries.count(message.group) != 0 || !failed.insert(message.group).second) return;  // the first report counts
    if (message.error == ErrorKind::mismatch && message.seq != 0) return inquire(message);
    deliver(message);
  }

  void deliver(const ControlMessage& message) {
    events.aborted(message);
    // The rank that reported it hears last: when its call ends, the others know.
    std::vector<int> all;
    for (const auto& [peer, link] : links) {
      if (peer != message.origin) all.push_back(peer);
    }
    for (const int peer : all) send(peer, message);
    send(message.origin, message);
  }

  void inquire(const ControlMessage& message) {
    Inquiry& inquiry = inquiries[message.group];
    inquiry.abort = message;
    ControlMessage question = message;
    question.kind = Kind::question;
    question.text.clear();
    for (const auto& [peer, link] : links) inquiry.awaited.insert(peer);
    inquiry.awaited.insert(rank);
    inquiry.question = question;
    ask(message.group);
    auto self = shared_from_this();
    once.insert(loop->call_at(Deadline::after(std::chrono::milliseconds(400)), [self, group = message.group] { self->conclude(group); }));
  }

  // A rank that has not come to that call yet has nothing to say; it is asked again a little later.
  void ask(const std::string& group) {
    const auto it = inquiries.find(group);
    if (it == inquiries.end() || stopped) return;
    Inquiry& inquiry = it->second;
    if (inquiry.awaited.count(rank) != 0) {
      if (auto mine = events.called(group, inquiry.question.seq); !mine.empty()) {
        inquiry.answers[rank] = mine;
        inquiry.awaited.erase(rank);
      }
    }
    if (inquiry.awaited.empty()) return conclude(group);
    for (const int peer : inquiry.awaited) {
      if (peer != rank) send(peer, inquiry.question);
    }
    auto self = shared_from_this();
    once.insert(loop->call_at(Deadline::after(std::chrono::milliseconds(40)), [self, group] { self->ask(group); }));
  }

  void answered(const ControlMessage& message) {
    const auto it = inquiries.find(message.group);
    if (it == inquiries.end() || message.text.empty()) return;
    it->second.answers[message.rank] = message.text;
    it->second.awaited.erase(message.rank);
    if (it->second.awaited.empty()) conclude(message.group);
  }

  void conclude(const std::string& group) {
    const auto it = inquiries.find(group);
    if (it == inquiries.end() || stopped) return;
    ControlMessage message = it->second.abort;
    if (!it->second.answers.empty()) {
      message.text = "ranks called different things:";
      const char* separator = "";
      for (const auto& [peer, call] : it->second.answers) {
        message.text += fmt::format("{} rank {}: {}", separator, peer, call);
        separator = ";";
      }
    }
    inquiries.erase(it);
    deliver(message);
  }

  void stop() {
    stopped = true;
    loop->cancel(timer);
    for (const auto pending : once) loop->cancel(pending);
    ControlMessage bye;
    bye.kind = Kind::bye;
    bye.rank = rank;
    for (auto& [peer, link] : links) {
      link.outgoing += encode(bye);
      const ssize_t sent = ::send(link.fd.get(), link.outgoing.data(), link.outgoing.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      (void)sent;
      loop->remove(link.fd.get());
    }
    links.clear();
  }
};

Control::Control(std::shared_ptr<EventLoop> loop, int rank, std::vector<PeerInfo> peers, double heartbeat_s, Events events)
    : impl_(std::make_shared<Impl>()) {
  impl_->loop = std::move(loop);
  impl_->rank = rank;
  impl_->peers = std::move(peers);
  impl_->heartbeat_s = heartbeat_s;
  impl_->events = std::move(events);
  if (heartbeat_s > 0) {
    impl_->loop->post([impl = impl_] { impl->schedule(); });
  }
}

Control::~Control() {
  impl_->loop->post_and_wait([impl = impl_] { impl->stop(); });
}

void Control::adopt(int rank, UniqueFd connection) {
  auto shared = std::make_shared<UniqueFd>(std::move(connection));
  impl_->loop->post_and_wait([impl = impl_, rank, shared] { impl->adopt(rank, std::move(*shared)); });
}

void Control::expect_all_by(Deadline deadline) {
  impl_->loop->post([impl = impl_, deadline] {
    if (impl->stopped) return;
    const auto check = [impl] {
      if (impl->stopped) return;
      for (int r = 1; r < static_cast<int>(impl->peers.size()); ++r) {
        if (impl->links.count(r) == 0 && impl->gone.count(r) == 0) impl->declare_lost(r, "it never connected after joining");
      }
    };
    impl->once.insert(impl->loop->call_at(deadline, check));
  });
}

void Control::spread(const ControlMessage& abort) {
  impl_->loop->post([impl = impl_, abort] {
    if (!impl->stopped) impl->spread(abort);
  });
}

}  // namespace maniple
