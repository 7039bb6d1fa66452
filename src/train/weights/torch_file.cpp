#include "train/weights/torch_file.h"

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"
#include "train/weights/pickle.h"
#include "train/weights/zip_archive.h"

namespace maniple {
namespace {

constexpr std::uint64_t kMaxPickleBytes = std::uint64_t{32} << 20;
constexpr std::string_view kPickle = "data.pkl";

std::string entry_text(const std::string& name, const ZipEntry& entry, const ReadAt& read, std::uint64_t most) {
  require_plain(name, entry);
  if (entry.bytes > most)
    throw ProtocolError(format_text("its pickle has {} bytes; at most {} are allowed", entry.bytes, most));
  std::string text(entry.bytes, '\0');
  read(entry.begin, text.data(), text.size());
  return text;
}

}  // namespace

StoredTensors read_torch_file(std::uint64_t file_bytes, const ReadAt& read, std::string_view key) {
  const std::map<std::string, ZipEntry> entries = read_zip_directory(file_bytes, read);
  // All entries are in one folder, named after the file when it was saved.
  std::string folder;
  const ZipEntry* pickle = nullptr;
  for (const auto& [name, entry] : entries) {
    const std::size_t slash = name.find('/');
    if (slash == std::string::npos || std::string_view(name).substr(slash + 1) != kPickle) continue;
    if (pickle != nullptr) throw ProtocolError("the zip archive has two entries data.pkl");
    pickle = &entry;
    folder = name.substr(0, slash + 1);
  }
  MANIPLE_REQUIRE(pickle != nullptr, "it is a zip archive without data.pkl, so torch.save did not write it");
  MANIPLE_REQUIRE(
      entries.count(folder + "constants.pkl") == 0,
      "it is a TorchScript archive (torch.jit.save, or torch::save in C++), not a state dict: in Python, "
      "torch.save(torch.jit.load(path).state_dict(), other); in C++, torch::load or torch::jit::load read it");
  if (const auto order = entries.find(folder + "byteorder"); order != entries.end()) {
    const std::string text = entry_text(order->first, order->second, read, 64);
    MANIPLE_REQUIRE(text == "little", "its byte order is \"{}\"; only little-endian files can be read",
                    shown_name(text));
  }
  const std::string text = entry_text(folder + std::string(kPickle), *pickle, read, kMaxPickleBytes);
  PickledStateDict state = read_state_dict(text, key);
  StoredTensors result;
  result.ignored = std::move(state.ignored);
  for (auto& [name, tensor] : state.tensors) {
    const auto storage = entries.find(folder + "data/" + tensor.storage.key);
    if (storage == entries.end())
      throw ProtocolError(format_text("tensor \"{}\": its data, entry \"{}data/{}\", is missing", shown_name(name),
                                      shown_name(folder), shown_name(tensor.storage.key)));
    require_plain(storage->first, storage->second);
    if (storage->second.bytes % tensor.storage.element_bytes != 0 ||
        storage->second.bytes / tensor.storage.element_bytes != tensor.storage.elements)
      throw ProtocolError(format_text(
          "tensor \"{}\": its storage should have {} elements of {} bytes, but the file has {} bytes for it",
          shown_name(name), tensor.storage.elements, tensor.storage.element_bytes, storage->second.bytes));
    result.tensors.push_back({name, std::move(tensor.dtype), std::move(tensor.shape), std::move(tensor.strides),
                              storage->second.begin + tensor.first_byte, 0});
  }
  return result;
}

void refuse_legacy_torch_file(std::string_view first_bytes) {
  // Older formats: a pickle of the magic number 0x1950a86a20f9469cfc6c, and before that a tar archive.
  constexpr std::string_view kMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);
  constexpr std::size_t kTarSignature = 257;
  const bool legacy = first_bytes.starts_with(kMagic) ||
                      (first_bytes.size() > kTarSignature && first_bytes.substr(kTarSignature).starts_with("ustar"));
  MANIPLE_REQUIRE(
      !legacy,
      "it is in torch.save's format from before PyTorch 1.6; in Python, torch.save(torch.load(path), other) "
      "writes today's");
}

}  // namespace maniple
