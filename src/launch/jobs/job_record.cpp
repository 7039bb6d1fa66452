#include "launch/jobs/job_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>  // renameat2
#include <ctime>
#include <exception>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "launch/process/process_table.h"

namespace maniple::launch {
namespace {

constexpr std::string_view kFirstLine = "maniple job 1";
constexpr std::size_t kMostCommand = 16 * 1024;
constexpr std::size_t kMostHosts = 24 * 1024;  // all hosts together
constexpr std::size_t kMostWord = 256;

std::string escaped(std::string_view text, std::size_t most) {
  std::string result;
  for (const char c : text) {
    if (result.size() + 4 > most) break;
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '%') {
      result += fmt::format("%{:02x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::optional<std::string> unescaped(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      result += text[i];
      continue;
    }
    unsigned value = 0;
    if (i + 2 >= text.size()) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16);
    if (error != std::errc() || end != text.data() + i + 3) return std::nullopt;
    result += static_cast<char>(value);
    i += 2;
  }
  return result;
}

// Reads a text line by line.
class Lines {
 public:
  explicit Lines(std::string_view text) : text_(text) {}

  bool at_end() const { return text_.empty(); }

  std::optional<std::string_view> next() {
    const auto end = text_.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    return line;
  }

  // The rest of a line that begins with `key` and a blank.
  std::optional<std::string_view> value(std::string_view key) {
    const auto line = next();
    if (!line || !line->starts_with(key) || line->size() <= key.size() || (*line)[key.size()] != ' ')
      return std::nullopt;
    return line->substr(key.size() + 1);
  }

  template <class T>
  bool number(std::string_view key, T& into) {
    const auto text = value(key);
    if (!text) return false;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), into);
    return error == std::errc() && end == text->data() + text->size() && into >= T{0};
  }

  bool word(std::string_view key, std::string& into) {
    const auto text = value(key);
    if (!text) return false;
    auto plain = unescaped(*text);
    if (!plain) return false;
    into = std::move(*plain);
    return true;
  }

 private:
  std::string_view text_;
};

/// Replaces `name` atomically: a reader opens either the old file or the new one. The files are exchanged and the old
/// one is removed, because ext4 flushes a file that is renamed over another one. Removing that file at the end of the
/// job would then wait 1.5 ms for the disk.
void put_in_place(int directory, const std::string& beside, const std::string& name) {
  if (::renameat2(directory, beside.c_str(), directory, name.c_str(), RENAME_EXCHANGE) == 0) {
    ::unlinkat(directory, beside.c_str(), 0);
  } else if (::renameat(directory, beside.c_str(), directory, name.c_str()) != 0) {  // first write, or no exchange
    throw_system_error("rename " + beside);
  }
}

}  // namespace

std::vector<std::string> job_directories() {
  std::vector<std::string> paths;
  const auto runtime = environment_text("XDG_RUNTIME_DIR");
  if (runtime && runtime->front() == '/') paths.push_back(*runtime + "/maniple");
  paths.push_back(fmt::format("/tmp/maniple-{}", ::geteuid()));
  return paths;
}

UniqueFd open_job_directory(const std::string& path, bool create) {
  if (create && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) throw_system_error("mkdir " + path);
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory) throw_system_error("open " + path);
  struct stat status{};
  if (::fstat(directory.get(), &status) != 0) throw_system_error("stat " + path);
  MANIPLE_REQUIRE(status.st_uid == ::geteuid(), "{} belongs to user {}, not to {}", path, status.st_uid, ::geteuid());
  MANIPLE_REQUIRE((status.st_mode & 077) == 0, "{} has mode {:03o}, which lets others in; expected 700", path,
                  status.st_mode & 0777);
  return directory;
}

std::string encode_job(const JobInfo& info) {
  std::string text = fmt::format(
      "{}\nid {}\npid {}\npid_started {}\npid_space {}\nstarted {}\nworld_size {}\nranks_up {}\nrestarts {}\nstate {}\n"
      "command {}\n",
      kFirstLine, escaped(info.id, kMostWord), info.pid, info.pid_started, escaped(info.pid_space, kMostWord),
      info.started, info.world_size, info.ranks_up, info.restarts, escaped(info.state, kMostWord),
      escaped(info.command, kMostCommand));
  std::string hosts;
  for (const std::string& host : info.hosts) {
    hosts += fmt::format("host {}\n", escaped(host, kMostWord));
    if (hosts.size() > kMostHosts) break;
  }
  return text + hosts;
}

std::optional<JobInfo> decode_job(std::string_view text) {
  if (text.size() > kMostRecordBytes) return std::nullopt;
  JobInfo info;
  Lines lines(text);
  if (lines.next() != kFirstLine) return std::nullopt;
  const bool whole = lines.word("id", info.id) && lines.number("pid", info.pid) &&
                     lines.number("pid_started", info.pid_started) && lines.word("pid_space", info.pid_space) &&
                     lines.number("started", info.started) && lines.number("world_size", info.world_size) &&
                     lines.number("ranks_up", info.ranks_up) && lines.number("restarts", info.restarts) &&
                     lines.word("state", info.state) && lines.word("command", info.command);
  if (!whole || info.pid == 0) return std::nullopt;
  while (!lines.at_end()) {
    std::string host;
    if (!lines.word("host", host)) return std::nullopt;
    info.hosts.push_back(std::move(host));
  }
  return info;
}

JobRecord::JobRecord(JobInfo info) noexcept : info_(std::move(info)) {
  try {
    if (info_.pid == 0) info_.pid = ::getpid();
    if (info_.pid_started == 0) info_.pid_started = start_of_process(info_.pid).value_or(0);
    if (info_.pid_space.empty()) info_.pid_space = own_pid_namespace();
    if (info_.started == 0) info_.started = std::time(nullptr);
    name_ = fmt::format("job-{}-{}", info_.pid, info_.pid_started);
  } catch (const std::exception& error) {
    log_debug("this job is not listed by `maniple ps`: {}", error.what());
    return;
  }
  for (const std::string& path : job_directories()) {
    try {
      open_job_directory(path, true);
      directory_ = path;
      break;
    } catch (const std::exception& error) {
      log_debug("no record of this job in {}: {}", path, error.what());
    }
  }
  write();
}

JobRecord::~JobRecord() {
  if (directory_.empty() || !guard_.owned()) return;
  try {
    const UniqueFd directory = open_job_directory(directory_, false);
    ::unlinkat(directory.get(), name_.c_str(), 0);
  } catch (const std::exception& error) {
    log_debug("the record of this job stays in {}: {}", directory_, error.what());
  }
}

void JobRecord::update(int ranks_up, int restarts, std::string_view state, int world_size) noexcept {
  if (world_size <= 0) world_size = info_.world_size;
  const bool same_size = world_size == info_.world_size;
  if (same_size && ranks_up == info_.ranks_up && restarts == info_.restarts && state == info_.state) return;
  info_.world_size = world_size;
  info_.ranks_up = ranks_up;
  info_.restarts = restarts;
  try {
    info_.state = state;
  } catch (const std::exception&) {
  }
  write();
}

void JobRecord::write() noexcept {
  if (directory_.empty() || !guard_.owned()) return;
  try {
    const UniqueFd directory = open_job_directory(directory_, true);
    const std::string beside = name_ + ".new";
    ::unlinkat(directory.get(), beside.c_str(), 0);
    const UniqueFd file(
        ::openat(directory.get(), beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file) throw_system_error("open " + beside);
    try {
      const std::string text = encode_job(info_);
      if (write_all(file.get(), text) != text.size()) throw_system_error("write " + beside);
      put_in_place(directory.get(), beside, name_);
    } catch (...) {
      ::unlinkat(directory.get(), beside.c_str(), 0);
      throw;
    }
  } catch (const std::exception& error) {
    log_debug("the record of this job in {} is not up to date: {}", directory_, error.what());
  }
}

}  // namespace maniple::launch
