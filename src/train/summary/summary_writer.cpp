#include <maniple/train/summary_writer.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/base/unique_fd.h"
#include "comm/base/write_all.h"
#include "train/summary/event.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) throw_system_error("cannot make the folder " + part);
    if (end == std::string::npos) return;
  }
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  std::string host = name[0] != '\0' ? name : "localhost";
  std::replace(host.begin(), host.end(), '/', '_');
  return host;
}

std::string new_path(const std::string& folder, const std::string& suffix) {
  static std::atomic<int> files = 0;  // per process: distinguishes files created in the same second
  return format_text("{}/events.out.tfevents.{:010}.{}.{}.{}{}", folder, static_cast<long long>(now()), host_name(),
                     ::getpid(), files++, suffix);
}

}  // namespace

class SummaryWriter::Impl {
 public:
  Impl(const std::string& folder, const SummaryWriterOptions& options)
      : path_(new_path(folder, options.filename_suffix)), opening_(record_of(version_event(now()))) {
    make_folders(folder);
    fd_ = open_file(path_, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (!fd_) throw_system_error("cannot make " + path_);
    if (options.purge_step) opening_ += record_of(restart_event({now(), *options.purge_step}));
    write("");
  }

  void write(const std::string& event) {
    const MutexLock lock(mutex_);
    if (!fd_) return;
    // The header of a file comes before everything else, even if there was no space for it at first.
    const std::string bytes = opening_ + event;
    if (append(bytes)) {
      opening_.clear();
      error_.clear();
    }
  }

  void flush() {
    const MutexLock lock(mutex_);
    if (fd_ && ::fdatasync(fd_.get()) != 0 && errno != EINVAL) failed("cannot sync", errno);
  }

  void close() {
    flush();
    const MutexLock lock(mutex_);
    fd_.reset();
    open_.store(false);
  }

  bool is_open() const noexcept { return open_.load(); }
  const std::string& path() const noexcept { return path_; }
  std::string error() const {
    const MutexLock lock(mutex_);
    return error_;
  }

 private:
  /// Appends all bytes or none: half a record would make everything after it unreadable.
  bool append(const std::string& bytes) MANIPLE_REQUIRES(mutex_) {
    const std::size_t done = write_all(fd_.get(), bytes);
    if (done == bytes.size()) {
      size_ += done;
      return true;
    }
    const int code = errno;
    if (done > 0 && ::ftruncate(fd_.get(), static_cast<off_t>(size_)) != 0) {
      failed("cannot truncate", errno);
      fd_.reset();  // better no more events than an unreadable file
      return false;
    }
    failed("cannot write to", code);
    return false;
  }

  void failed(const char* what, int code) MANIPLE_REQUIRES(mutex_) {
    error_ = format_text("{} {}: {}", what, path_, errno_text(code));
    if (!warned_) log_warning("SummaryWriter: {}; events are lost, the training goes on", error_);
    warned_ = true;
  }

  const std::string path_;
  mutable Mutex mutex_;
  UniqueFd fd_ MANIPLE_GUARDED_BY(mutex_);
  std::string opening_ MANIPLE_GUARDED_BY(mutex_);  ///< bytes to write before the next event
  std::uint64_t size_ MANIPLE_GUARDED_BY(mutex_) = 0;
  std::string error_ MANIPLE_GUARDED_BY(mutex_);
  bool warned_ MANIPLE_GUARDED_BY(mutex_) = false;
  std::atomic<bool> open_ = true;
};

SummaryWriter::SummaryWriter(const std::string& log_dir, SummaryWriterOptions options) : log_dir_(log_dir) {
  MANIPLE_REQUIRE(!log_dir.empty(), "SummaryWriter: the name of the folder is empty");
  MANIPLE_REQUIRE(options.filename_suffix.find('/') == std::string::npos,
                  "SummaryWriter: filename_suffix \"{}\" has a / in it", options.filename_suffix);
  const bool writes = !options.only_rank_0 || !is_initialized() || get_rank() == 0;
  if (writes) impl_ = std::make_unique<Impl>(log_dir, options);
}

SummaryWriter::~SummaryWriter() = default;

void SummaryWriter::add_scalar(std::string_view tag, double value, std::int64_t global_step,
                               std::optional<double> walltime) {
  MANIPLE_REQUIRE(!tag.empty(), "SummaryWriter: add_scalar with an empty tag");
  if (is_open())
    impl_->write(record_of(scalar_event({walltime ? *walltime : now(), global_step}, tag, static_cast<float>(value))));
}

void SummaryWriter::add_text(std::string_view tag, std::string_view text, std::int64_t global_step,
                             std::optional<double> walltime) {
  MANIPLE_REQUIRE(!tag.empty(), "SummaryWriter: add_text with an empty tag");
  if (is_open()) impl_->write(record_of(text_event({walltime ? *walltime : now(), global_step}, tag, text)));
}

void SummaryWriter::flush() {
  if (impl_) impl_->flush();
}

void SummaryWriter::close() {
  if (impl_) impl_->close();
}

bool SummaryWriter::is_open() const noexcept { return impl_ && impl_->is_open(); }
std::string SummaryWriter::log_dir() const { return log_dir_; }
std::string SummaryWriter::path() const { return impl_ ? impl_->path() : ""; }
std::string SummaryWriter::last_error() const { return impl_ ? impl_->error() : ""; }

}  // namespace maniple
