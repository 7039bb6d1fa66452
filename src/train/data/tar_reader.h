// Reads tar files member by member. Does not use LibTorch, so that the parser can be fuzzed without it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "train/data/readable_bytes.h"
#include <maniple/train/shard_reader.h>

namespace maniple {

/// Upper limit of a file in a tar: its bytes go into memory.
inline constexpr std::size_t kTarFileLimit = std::size_t{1} << 30;

class TarReader {
 public:
  explicit TarReader(std::unique_ptr<ReadableBytes> bytes) : bytes_(std::move(bytes)) {}

  /// Goes to the next regular file, however much was read of the previous one. False at the end of the tar.
  bool next();
  const std::string& name() const noexcept { return name_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t offset() const noexcept { return header_offset_; }  ///< offset of its first header
  /// The bytes of the file. Call at most once per file.
  std::string contents();
  const std::string& tar() const noexcept { return bytes_->name(); }

 private:
  bool read_header(char* block);
  std::string read_exactly(std::size_t size, const char* what);
  void skip_exactly(std::size_t size);
  void read_pax(std::size_t size);
  void end_of_tar();

  std::unique_ptr<ReadableBytes> bytes_;
  std::string name_;
  std::size_t size_ = 0, header_offset_ = 0;
  std::size_t unread_ = 0, padding_ = 0;  ///< of the current file
  std::string long_name_;                 ///< name for the next header; empty: none
  bool has_long_size_ = false;
  std::size_t long_size_ = 0;
  bool ended_ = false;
};

/// The samples of a tar; see shard_reader.h.
std::unique_ptr<ShardReader> tar_samples(std::unique_ptr<ReadableBytes> bytes, const std::string& path);

}  // namespace maniple
