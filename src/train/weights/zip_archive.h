// Reads the directory of a zip archive whose entries are stored without compression. torch.save packs a pickle and the
// bytes of tensors that way. Supports archives of more than 4 GiB (zip64) and needs no LibTorch.
//
// The archive is not trusted: sizes and places are checked against the length of the file, and entries may not overlap
// or share a name.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "train/weights/stored_tensor.h"

namespace maniple {

struct ZipEntry {
  std::uint64_t begin = 0;   ///< offset of its bytes in the file
  std::uint64_t bytes = 0;   ///< bytes in the file
  std::uint64_t method = 0;  ///< compression method; 0: none
};

/// Whether a file that begins with these bytes is a zip archive.
bool looks_like_zip(std::string_view first_bytes) noexcept;

/// The entries by name. Throws ProtocolError saying what is wrong.
std::map<std::string, ZipEntry> read_zip_directory(std::uint64_t file_bytes, const ReadAt& read);

/// Throws InvalidArgument if the entry is compressed or encrypted, so that its contents cannot be read in place.
void require_plain(const std::string& name, const ZipEntry& entry);

}  // namespace maniple
