// Bytes as torch.save writes them, made by hand: for tests and fuzzers of files that Python would not write.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace maniple::torch_file_bytes {

using Entries = std::vector<std::pair<std::string, std::string>>;

inline std::string little(std::uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(i < 8 ? value >> (8 * i) : 0);
  return bytes;
}

/// A zip archive of these entries, not compressed; with zip64, sizes and places are in the fields for more than 4 GiB.
inline std::string zip_of(const Entries& entries, bool zip64 = false) {
  std::string file, directory;
  for (const auto& [name, data] : entries) {
    const std::size_t begin = file.size();
    const std::string sizes =
        little(0, 4) + (zip64 ? std::string(8, '\xff') : little(data.size(), 4) + little(data.size(), 4));
    file += "PK\3\4" + little(20, 2) + little(0, 8) + sizes + little(name.size(), 2) + little(0, 2) + name + data;
    const std::string wide =
        zip64 ? little(1, 2) + little(24, 2) + little(data.size(), 8) + little(data.size(), 8) + little(begin, 8) : "";
    directory += "PK\1\2" + little(20, 2) + little(20, 2) + little(0, 8) + sizes + little(name.size(), 2) +
                 little(wide.size(), 2) + little(0, 10) + (zip64 ? std::string(4, '\xff') : little(begin, 4)) + name +
                 wide;
  }
  const std::size_t at = file.size(), n = entries.size();
  file += directory;
  if (zip64) {
    file += "PK\6\6" + little(44, 8) + little(0, 12) + little(n, 8) + little(n, 8) + little(directory.size(), 8) +
            little(at, 8);
    file += "PK\6\7" + little(0, 4) + little(at + directory.size(), 8) + little(1, 4);
  }
  return file + "PK\5\6" + little(0, 4) + little(n, 2) + little(n, 2) + little(directory.size(), 4) + little(at, 4) +
         little(0, 2);
}

// Instructions of a pickle that push one value.
inline std::string text(const std::string& value) { return "X" + little(value.size(), 4) + value; }
inline std::string integer(std::int64_t value) { return "\x8a\x08" + little(static_cast<std::uint64_t>(value), 8); }
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string tuple(const std::vector<std::int64_t>& values) {
  std::string all = "(";
  for (const std::int64_t value : values) all += integer(value);
  return all + "t";
}
inline std::string storage(const std::string& type, const std::string& key, std::int64_t elements) {
  return "(" + text("storage") + global("torch", type) + text(key) + text("cpu") + integer(elements) + "tQ";
}
inline std::string tensor(const std::string& from, std::int64_t offset, const std::vector<std::int64_t>& shape,
                          const std::vector<std::int64_t>& strides) {
  return global("torch._utils", "_rebuild_tensor_v2") + "(" + from + integer(offset) + tuple(shape) + tuple(strides) +
         "\x89" + global("collections", "OrderedDict") + ")RtR";
}
inline std::string dictionary(const Entries& entries) {
  std::string all = "}(";
  for (const auto& [name, value] : entries) all += text(name) + value;
  return all + "u";
}

inline std::string pickle(const std::string& value) { return "\x80\x02" + value + "."; }

/// The file of torch.save for a pickle and the bytes of storages, by key.
inline std::string torch_file(const std::string& pickled, const Entries& storages, bool zip64 = false) {
  Entries entries = {{"archive/data.pkl", pickled}, {"archive/byteorder", "little"}};
  for (const auto& [key, data] : storages) entries.emplace_back("archive/data/" + key, data);
  entries.emplace_back("archive/version", "3\n");
  return zip_of(entries, zip64);
}

}  // namespace maniple::torch_file_bytes
