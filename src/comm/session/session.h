// One rank's membership in a world: the other ranks, connections to and from them, and the failure detector.
//
// All groups of the rank share one session. It implements the Connector that the transports use.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "comm/base/abort_signal.h"
#include "comm/base/mutex.h"
#include "comm/net/handshake.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/session/call_watch.h"
#include "comm/session/failure_detector.h"
#include "comm/session/past_groups.h"
#include "comm/session/peer_table.h"
#include "comm/session/segment_broker.h"
#include "comm/session/wait_report.h"
#include "comm/shm/segment.h"
#include "comm/transport/connector.h"
#include <maniple/comm/options.h>

namespace maniple {

class Session : public Connector {
 public:
  /// `chosen`: settings that the program passed to init() and that must be alike on all ranks.
  static std::shared_ptr<Session> start(RendezvousResult result, TransportKind transport, const ChosenSettings& chosen,
                                        Deadline deadline);
  ~Session() override;

  int rank() const noexcept { return rendezvous_.identity.rank; }
  int world_size() const noexcept { return rendezvous_.identity.world_size; }
  const PeerInfo& peer(int rank) const { return table_.peers.at(rank); }
  std::uint64_t world_id() const noexcept { return table_.world_id; }
  const std::shared_ptr<Store>& store() const noexcept { return rendezvous_.store; }
  bool same_process(int rank) const { return peer(rank).process == peer(this->rank()).process; }
  bool same_host(int rank) const { return peer(rank).host_key == peer(this->rank()).host_key; }

  // ---- Connector ---------------------------------------------------------------------------------------------
  SecureConnection dial(int global_rank, const std::string& topic, Deadline deadline,
                        const AbortSignal& abort) override;
  SecureConnection try_take(int global_rank, const std::string& topic) override;
  int arrival_fd() const noexcept override { return arrivals_.get(); }

  // ---- Shared memory -------------------------------------------------------------------------------------------
  /// Maps the same segment on all `members` (global ranks of this host, this one included). The first member creates
  /// it, and its `bytes` wins; the others accept its size.
  std::shared_ptr<Segment> share_segment(const std::string& topic, const std::vector<int>& members, std::size_t bytes,
                                         Deadline deadline, const AbortSignal& abort);
  /// Shares an open file, such as device memory, that `members.front()` passes; the others pass -1. Returns a
  /// descriptor that the caller owns; the maker gets an empty one.
  UniqueFd share_descriptor(const std::string& topic, const std::vector<int>& members, int descriptor,
                            Deadline deadline, const AbortSignal& abort);

  // ---- Groups and their ends -----------------------------------------------------------------------------------
  struct GroupLink {
    std::vector<int> members;  ///< global ranks
    std::shared_ptr<AbortSignal> abort;
    std::function<RankCall(std::uint64_t seq)> called;  ///< this rank's call number seq
    std::function<CallProgress()> progress;
    /// Whether all ranks of a call give the same arguments. (On a device, each may have counts of its own.)
    bool compares_arguments = true;
    // open_group sets `gone` and `message`. The callbacks below must not block or use the session, and are not called
    // after remove_group.
    std::function<void(int global_rank)> gone = {};  ///< it has left or ended; which of the two is unknown
    std::function<MessageWait()> message = {};
    /// A rank has left in good order, after its call number seq.
    std::function<void(int global_rank, std::uint64_t seq)> departed = {};
  };
  void add_group(const std::string& name, GroupLink link);
  void open_group(const std::string& name, std::function<void(int global_rank)> gone,
                  std::function<MessageWait()> message);
  void remove_group(const std::string& name);
  void skip_group(const std::string& name);  ///< others make the group without this rank

  /// Reports to the other ranks that this group failed here. Returns at once.
  void spread_abort(const std::string& group, std::uint64_t seq, const std::exception_ptr& cause);
  /// Announces that this rank left the group after its call number seq: a rank that waits on a device in a later call
  /// cannot see that otherwise. Returns at once.
  void announce_departure(const std::string& group, std::uint64_t seq);
  /// Called while this rank waits in call number seq: if another rank made a different call under that number, the
  /// group fails. Returns at once. Each rank's CallWatch calls it, too.
  void compare_calls(const std::string& group, std::uint64_t seq);
  bool has_failure_detector() const noexcept { return detector_ != nullptr; }
  /// Waits until the leader has decided which members of `request.group` survive (survivors.h). Throws Timeout, naming
  /// the members that it waits for, or PeerLost if the other ranks have declared this one lost.
  detector::Survivors survivors_of(const detector::Shrink& request, Deadline deadline) MANIPLE_EXCLUDES(mutex_);

 private:
  Session(RendezvousResult result, TransportKind transport);
  void listen();
  /// Offers the file, as its maker, to the other members.
  void offer(const std::string& topic, const std::vector<int>& members, SharedFile file);
  /// Takes the maker's offer, from this process or another.
  template <class Here, class There>
  auto take(const std::string& topic, int maker, Deadline deadline, const AbortSignal& abort, Here&& here,
            There&& there);
  void exchange_addresses(const ChosenSettings& chosen, Deadline deadline);
  void start_failure_detector(Deadline deadline);
  std::string refusal(const Hello& hello, const Address& peer) const;
  void accept(SecureConnection connection, const Hello& hello);
  void start_wait_reports();
  void start_call_watch();
  RankCall call_of(const std::string& group, std::uint64_t seq);
  std::vector<WaitReports::Group> group_progress(bool messages);
  SecureConnection dial_control(int rank, Deadline deadline, int cancel = -1) const;
  static std::string group_of(const std::string& topic);
  void forget_past_groups() MANIPLE_REQUIRES(mutex_);
  void on_lost(int rank, const std::string& text) MANIPLE_EXCLUDES(mutex_);
  void on_gone(int rank);
  void on_aborted(const detector::Abort& message);
  void on_departed(const detector::Departed& message);
  void on_survivors(const detector::Survivors& decision);
  void on_missing(const detector::Missing& missing);

  RendezvousResult rendezvous_;
  TransportKind transport_;
  bool encrypts_;  // encrypts data over TCP
  std::shared_ptr<EventLoop> loop_;
  PeerTable table_;
  UniqueFd arrivals_;

  Mutex mutex_;
  // Data connections not taken yet.
  std::map<std::pair<int, std::string>, std::deque<SecureConnection>> waiting_ MANIPLE_GUARDED_BY(mutex_);
  // Control connections accepted before the failure detector existed.
  std::map<int, SecureConnection> early_control_ MANIPLE_GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, UniqueFd>> early_segments_ MANIPLE_GUARDED_BY(mutex_);
  std::map<std::string, GroupLink> groups_ MANIPLE_GUARDED_BY(mutex_);
  std::map<int, std::string> lost_ MANIPLE_GUARDED_BY(mutex_);
  std::set<int> gone_ MANIPLE_GUARDED_BY(mutex_);  // left or lost
  PastGroups past_groups_ MANIPLE_GUARDED_BY(mutex_);
  // Aborts of groups that this rank has not made yet.
  std::map<std::string, std::exception_ptr> early_aborts_ MANIPLE_GUARDED_BY(mutex_);
  // Replies to survivors_of, by group.
  std::map<std::string, detector::Survivors> survivors_ MANIPLE_GUARDED_BY(mutex_);
  std::map<std::string, detector::Missing> missing_ MANIPLE_GUARDED_BY(mutex_);
  CondVar survivors_changed_;  // also when this rank is lost

  std::unique_ptr<SegmentBroker> segments_;
  std::unique_ptr<FailureDetector> detector_;
  std::shared_ptr<WaitReports> waits_ MANIPLE_GUARDED_BY(mutex_);
  std::shared_ptr<CallWatch> watch_;
  std::unique_ptr<Acceptor> tcp_;
  std::unique_ptr<Acceptor> unix_;
};

}  // namespace maniple
