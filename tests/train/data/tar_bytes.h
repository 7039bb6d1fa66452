// Tars made by hand, for tests of what reads them. No LibTorch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>

namespace maniple {

/// A header of ustar, with a checksum that fits. `size` need not be true.
inline std::string tar_header(const std::string& name, std::size_t size, char type = '0') {
  std::string block(512, '\0');
  block.replace(0, std::min<std::size_t>(name.size(), 100), name.substr(0, 100));
  char digits[24];
  std::snprintf(digits, sizeof(digits), "%011llo", static_cast<unsigned long long>(size));
  block.replace(124, 11, digits, 11);
  block[156] = type;
  block.replace(257, 6, std::string("ustar\0", 6));
  block.replace(263, 2, "00");
  block.replace(148, 8, 8, ' ');
  unsigned sum = 0;
  for (const char byte : block) sum += static_cast<unsigned char>(byte);
  std::snprintf(digits, sizeof(digits), "%06o", sum);
  block.replace(148, 7, std::string(digits, 6) + '\0');
  return block;
}

/// A file, or with another type what belongs to the next one: 'x' pax records, 'L' a long name.
inline std::string tar_file(const std::string& name, const std::string& bytes, char type = '0') {
  return tar_header(name, bytes.size(), type) + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
}

/// A record of pax, with its length before it.
inline std::string pax_record(const std::string& key, const std::string& value) {
  const std::size_t rest = key.size() + value.size() + 3;  // " ", "=" and the line end
  std::size_t length = rest + 1;
  while (std::to_string(length).size() + rest != length) ++length;
  return std::to_string(length) + " " + key + "=" + value + "\n";
}

inline std::string tar_end() { return std::string(1024, '\0'); }

}  // namespace maniple
