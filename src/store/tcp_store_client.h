// The client's end of one store connection.
//
// Threads that await replies share the connection without a thread of its own: whoever finds nobody reading reads,
// hands the others theirs, and passes the reading on when its own has come. So a thread that waits for a key for an
// hour never keeps another one's set() waiting.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "net/address.h"
#include "net/secure_connection.h"
#include "store/wire.h"
#include <maniple/comm/store.h>

namespace maniple {

class TcpStoreClient final : public Store {
 public:
  /// `connection` is non-blocking and has keys.
  TcpStoreClient(SecureConnection connection, Address server, std::shared_ptr<void> keep);

  void set(std::string_view key, std::string_view value) override;
  std::string get(std::string_view key, Deadline deadline) override;
  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<bool> check(std::span<const std::string> keys) override;
  std::int64_t add(std::string_view key, std::int64_t delta) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override;
  bool erase(std::string_view key) override;
  std::int64_t num_keys() override;
  std::string describe() const override;

 private:
  struct Call {
    std::optional<Frame> reply;
  };

  /// The reply's body; nullopt when the deadline passed first. Throws what the server answered, or that it is gone.
  std::optional<std::string> call(StoreOp op, std::string_view head, std::string_view tail, Deadline deadline);
  std::string call_now(StoreOp op, std::string_view head, std::string_view tail = {});
  std::string await_keys(StoreOp op, std::span<const std::string> keys, Deadline deadline);
  std::optional<std::vector<bool>> try_check(std::span<const std::string> keys, Deadline deadline);

  void send_frame(std::uint32_t id, StoreOp op, std::string_view head, std::string_view tail, Deadline deadline);
  void send_sealed(Deadline deadline);
  void await_room(Deadline deadline);
  void lose(const std::string& reason, bool forged = false);
  std::optional<Frame> await_reply(std::uint32_t id, Call& call, Deadline deadline);
  void read_as_leader(std::unique_lock<std::mutex>& lock, Deadline deadline);
  void read_available();
  [[noreturn]] void throw_lost(const std::string& reason) const;

  Address server_;
  std::uint32_t generation_ = fork_generation();
  UniqueFd fd_;
  std::shared_ptr<void> keep_;

  std::mutex send_mutex_;  // held while one frame is written; taken before mutex_
  RecordSealer sealer_;
  std::string sealed_;  // records on their way

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint32_t next_id_ = 1;
  std::map<std::uint32_t, Call*> calls_;
  bool reading_ = false;  // somebody reads; only that thread touches opener_, reader_ and buffer_
  std::string lost_;      // why the connection is of no more use
  bool forged_ = false;   // because the bytes were not those that the other end had sent
  RecordOpener opener_;
  FrameReader reader_{&reply_limit};
  std::vector<char> buffer_ = std::vector<char>(std::size_t{16} << 10);
};

}  // namespace maniple
