#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "train/checkpoint/safetensors.h"

namespace maniple::fuzz {

void safetensors(std::string_view bytes) {
  tolerate([&] {
    const std::uint64_t length = safetensors_header_bytes(bytes.substr(0, kSafetensorsPrefixBytes), bytes.size());
    const std::string_view header = bytes.substr(kSafetensorsPrefixBytes, length);
    const std::uint64_t data = bytes.size() - kSafetensorsPrefixBytes - length;
    const SafetensorsHeader parsed = parse_safetensors(header, data);
    // What was accepted describes exactly the bytes that are there, and comes back as it was.
    require(parsed.data_bytes() == data);
    SafetensorsHeader again = parsed;
    place_safetensors(again);
    require(again.entries == parsed.entries);
  });
}

std::vector<std::string> safetensors_seeds() {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"kind", "Adam"}};
  header.entries = {
      {"first.weight", "F32", {2, 3}}, {"first.bias", "BF16", {3}}, {"empty", "I64", {0, 7}}, {"scalar", "BOOL", {}}};
  place_safetensors(header);
  const std::string whole = encode_safetensors(header) + std::string(header.data_bytes(), '\7');
  return {whole, encode_safetensors({}), ""};
}

}  // namespace maniple::fuzz
