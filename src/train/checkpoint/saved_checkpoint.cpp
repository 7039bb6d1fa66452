#include "train/checkpoint/saved_checkpoint.h"

#include <algorithm>
#include <cstring>

#include "comm/base/check.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::string_view kSafetensorsSuffix = ".safetensors";
/// Short runs are copied from a window of the file that is read at once: a column shard has thousands of them.
constexpr std::uint64_t kWindowBytes = std::uint64_t{1} << 20;
/// A process may have 1024 descriptors; a checkpoint may have more files.
constexpr std::size_t kMaxOpenFiles = 512;

}  // namespace

struct SavedCheckpoint::File {
  explicit File(const std::string& path) : file(path) {
    try {
      std::string prefix(std::min<std::size_t>(kSafetensorsPrefixBytes, file.size()), '\0');
      file.read(0, prefix.data(), prefix.size());
      std::string text(safetensors_header_bytes(prefix, file.size()), '\0');
      file.read(kSafetensorsPrefixBytes, text.data(), text.size());
      data = kSafetensorsPrefixBytes + text.size();
      header = parse_safetensors(text, file.size() - data);
    } catch (const ProtocolError& error) {
      throw ProtocolError(format_text("{}: {}", path, error.what()));
    }
    for (const SafetensorsEntry& entry : header.entries) by_name[entry.name] = &entry;
  }

  void read(std::uint64_t offset, char* to, std::uint64_t count) {
    if (count >= kWindowBytes / 4) return file.read(offset, to, count);
    if (offset < window_begin || offset + count > window_begin + window.size()) {
      window.resize(std::min<std::uint64_t>(kWindowBytes, file.size() - offset));
      window_begin = offset;
      file.read(offset, window.data(), window.size());
    }
    std::memcpy(to, window.data() + (offset - window_begin), count);
  }

  RegularFile file;
  SafetensorsHeader header;
  std::uint64_t data = 0;  // offset of the data in the file
  std::map<std::string_view, const SafetensorsEntry*> by_name;
  std::string window;
  std::uint64_t window_begin = 0;
};

SavedCheckpoint::SavedCheckpoint(std::string path, const CheckpointManifest& manifest) : path_(std::move(path)) {
  sharded_ = manifest.files.count(std::string(kIndexFile)) != 0;
  if (sharded_) {
    const std::string file = format_text("{}/{}", path_, kIndexFile);
    try {
      index_ = parse_index(read_small_file(file, kMaxIndexBytes));
      for (const std::string& name : index_.files) {
        if (manifest.files.count(name) == 0) throw ProtocolError(format_text("{} is not in the manifest", name));
      }
    } catch (const ProtocolError& error) {
      throw ProtocolError(format_text("{}: {}", file, error.what()));
    }
    files_.resize(index_.files.size());
    entries_.resize(index_.files.size());
    for (const auto& [part, state] : index_.parts) {
      for (const auto& [name, tensor] : state.tensors) {
        for (const IndexedPiece& piece : tensor.pieces) entries_[piece.file].push_back({&tensor, &piece});
      }
    }
    return;
  }
  for (const auto& [name, digest] : manifest.files) {
    if (!name.ends_with(kSafetensorsSuffix)) continue;
    index_.files.push_back(name);
    files_.push_back(std::make_unique<File>(path_ + "/" + name));
    IndexedPart& part = index_.parts[name.substr(0, name.size() - kSafetensorsSuffix.size())];
    part.texts = files_.back()->header.metadata;
    for (const SafetensorsEntry& entry : files_.back()->header.entries) {
      const TensorBox whole = TensorBox::whole(entry.shape);
      part.tensors[entry.name] = {entry.dtype, entry.shape, entry.shape, {{whole, files_.size() - 1, entry.name}}};
    }
  }
}

SavedCheckpoint::~SavedCheckpoint() = default;

std::string SavedCheckpoint::place_of(const std::string& part) const {
  return sharded_ ? format_text("{}: part \"{}\"", path_, part) : format_text("{}/{}.safetensors", path_, part);
}

SavedCheckpoint::File& SavedCheckpoint::open(std::size_t file) {
  if (files_[file]) return *files_[file];
  if (open_.size() == kMaxOpenFiles) {
    files_[open_.front()].reset();
    open_.erase(open_.begin());
  }
  auto opened = std::make_unique<File>(path_ + "/" + index_.files[file]);
  for (const auto& [tensor, piece] : entries_[file]) {
    const auto found = opened->by_name.find(piece->key);
    if (found == opened->by_name.end() || found->second->dtype != tensor->dtype ||
        found->second->shape != piece->box.size) {
      throw ProtocolError(format_text("{}: it has no {} tensor \"{}\" of [{}], which the index says it has",
                                      opened->file.path(), tensor->dtype, shown_name(piece->key),
                                      joined(piece->box.size)));
    }
  }
  files_[file] = std::move(opened);
  open_.push_back(file);
  return *files_[file];
}

void SavedCheckpoint::check_files() {
  for (std::size_t i = 0; i < files_.size(); ++i) open(i);
}

void SavedCheckpoint::read(const IndexedTensor& tensor, const TensorBox& wanted, void* to) {
  const auto element = static_cast<std::int64_t>(safetensors_element_bytes(tensor.dtype).value());
  const BoxRuns runs(wanted);
  std::int64_t left = wanted.count();
  for (const IndexedPiece& piece : tensor.pieces) {
    if (left == 0) break;
    File* file = nullptr;
    std::uint64_t begin = 0;
    left -= for_each_common(runs, BoxRuns(piece.box), [&](std::int64_t mine, std::int64_t theirs, std::int64_t count) {
      if (file == nullptr) {
        file = &open(piece.file);
        begin = file->data + file->by_name.at(piece.key)->begin;
      }
      file->read(begin + static_cast<std::uint64_t>(theirs * element), static_cast<char*>(to) + mine * element,
                 static_cast<std::uint64_t>(count * element));
    });
  }
  MANIPLE_ASSERT(left == 0);  // the index was checked: the pieces cover the tensor
}

}  // namespace maniple
