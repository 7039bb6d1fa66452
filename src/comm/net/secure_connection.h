// An authenticated connection, as a handshake returns it, and the records that carry its bytes.
//
// Records encrypt and authenticate the bytes of a connection. This code is free of I/O, so that it can be tested and
// fuzzed alone.
//
//   record   length:u32 of the plain bytes (1 to 64 Ki), the same number of encrypted bytes, tag[16]
//
// Each direction has its own AEAD key. The nonce counts the records, and the length is authenticated, too: a record
// that was changed, dropped, repeated, reordered, reflected to its sender or forged without the key does not open.
// Truncation of the stream is not detected by records: a reader that expects more sees the connection end. Both ends
// switch to the next key after every 2^20 records, far below the cipher's limits.
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
/// AES if the processor has instructions for it (and for GCM's multiplication), otherwise ChaCha20.
Cipher preferred_cipher() noexcept;

/// The secret from which the keys of one direction of one connection are derived.
using TrafficSecret = std::array<std::uint8_t, 32>;

struct ConnectionKeys {
  Cipher cipher = Cipher::aes_256_gcm;
  TrafficSecret send{};
  TrafficSecret receive{};
};

/// Derives the keys of both directions from the job's secret and the complete transcript of the handshake
/// (HKDF-SHA256).
ConnectionKeys derive_keys(Cipher cipher, std::span<const std::uint8_t> secret, std::string_view transcript,
                           bool dialler);

inline constexpr std::size_t kRecordHeaderBytes = 4;
inline constexpr std::size_t kRecordTagBytes = 16;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + kRecordTagBytes;
inline constexpr std::size_t kMaxRecordBytes = std::size_t{64} << 10;  ///< plaintext bytes in one record
inline constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;

/// The cipher of one direction, its current key and the number of the next record.
class RecordCipher {
 public:
  RecordCipher(Cipher cipher, const TrafficSecret& secret, bool seals, std::uint64_t records_per_key);
  ~RecordCipher();
  RecordCipher(RecordCipher&&) noexcept;
  RecordCipher& operator=(RecordCipher&&) noexcept;

  /// Begins the next record, with header `header`. Then pass all of its bytes, in any number of steps.
  void begin(const std::uint8_t* header);
  void step(const std::uint8_t* from, std::size_t size, std::uint8_t* to);
  void seal(std::uint8_t* tag);         ///< ends a sealed record
  bool opens(const std::uint8_t* tag);  ///< ends an opened record; whether it is authentic

 private:
  void set_key();
  struct State;
  std::unique_ptr<State> state_;
};

class RecordSealer {
 public:
  RecordSealer(Cipher cipher, const TrafficSecret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(cipher, secret, true, records_per_key) {}

  /// Appends `parts` to `out` in as few records as possible.
  void seal(std::span<const std::string_view> parts, std::string& out);
  void seal(std::string_view bytes, std::string& out) { seal(std::span(&bytes, 1), out); }

  /// Writes one record with the first `size` bytes of `parts` (1 to kMaxRecordBytes) to `to`, which has room for `size`
  /// + kRecordOverhead bytes.
  void seal_record(std::span<const iovec> parts, std::size_t size, char* to);

 private:
  RecordCipher cipher_;
};

class RecordOpener {
 public:
  RecordOpener(Cipher cipher, const TrafficSecret& secret, std::uint64_t records_per_key = kRecordsPerKey)
      : cipher_(cipher, secret, false, records_per_key) {}

  /// Consumes bytes from the front of `bytes`, which it may overwrite. Returns the plaintext of a record once it is
  /// complete, valid until the next call; nullopt means that all of `bytes` was consumed and more is needed. If the
  /// bytes are not what the other end sealed, throws ProtocolError, now and in every later call.
  std::optional<std::string_view> next(std::span<char>& bytes);

  /// For callers that buffer the bytes themselves: size_of returns the plaintext size from a record's header,
  /// open_record opens a complete record in place, or into the first `size` bytes of `to`. If open_record throws, the
  /// contents of `to` are undefined.
  std::size_t size_of(const char* header);
  std::string_view open_record(char* record, std::size_t size);
  void open_record(const char* record, std::size_t size, std::span<const iovec> to);

 private:
  void end_record(const char* tag);
  RecordCipher cipher_;
  std::string partial_;  // an incomplete record
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
  /// Keys of the records that carry all further bytes. Without keys, bytes travel as they are: on connections that hand
  /// over shared memory, and on data connections unless MANIPLE_ENCRYPT is 1.
  std::optional<ConnectionKeys> keys;
};

}  // namespace maniple
