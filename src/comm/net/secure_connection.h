// An authenticated connection, as a handshake leaves it, and the records in which its bytes travel.
//
// Records are the bytes of a connection, encrypted and authenticated. Without any I/O, so that they can be tested and
// fuzzed alone.
//
//   record   length:u32 of the plain bytes (1 to 64 Ki), as many encrypted bytes, tag[16]
//
// An AEAD with a key for each direction. The nonce counts the records, and the length is authenticated too: a record
// that was changed, left out, repeated, moved, sent back to its sender or made up by someone without the key does not
// open. What is cut off at the end of the stream is not a record's business: whoever expects more sees the connection
// end. Both ends move on to the next key after every 2^20 records, long before the cipher's limits.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "comm/base/unique_fd.h"

namespace maniple {

enum class Cipher : std::uint8_t { aes_256_gcm = 1, chacha20_poly1305 = 2 };
/// AES where this processor has instructions for it (and for GCM's multiplication), otherwise ChaCha20.
Cipher preferred_cipher() noexcept;

/// From which the keys of one direction of one connection follow.
using TrafficSecret = std::array<std::uint8_t, 32>;

struct ConnectionKeys {
  Cipher cipher = Cipher::aes_256_gcm;
  TrafficSecret send{};
  TrafficSecret receive{};
};

/// Of both directions, from the job's secret and everything that was said in the handshake (HKDF-SHA256).
ConnectionKeys derive_keys(Cipher cipher, std::span<const std::uint8_t> secret, std::string_view transcript,
                           bool dialler);

inline constexpr std::size_t kRecordHeaderBytes = 4;
inline constexpr std::size_t kRecordTagBytes = 16;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + kRecordTagBytes;
inline constexpr std::size_t kMaxRecordBytes = std::size_t{64} << 10;  ///< plain bytes in one record
inline constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;

/// The cipher, its present key and the number of the next record, of one direction.
class RecordCipher {
 public:
  RecordCipher(Cipher cipher, const TrafficSecret& secret, bool seals, std::uint64_t records_per_key);
  ~RecordCipher();
  RecordCipher(RecordCipher&&) noexcept;
  RecordCipher& operator=(RecordCipher&&) noexcept;

  /// Begins the next record, whose header is `header`; then all of its bytes, in as many steps as you like.
  void begin(const std::uint8_t* header);
  void step(const std::uint8_t* from, std::size_t size, std::uint8_t* to);
  void seal(std::uint8_t* tag);         ///< ends a record that is sealed
  bool opens(const std::uint8_t* tag);  ///< ends a record that is opened: whether it is authentic

 private:
  void set_key();
  struct State;
  std::unique_ptr<State> state_;
};

class RecordSealer {
 public:
  RecordSealer(Cipher cipher, const TrafficSecret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(cipher, secret, true, records_per_key) {}

  /// Appends to `out` the records that hold `parts`, in as few records as possible.
  void seal(std::span<const std::string_view> parts, std::string& out);
  void seal(std::string_view bytes, std::string& out) { seal(std::span(&bytes, 1), out); }

  /// One record, from the first `size` bytes of `parts` (1 to kMaxRecordBytes), to `to`, which has room for
  /// kRecordOverhead bytes more.
  void seal_record(std::span<const iovec> parts, std::size_t size, char* to);

 private:
  RecordCipher cipher_;
};

class RecordOpener {
 public:
  RecordOpener(Cipher cipher, const TrafficSecret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(cipher, secret, false, records_per_key) {}

  /// Takes bytes from the front of `bytes`, which it may overwrite; the plain bytes of a record once one is complete,
  /// valid until the next call. nullopt: more bytes are needed, and all of `bytes` were taken. Throws ProtocolError,
  /// then and ever after, if they are not what the other end sealed.
  std::optional<std::string_view> next(std::span<char>& bytes);

  /// The same for who keeps the bytes itself: how many plain bytes a record has, by its header; and all of a record,
  /// opened in its place, or into the first `size` bytes of `to`, which mean nothing if this throws.
  std::size_t size_of(const char* header);
  std::string_view open_record(char* record, std::size_t size);
  void open_record(const char* record, std::size_t size, std::span<const iovec> to);

 private:
  void end_record(const char* tag);
  RecordCipher cipher_;
  std::string partial_;  // of a record that has not come whole yet
  bool opened_partial_ = false;
  bool failed_ = false;
};

/// The descriptor of an authenticated connection, and the keys of its records.
struct SecureConnection {
  SecureConnection() = default;
  explicit SecureConnection(UniqueFd descriptor, std::optional<ConnectionKeys> record_keys = std::nullopt) noexcept
      : fd(std::move(descriptor)), keys(record_keys) {}

  int get() const noexcept { return fd.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd); }

  UniqueFd fd;
  /// All that travels from here on is in records with these keys. None: it travels as it is, which holds for
  /// connections that hand over shared memory, and for data unless MANIPLE_ENCRYPT is 1.
  std::optional<ConnectionKeys> keys;
};

}  // namespace maniple
