// The store for processes that share a file. Every change is one record appended under an exclusive lock; readers
// replay the records they have not seen yet. A wait polls the file's size, with pauses that grow to 10 ms, because file
// systems shared between hosts lack notifications.
#include "comm/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/codec.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"
#include "comm/base/write_all.h"
#include "comm/store/key_table.h"
#include <maniple/comm/store.h>

namespace maniple {
namespace {

constexpr std::size_t kFileRecordBytes = 4 + 1 + 2 + 4;

std::uint32_t fnv1a(std::string_view bytes) {
  std::uint32_t hash = 2166136261u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

std::string encode_record(const Record& record) {
  ByteWriter writer;
  writer.put(record.kind);
  writer.put(static_cast<std::uint16_t>(record.key.size()));
  writer.put(static_cast<std::uint32_t>(record.value.size()));
  writer.put_raw(record.key);
  writer.put_raw(record.value);
  ByteWriter checked;
  checked.put(fnv1a(writer.bytes()));
  checked.put_raw(writer.bytes());
  return checked.take();
}

std::optional<Record> decode_record(std::string_view& bytes) {
  if (bytes.size() < kFileRecordBytes) return std::nullopt;
  ByteReader reader(bytes);
  const auto check = reader.get<std::uint32_t>();
  Record record;
  record.kind = reader.get<RecordKind>();
  const auto key_length = reader.get<std::uint16_t>();
  const auto value_length = reader.get<std::uint32_t>();
  const bool known = record.kind == RecordKind::set || record.kind == RecordKind::erase;
  if (!known || key_length == 0 || key_length > kMaxKeyBytes || value_length > kMaxValueBytes) {
    throw ProtocolError("an impossible record");
  }
  const std::size_t length = kFileRecordBytes + key_length + value_length;
  if (bytes.size() < length) return std::nullopt;
  record.key = reader.get_raw(key_length);
  record.value = reader.get_raw(value_length);
  if (check != fnv1a(bytes.substr(sizeof(check), length - sizeof(check)))) {
    if (bytes.size() == length) return std::nullopt;
    throw ProtocolError("a record with a wrong checksum");
  }
  bytes.remove_prefix(length);
  return record;
}

namespace {

constexpr std::chrono::seconds kLockLimit{60};
constexpr std::chrono::microseconds kShortestPause{200};
constexpr std::chrono::microseconds kLongestPause{10'000};
// Much more than a job ever writes. A loop that sets the same key for days should end in an error instead of a full
// disk.
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{4} << 30;

/// The file's lock between processes. A mutex excludes threads of this process.
class FileLock {
 public:
  FileLock(int fd, int kind, const std::string& path) : fd_(fd) {
    const Deadline deadline = Deadline::after(kLockLimit);
    auto pause = kShortestPause;
    while (::flock(fd, kind | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) throw_system_error(fmt::format("lock file store {}", path));
      if (deadline.expired()) {
        throw Timeout(fmt::format("file store {}: another process has held its lock for {} s; is it stopped?", path,
                                  kLockLimit.count()),
                      {}, std::chrono::duration<double>(kLockLimit).count());
      }
      std::this_thread::sleep_for(pause);  // sleep: between two tries for a lock that another host may hold
      pause = std::min(pause * 2, kLongestPause);
    }
  }
  ~FileLock() { ::flock(fd_, LOCK_UN); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

const char* kind_of(mode_t mode) noexcept {
  if (S_ISREG(mode)) return "a regular file";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISFIFO(mode)) return "a named pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

class FileStore final : public Store {
 public:
  explicit FileStore(const std::string& path) : path_(path) {
    MANIPLE_REQUIRE(!path.empty(), "a file store needs a path");
    // A child of fork() that kept the descriptor would hold the lock of a parent that died.
    fd_ = kept_from_children(open_file(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd_) throw_not_opened(errno);
    const struct stat status = look();
    MANIPLE_REQUIRE(S_ISREG(status.st_mode), "file store {}: it is {}, not a regular file", path,
                    kind_of(status.st_mode));
    MANIPLE_REQUIRE(status.st_uid == ::geteuid(), "file store {}: it belongs to user {}, not to user {}", path,
                    status.st_uid, ::geteuid());
    MANIPLE_REQUIRE((status.st_mode & 077) == 0,
                    "file store {}: its mode is {:03o}, which lets others at it; expected 600: remove it, or chmod 600",
                    path, status.st_mode & 0777);
    const FileLock lock(fd_.get(), LOCK_EX, path_);
    begin();
  }

  void set(std::string_view key, std::string_view value) override {
    require_key(key);
    require_value(value);
    const Session session(*this, LOCK_EX);
    table_set(key, value);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string owned(key);
    return multi_get(std::span(&owned, 1), deadline).front();
  }

  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override {
    std::vector<std::string> values;
    await(keys, deadline, [&]() MANIPLE_REQUIRES(mutex_) {
      for (const std::string& key : keys) values.push_back(*table_.find(key));
    });
    return values;
  }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    await(keys, deadline, [] {});
  }

  std::vector<bool> check(std::span<const std::string> keys) override {
    require_keys(keys);
    const Session session(*this, LOCK_SH);
    return present(keys);
  }

  std::int64_t add(std::string_view key, std::int64_t delta) override {
    require_key(key);
    const Session session(*this, LOCK_EX);
    const Value value = table_.find(key);
    const std::int64_t sum = sum_of(key, value.get(), delta);
    table_set(key, std::to_string(sum));
    return sum;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override {
    require_key(key);
    require_value(desired);
    const Session session(*this, LOCK_EX);
    const Value value = table_.find(key);
    const bool matches = value == nullptr ? expected.empty() : *value == expected;
    if (!matches) return value == nullptr ? std::string(expected) : *value;
    table_set(key, desired);
    return std::string(desired);
  }

  bool erase(std::string_view key) override {
    require_key(key);
    const Session session(*this, LOCK_EX);
    if (table_.find(key) == nullptr) return false;
    append({RecordKind::erase, key, {}});
    return table_.erase(key);
  }

  std::int64_t num_keys() override {
    const Session session(*this, LOCK_SH);
    return static_cast<std::int64_t>(table_.size());
  }

  std::string describe() const override { return "file store " + path_; }

 private:
  /// Holds both locks; its constructor brings the table up to date.
  struct MANIPLE_SCOPED_CAPABILITY Session {
    Session(FileStore& store, int kind) MANIPLE_ACQUIRE(store.mutex_)
        : threads(store.require_owned().mutex_), processes(store.fd_.get(), kind, store.path_) {
      store.catch_up();
    }
    ~Session() MANIPLE_RELEASE() {}
    MutexLock threads;
    FileLock processes;
  };

  FileStore& require_owned() {
    maniple::require_owned(guard_, describe());
    return *this;
  }

  /// Throws an error that describes what exists at the path instead of a file store.
  [[noreturn]] void throw_not_opened(int code) const {
    struct stat status{};
    std::string there;
    if (::lstat(path_.c_str(), &status) == 0) {
      there = fmt::format(
          " (it is {} of user {} with mode {:03o}; expected a regular file of user {} with mode 600, or none)",
          kind_of(status.st_mode), status.st_uid, status.st_mode & 0777, ::geteuid());
    }
    throw_system_error(fmt::format("open file store {}{}", path_, there), code);
  }

  struct stat look() const {
    struct stat status{};
    if (::fstat(fd_.get(), &status) != 0) throw_system_error(fmt::format("stat file store {}", path_));
    return status;
  }

  std::uint64_t file_size() const {
    const struct stat status = look();
    if (status.st_nlink == 0) {
      throw SystemError(fmt::format("file store {}: the file was removed while it was in use", path_), ENOENT);
    }
    return static_cast<std::uint64_t>(status.st_size);
  }

  /// Called by the constructor, when no other thread can access the store.
  void begin() MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
    // A creator that died here may have left part of the first line.
    if (file_size() < kFileStoreMagic.size()) {
      std::string there = read_range(0, file_size());
      if (!kFileStoreMagic.starts_with(there)) throw_no_store();
      write_at(0, kFileStoreMagic);
    }
    if (read_range(0, kFileStoreMagic.size()) != kFileStoreMagic) throw_no_store();
    seen_ = kFileStoreMagic.size();
  }

  [[noreturn]] void throw_no_store() const {
    throw InvalidArgument(
        fmt::format("file store {}: the file holds something else; give a path that does not exist yet (it begins with "
                    "{}, expected {})",
                    path_, printable(read_range(0, kFileStoreMagic.size())), printable(kFileStoreMagic)));
  }

  void catch_up() MANIPLE_REQUIRES(mutex_) {
    const std::uint64_t size = file_size();
    if (size == seen_) return;
    if (size < seen_) {
      throw ProtocolError(fmt::format(
          "file store {}: it shrank from {} to {} bytes; another job may be using the same path", path_, seen_, size));
    }
    MANIPLE_REQUIRE(size <= kMaxFileBytes, "file store {}: it has grown to {} bytes; at most {} are read", path_, size,
                    kMaxFileBytes);
    const std::string bytes = read_range(seen_, size - seen_);
    std::string_view rest = bytes;
    try {
      while (const auto record = decode_record(rest)) apply(*record);
    } catch (const ProtocolError& error) {
      throw ProtocolError(fmt::format("file store {}: {} at byte {}; the file is damaged: remove it and start again",
                                      path_, error.what(), seen_ + (bytes.size() - rest.size())));
    }
    seen_ += bytes.size() - rest.size();
  }

  void apply(const Record& record) MANIPLE_REQUIRES(mutex_) {
    if (record.kind == RecordKind::set) {
      table_.set(record.key, std::make_shared<const std::string>(record.value));
    } else {
      table_.erase(record.key);
    }
  }

  /// Requires the exclusive lock. Changes the table first, because it enforces the quotas.
  void table_set(std::string_view key, std::string_view value) MANIPLE_REQUIRES(mutex_) {
    const Value before = table_.find(key);
    table_.set(key, std::make_shared<const std::string>(value));
    try {
      append({RecordKind::set, key, value});
    } catch (...) {
      if (before)
        table_.set(key, before);
      else
        table_.erase(key);
      throw;
    }
  }

  void append(const Record& record) MANIPLE_REQUIRES(mutex_) {
    const std::string bytes = encode_record(record);
    MANIPLE_REQUIRE(seen_ + bytes.size() <= kMaxFileBytes,
                    "file store {}: it has grown to {} bytes; no more is written", path_, seen_);
    // Removes the partial record of a process that died while appending.
    if (file_size() > seen_ && ::ftruncate(fd_.get(), static_cast<off_t>(seen_)) != 0) {
      throw_system_error(fmt::format("truncate file store {}", path_));
    }
    try {
      write_at(seen_, bytes);
    } catch (...) {
      const int ignored = ::ftruncate(fd_.get(), static_cast<off_t>(seen_));
      (void)ignored;
      throw;
    }
    seen_ += bytes.size();
  }

  std::string read_range(std::uint64_t offset, std::uint64_t count) const {
    std::string bytes(count, '\0');
    std::size_t done = 0;
    while (done < count) {
      const ssize_t got = ::pread(fd_.get(), bytes.data() + done, count - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_system_error(fmt::format("read file store {}", path_));
      if (got == 0) break;
      done += got;
    }
    bytes.resize(done);
    return bytes;
  }

  void write_at(std::uint64_t offset, std::string_view bytes) {
    if (write_all_at(fd_.get(), bytes, offset) != bytes.size())
      throw_system_error(fmt::format("write file store {}", path_));
  }

  std::vector<bool> present(std::span<const std::string> keys) const MANIPLE_REQUIRES(mutex_) {
    std::vector<bool> result;
    for (const std::string& key : keys) result.push_back(table_.find(key) != nullptr);
    return result;
  }

  template <class Then>
  void await(std::span<const std::string> keys, Deadline deadline, Then then) {
    require_keys(keys);
    require_owned();
    const auto start = Deadline::Clock::now();
    auto pause = kShortestPause;
    for (std::uint64_t looked_at = 0;;) {
      if (const std::uint64_t size = file_size(); size != looked_at) {
        const Session session(*this, LOCK_SH);
        looked_at = size;
        const std::vector<bool> there = present(keys);
        if (std::find(there.begin(), there.end(), false) == there.end()) return then();
        pause = kShortestPause;
      }
      if (deadline.expired()) break;
      const auto left = std::chrono::ceil<std::chrono::microseconds>(deadline.remaining());
      // sleep: between two polls, as file systems do not report changes made on another host
      std::this_thread::sleep_for(std::min<std::chrono::microseconds>(pause, left));
      pause = std::min(pause * 2, kLongestPause);
    }
    const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
    throw Timeout(fmt::format("{}: {}", describe(), missing_keys_text(keys, check(keys), waited.count())), {},
                  waited.count());
  }

  std::string path_;
  ForkGuard guard_;
  UniqueFd fd_;
  Mutex mutex_;
  std::uint64_t seen_ MANIPLE_GUARDED_BY(mutex_) = 0;  // bytes replayed into the table
  KeyTable table_ MANIPLE_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_file_store(const std::string& path) { return std::make_shared<FileStore>(path); }

}  // namespace maniple
