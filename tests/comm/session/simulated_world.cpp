#include "comm/session/simulated_world.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>

namespace maniple::harness {

namespace d = detector;

SimulatedWorld::SimulatedWorld(Options options) : options_(std::move(options)), random_(options_.seed * 2 + 1) {
  const auto n = options_.hosts.size();
  processes_.resize(n);
  backlogs_.resize(n);
  for (std::size_t r = 0; r < n; ++r) {
    std::vector<d::Core::Member> members;
    for (std::size_t other = 0; other < n; ++other)
      members.push_back({"rank " + std::to_string(other), options_.hosts[r] == options_.hosts[other]});
    processes_[r].core = std::make_unique<d::Core>(static_cast<int>(r), std::move(members), options_.heartbeat_s);
    if (!options_.connected && r != 0) processes_[r].state = State::joining;
  }
  for (int r = 0; r < size(); ++r) {
    handle(r, d::Start{});
  }
  for (int r = 1; options_.connected && r < size(); ++r) {
    connect(0, r);
    handle(0, d::Adopted{r});
    handle(r, d::Adopted{0});
  }
}

double SimulatedWorld::random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<double>(random_ >> 11) * 0x1p-53;
}

double SimulatedWorld::delay() {
  return options_.least_delay + (options_.most_delay - options_.least_delay) * random();
}

void SimulatedWorld::fail(const std::string& what) {
  if (broken_.empty()) broken_ = fmt::format("at {:.4f} s: {}", now_, what);
}

void SimulatedWorld::note(int rank, const std::string& what) const {
  if (options_.log) std::printf("%9.4f rank %d: %s\n", now_, rank, what.c_str());
}

bool SimulatedWorld::counts(const Item& item) {
  switch (item.kind) {
    case Kind::wake:
    case Kind::resume:
    case Kind::dial_limit: return false;
    case Kind::message: return item.content >= 0;
    default: return true;
  }
}

void SimulatedWorld::push(Item item) {
  item.order = ++order_;
  if (counts(item)) ++under_way_;
  queue_.push_back(item);
  std::push_heap(queue_.begin(), queue_.end());
}

// ---- The network

// When something sent now from one process to another arrives at the earliest.
double SimulatedWorld::passes_at(int from, int to, double when) const {
  const auto it = cuts_.find({from, to});
  return it == cuts_.end() ? when : std::max(when, it->second);
}

int SimulatedWorld::connect(int a, int b) {
  connections_.push_back({.ends = {a, b}});
  const int number = static_cast<int>(connections_.size()) - 1;
  process(a).links[b] = number;
  process(b).links[a] = number;
  return number;
}

int SimulatedWorld::side_of(int connection, int rank) const {
  return connections_[static_cast<std::size_t>(connection)].ends[0] == rank ? 0 : 1;
}

// Closes one side; the other sees the end after all that was sent before.
void SimulatedWorld::end(int connection, int side) {
  Connection& it = connections_[static_cast<std::size_t>(connection)];
  if (!std::exchange(it.open[side], false) || !it.open[1 - side]) return;
  const int from = it.ends[side], to = it.ends[1 - side];
  const double when = passes_at(from, to, std::max(it.last_arrival[1 - side], now_ + delay()));
  it.last_arrival[1 - side] = when;
  if (when < kForever) push({.at = when, .kind = Kind::end, .rank = to, .peer = from, .number = connection});
}

void SimulatedWorld::send(int rank, const d::Send& send) {
  const auto link = process(rank).links.find(send.to);
  if (link == process(rank).links.end())
    return fail(fmt::format("rank {} sends to rank {} without a connection", rank, send.to));
  Connection& it = connections_[static_cast<std::size_t>(link->second)];
  const int side = side_of(link->second, rank);
  if (!it.open[side] || !it.open[1 - side]) return;
  const double when = passes_at(rank, send.to, std::max(it.last_arrival[1 - side], now_ + delay()));
  it.last_arrival[1 - side] = when;
  if (when >= kForever) return;
  Item item{.at = when, .kind = Kind::message, .rank = send.to, .peer = rank, .number = link->second};
  if (!std::holds_alternative<d::Heartbeat>(send.message)) {
    if (free_contents_.empty()) {
      free_contents_.push_back(static_cast<int>(contents_.size()));
      contents_.emplace_back();
    }
    item.content = free_contents_.back();
    free_contents_.pop_back();
    contents_[static_cast<std::size_t>(item.content)] = send.message;
  }
  push(item);
}

bool SimulatedWorld::listens(int rank) const {
  const State state = process(rank).state;
  return state == State::alive || state == State::joining;
}

void SimulatedWorld::dial(int rank, const d::Dial& dial) {
  const int number = ++dials_;
  process(rank).dial = number;
  const double begin = now_ + std::chrono::duration<double>(dial.delay).count();
  const double limit = begin + std::chrono::duration<double>(dial.limit).count();
  open_dials_.insert({rank, number});
  push({.at = limit, .kind = Kind::dial_limit, .rank = rank, .peer = dial.to, .number = number});
  const double there = passes_at(rank, dial.to, begin + delay());
  if (there < limit) push({.at = there, .kind = Kind::handshake, .rank = dial.to, .peer = rank, .number = number});
}

// ---- What happens

void SimulatedWorld::at(double when, std::function<void()> action) {
  actions_.push_back(std::move(action));
  push({.at = when, .kind = Kind::action, .content = static_cast<int>(actions_.size()) - 1});
}

void SimulatedWorld::join(int rank) {
  Process& it = process(rank);
  if (it.state != State::joining) return;
  if (!listens(0) || process(0).vanished) return kill(rank);  // its init() fails
  note(rank, "joins");
  it.state = State::alive;
  connect(0, rank);
  handle(0, d::Adopted{rank});
  handle(rank, d::Adopted{0});
}

void SimulatedWorld::drop_links(int rank) {
  for (const auto& [peer, connection] : process(rank).links) end(connection, side_of(connection, rank));
  process(rank).links.clear();
}

void SimulatedWorld::kill(int rank) {
  Process& it = process(rank);
  if (it.state == State::dead || it.state == State::left || it.vanished) return;
  note(rank, "is killed");
  it.state = State::dead;
  open_dials_.erase({rank, it.dial});
  drop_links(rank);
}

void SimulatedWorld::kill_while_sending(int rank, int sends) {
  if (runs(rank)) process(rank).dies_after = sends;
}

void SimulatedWorld::vanish(int rank) {
  if (!runs(rank)) return;
  note(rank, "vanishes");
  process(rank).vanished = true;
  open_dials_.erase({rank, process(rank).dial});
}

void SimulatedWorld::leave(int rank) {
  Process& it = process(rank);
  if (!runs(rank)) return;
  if (it.held_until > now_) {
    if (it.held_until < kForever) at(it.held_until + 0.001, [this, rank] { leave(rank); });
    return;
  }
  note(rank, "leaves");
  it.state = State::leaving;
  handle(rank, d::Leave{});
  if (it.state == State::dead) return;  // while it said so
  // A handshake under way gets a little time.
  if (open_dials_.count({rank, it.dial}) == 0) {
    it.state = State::left;
    return drop_links(rank);
  }
  at(now_ + 0.2, [this, rank] {
    if (process(rank).state != State::leaving) return;
    process(rank).state = State::left;
    open_dials_.erase({rank, process(rank).dial});
    drop_links(rank);
  });
}

void SimulatedWorld::hold(int rank, double until, char state) {
  Process& it = process(rank);
  if (!runs(rank) || until <= it.held_until) return;
  note(rank, fmt::format("is held as {} until {:.3f}", state, until));
  it.held_until = until;
  it.held_as = state;
  if (it.held_until < kForever) push({.at = it.held_until, .kind = Kind::resume, .rank = rank});
}

void SimulatedWorld::cut(int from, int to, double until) {
  note(from, fmt::format("does not reach rank {} until {:.3f}", to, until));
  double& it = cuts_[{from, to}];
  it = std::max(it, until);
}

void SimulatedWorld::break_connection(int a, int b) {
  const auto link = process(a).links.find(b);
  if (link == process(a).links.end()) return;
  note(a, fmt::format("connection to rank {} breaks", b));
  const int number = link->second;
  Connection& it = connections_[static_cast<std::size_t>(number)];
  if (!it.open[0] || !it.open[1]) return;
  it.open[0] = it.open[1] = false;
  push({.at = now_ + delay(), .kind = Kind::end, .rank = a, .peer = b, .number = number});
  push({.at = now_ + delay(), .kind = Kind::end, .rank = b, .peer = a, .number = number});
}

void SimulatedWorld::abort(int rank, const std::string& group, ErrorInfo error, std::uint64_t seq) {
  if (!runs(rank) || process(rank).aborted.count(group) != 0) return;
  note(rank, "fails in group " + group);
  handle(rank, d::AbortHere{{.rank = rank, .seq = seq, .group = group, .error = std::move(error)}});
}

void SimulatedWorld::announce(int rank, d::Message message) {
  if (runs(rank)) handle(rank, d::Announce{std::move(message)});
}

void SimulatedWorld::run(double until) {
  while (!queue_.empty() && queue_.front().at <= until && broken_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end());
    Item item = queue_.back();
    queue_.pop_back();
    now_ = item.at;
    happen(item);
  }
  now_ = std::max(now_, until);
}

void SimulatedWorld::happen(Item& item) {
  if (counts(item)) --under_way_;
  if (item.kind == Kind::action) return actions_[static_cast<std::size_t>(item.content)]();
  Process& it = process(item.rank);
  auto& backlog = backlogs_[static_cast<std::size_t>(item.rank)];
  if (it.held_until > now_) {
    const bool has_ended = it.state == State::dead || it.state == State::left || it.vanished;
    if (item.kind == Kind::message || item.kind == Kind::end) it.heard[item.peer] = now_;
    if (!has_ended) return backlog.push_back(item);
  }
  if (item.kind != Kind::resume) return deliver(item);
  std::vector<Item> arrived = std::exchange(backlog, {});
  std::stable_partition(arrived.begin(), arrived.end(), [](const Item& one) { return one.kind != Kind::wake; });
  for (Item& one : arrived) deliver(one);
}

void SimulatedWorld::deliver(Item& item) {
  Process& it = process(item.rank);
  const bool ended = it.state == State::dead || it.state == State::left || it.vanished;
  switch (item.kind) {
    case Kind::message: {
      const auto link = it.links.find(item.peer);
      const bool current = !ended && link != it.links.end() && link->second == item.number;
      d::Message message;
      if (item.content >= 0) {
        message = std::move(contents_[static_cast<std::size_t>(item.content)]);
        free_contents_.push_back(item.content);
      }
      if (!current || !connections_[static_cast<std::size_t>(item.number)].open[side_of(item.number, item.rank)])
        return;
      it.heard[item.peer] = now_;
      return handle(item.rank, d::Received{.from = item.peer, .message = std::move(message)});
    }
    case Kind::end: {
      const auto link = it.links.find(item.peer);
      if (ended || link == it.links.end() || link->second != item.number) return;
      connections_[static_cast<std::size_t>(item.number)].open[side_of(item.number, item.rank)] = false;
      return handle(item.rank, d::Closed{.peer = item.peer, .why = "its process ended without leaving the group"});
    }
    case Kind::handshake: {
      // The rank is the one that is dialled.
      if (open_dials_.count({item.peer, item.number}) == 0 || it.vanished) return;
      const double back = passes_at(item.rank, item.peer, now_ + delay());
      if (back >= kForever) return;
      if (!listens(item.rank)) {
        push({.at = back, .kind = Kind::dial_failed, .rank = item.peer, .peer = item.rank, .number = item.number});
        return;
      }
      const State dialler = process(item.peer).state;
      if (dialler != State::alive && dialler != State::leaving) return;
      connections_.push_back({.ends = {item.rank, item.peer}});
      const int number = static_cast<int>(connections_.size()) - 1;
      it.links[item.peer] = number;
      connections_[static_cast<std::size_t>(number)].last_arrival[1] = back;
      push({.at = back,
            .kind = Kind::dialed,
            .rank = item.peer,
            .peer = item.rank,
            .number = item.number,
            .content = number});
      return handle(item.rank, d::Adopted{item.peer});
    }
    case Kind::dialed: {
      if (open_dials_.erase({item.rank, item.number}) == 0 || ended) {
        if (!it.vanished) end(item.content, 1);
        return;
      }
      if (it.dial != item.number) return end(item.content, 1);
      it.links[item.peer] = item.content;
      handle(item.rank, d::Dialed{item.peer});
      if (it.state == State::leaving) {
        it.state = State::left;
        drop_links(item.rank);
      }
      return;
    }
    case Kind::dial_failed:
    case Kind::dial_limit: {
      if (open_dials_.erase({item.rank, item.number}) == 0 || ended || it.dial != item.number) return;
      const bool refused = item.kind == Kind::dial_failed;
      return handle(item.rank,
                    d::DialFailed{.to = item.peer, .refused = refused, .why = refused ? "refused" : "timed out"});
    }
    case Kind::refused:
      it.probing.erase(item.peer);
      if (!ended) handle(item.rank, d::ProbeRefused{item.peer});
      return;
    case Kind::wake:
      if (it.wake_at <= item.at) it.wake_at = std::numeric_limits<double>::infinity();
      if (!ended) handle(item.rank, d::Wake{});
      return;
    case Kind::resume:
    case Kind::action: return;
  }
}

}  // namespace maniple::harness
