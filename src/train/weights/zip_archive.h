// The directory of a zip archive whose entries are stored without compression: how torch.save packs a pickle and the
// bytes of tensors. Reads archives of more than 4 GiB (zip64) and needs no LibTorch.
//
// Nothing in the archive is believed: sizes and places are compared with the length of the file, entries may not
// overlap or have the same name.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "train/weights/stored_tensor.h"

namespace maniple {

struct ZipEntry {
  std::uint64_t begin = 0;   ///< of its bytes in the file
  std::uint64_t bytes = 0;   ///< in the file
  std::uint64_t method = 0;  ///< of compression; 0: none
};

/// Whether a file that begins with these bytes is a zip archive.
bool looks_like_zip(std::string_view first_bytes) noexcept;

/// By name. Throws ProtocolError saying what is wrong.
std::map<std::string, ZipEntry> read_zip_directory(std::uint64_t file_bytes, const ReadAt& read);

/// Throws InvalidArgument if the entry is compressed or encrypted, so that its bytes are not those of the file.
void require_plain(const std::string& name, const ZipEntry& entry);

}  // namespace maniple
