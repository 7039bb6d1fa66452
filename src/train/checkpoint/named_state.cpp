#include "train/checkpoint/named_state.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"

namespace maniple {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

struct DtypeName {
  torch::ScalarType type;
  const char* name;
};
constexpr DtypeName kDtypes[] = {
    {torch::kBool, "BOOL"},   {torch::kUInt8, "U8"},    {torch::kInt8, "I8"},     {torch::kInt16, "I16"},
    {torch::kInt32, "I32"},   {torch::kInt64, "I64"},   {torch::kFloat16, "F16"}, {torch::kBFloat16, "BF16"},
    {torch::kFloat32, "F32"}, {torch::kFloat64, "F64"},
};

NamedState read_from(const RegularFile& file) {
  std::string prefix(std::min<std::size_t>(kSafetensorsPrefixBytes, file.size()), '\0');
  file.read(0, prefix.data(), prefix.size());
  const std::uint64_t header_bytes = safetensors_header_bytes(prefix, file.size());
  std::string text(header_bytes, '\0');
  file.read(kSafetensorsPrefixBytes, text.data(), text.size());
  const std::uint64_t data = kSafetensorsPrefixBytes + header_bytes;
  const SafetensorsHeader header = parse_safetensors(text, file.size() - data);
  NamedState state;
  state.texts = header.metadata;
  for (const SafetensorsEntry& entry : header.entries) {
    torch::Tensor tensor = torch::empty(entry.shape, scalar_type_of(entry.dtype, entry.name));
    file.read(data + entry.begin, tensor.data_ptr(), entry.bytes());
    state.tensors[entry.name] = std::move(tensor);
  }
  return state;
}

}  // namespace

std::string safetensors_dtype(torch::ScalarType type) {
  for (const DtypeName& entry : kDtypes) {
    if (entry.type == type) return entry.name;
  }
  return toString(type);  // unknown to the format: refused by name when it is placed
}

torch::ScalarType scalar_type_of(const std::string& name, const std::string& tensor) {
  for (const DtypeName& entry : kDtypes) {
    if (name == entry.name) return entry.type;
  }
  throw ProtocolError(format_text("tensor \"{}\" has dtype {}, which LibTorch does not know", tensor, name));
}

NamedState snapshot_of(const NamedState& state) {
  const torch::NoGradGuard no_grad;
  NamedState copy;
  copy.texts = state.texts;
  for (const auto& [name, tensor] : state.tensors) {
    MANIPLE_REQUIRE(tensor.defined() && tensor.layout() == torch::kStrided,
                    "\"{}\" cannot be saved: it is undefined or sparse", name);
    auto mine = torch::empty(tensor.sizes(), torch::TensorOptions().dtype(tensor.dtype()));
    mine.copy_(tensor);
    copy.tensors[name] = std::move(mine);
  }
  return copy;
}

FileDigest write_state(const std::string& path, const NamedState& state) {
  SafetensorsHeader header;
  header.metadata = state.texts;
  for (const auto& [name, tensor] : state.tensors) {
    header.entries.push_back({name, safetensors_dtype(tensor.scalar_type()), tensor.sizes().vec()});
  }
  place_safetensors(header);
  DurableFile file(path);
  file.write(encode_safetensors(header));
  for (const auto& [name, tensor] : state.tensors) file.write(tensor.data_ptr(), tensor.nbytes());
  return file.finish();
}

NamedState read_state(const std::string& path) {
  const RegularFile file(path);
  try {
    return read_from(file);
  } catch (const ProtocolError& error) {
    throw ProtocolError(format_text("{}: {}", path, error.what()));
  }
}

std::string text_of(double value) { return format_text("{:a}", value); }
std::string text_of(std::int64_t value) { return std::to_string(value); }

double real_of(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size())
    throw ProtocolError(format_text("\"{}\" is not a number", text));
  return value;
}

std::int64_t integer_of(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw ProtocolError(format_text("\"{}\" is not a whole number", text));
  return value;
}

}  // namespace maniple
