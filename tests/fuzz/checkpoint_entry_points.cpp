#include <algorithm>
#include <cstring>

#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/checkpoint_index.h"
#include "train/checkpoint/safetensors.h"
#include "train/weights/pickle.h"
#include "train/weights/torch_file.h"
#include "train/weights/torch_file_bytes.h"
#include "train/weights/weights_files.h"

namespace maniple::fuzz {
namespace {

/// Whether every element of a view lies in the `bytes` from `first` on.
bool lies_in(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides, std::string_view dtype,
             std::uint64_t first, std::uint64_t bytes) {
  require(shape.size() == strides.size());
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;
  if (first > bytes) return false;
  const std::uint64_t elements = (bytes - first) / safetensors_element_bytes(dtype).value();
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    require(shape[i] >= 0 && strides[i] >= 0);
    const auto steps = static_cast<std::uint64_t>(shape[i] - 1), stride = static_cast<std::uint64_t>(strides[i]);
    if (steps != 0 && stride > elements / steps) return false;
    last += steps * stride;
    if (last >= elements) return false;
  }
  return last < elements;
}

std::string small_pickle() {
  using namespace torch_file_bytes;
  const std::string from = storage("FloatStorage", "0", 6);
  const std::string model = dictionary({{"a", tensor(from, 0, {2, 3}, {3, 1})}, {"b", tensor(from, 1, {2}, {3})}});
  return torch_file_bytes::pickle(
      dictionary({{"model", model}, {"epoch", integer(3)}, {"c", tensor(from, 2, {}, {})}}));
}

}  // namespace

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

void pickle(std::string_view bytes) {
  for (const std::string_view key : {"", "model"}) {
    tolerate([&] {
      for (const auto& [name, tensor] : read_state_dict(bytes, key).tensors) {
        require(lies_in(tensor.shape, tensor.strides, tensor.dtype, tensor.first_byte,
                        tensor.storage.elements * tensor.storage.element_bytes));
      }
    });
  }
}

std::vector<std::string> pickle_seeds() {
  using namespace torch_file_bytes;
  const std::string typed = global("torch._utils", "_rebuild_tensor_v3") + "(" + "(" + text("storage") +
                            global("torch.storage", "UntypedStorage") + text("0") + text("cpu") + integer(16) + "tQ" +
                            integer(0) + tuple({4}) + tuple({1}) + "\x89N" + global("torch", "int32") + "tR";
  using namespace std::string_literals;
  const std::string in_memo = "\x80\x04\x95\x20\0\0\0\0\0\0\0]\x94(K\1M\2\1J\3\0\0\0h\0e\x8c\1x\x8c\1y\x93."s;
  return {small_pickle(), torch_file_bytes::pickle(dictionary({{"t", typed}})), in_memo,
          torch_file_bytes::pickle(global("collections", "OrderedDict") + "((" + text("k") + integer(1) + "tltR}" +
                                   text("m") + "}sb"),
          ""};
}

void torch_file(std::string_view bytes) {
  const ReadAt read = [&](std::uint64_t offset, void* to, std::size_t count) {
    require(offset <= bytes.size() && count <= bytes.size() - offset);
    std::memcpy(to, bytes.data() + offset, count);
  };
  for (const std::string_view key : {"", "model"}) {
    tolerate([&] {
      for (const StoredTensor& tensor : read_torch_file(bytes.size(), read, key).tensors)
        require(lies_in(tensor.shape, tensor.strides, tensor.dtype, tensor.begin, bytes.size()));
    });
  }
  tolerate([&] { refuse_legacy_torch_file(bytes); });
}

std::vector<std::string> torch_file_seeds() {
  const std::string data(24, '\7');
  return {torch_file_bytes::torch_file(small_pickle(), {{"0", data}}),
          torch_file_bytes::torch_file(small_pickle(), {{"0", data}}, true), torch_file_bytes::zip_of({}), ""};
}

void weights_index(std::string_view bytes) {
  tolerate([&] {
    const WeightsIndex index = parse_weights_index(bytes);
    require(parse_weights_index(encode_weights_index(index)).files == index.files);
  });
}

std::vector<std::string> weights_index_seeds() {
  WeightsIndex index;
  index.files = {{"fc.weight", "model-00001-of-00002.safetensors"}, {"fc.bias", "model-00002-of-00002.safetensors"}};
  index.total_bytes = 100;
  return {encode_weights_index(index), R"({"weight_map":{"a":"b"},"x":[{"y":[[1]]}]})", ""};
}

void checkpoint_index(std::string_view bytes) {
  tolerate([&] {
    const CheckpointIndex index = parse_index(bytes);
    require(parse_index(encode_index(index)) == index);
    for (const auto& [name, part] : index.parts) {
      for (const auto& [key, tensor] : part.tensors) {
        // Every element is in one piece. Only of small tensors: a piece may be described that no file could hold.
        if (elements_of(tensor.shape) > 10'000) continue;
        std::vector<int> seen(static_cast<std::size_t>(elements_of(tensor.shape)), 0);
        const TensorBox whole = TensorBox::whole(tensor.shape);
        for (const IndexedPiece& piece : tensor.pieces) {
          for_each_common(BoxRuns(whole), BoxRuns(piece.box), [&](std::int64_t at, std::int64_t, std::int64_t count) {
            for (std::int64_t i = at; i < at + count; ++i) ++seen.at(static_cast<std::size_t>(i));
          });
        }
        require(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(seen.size()));
      }
    }
  });
  tolerate([&] {
    const CheckpointManifest manifest = parse_manifest(bytes);
    require(parse_manifest(encode(manifest)).files == manifest.files);
  });
}

std::vector<std::string> checkpoint_index_seeds() {
  CheckpointIndex index;
  index.files = {"rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"};
  IndexedPart& part = index.parts["model"];
  part.texts = {{"kind", "Adam"}};
  part.tensors["w"] = {"F32", {2, 3}, {2, 3}, {{{{2, 3}, {0, 0}, {2, 1}}, 0, "w"}, {{{2, 3}, {0, 1}, {2, 2}}, 1, "w"}}};
  part.tensors["b"] = {"I64", {2, 2}, {4}, {{TensorBox::flat(4, 0, 3), 0, "b"}, {TensorBox::flat(4, 3, 1), 1, "b"}}};
  CheckpointManifest manifest;
  manifest.step = 7;
  manifest.files["index.json"] = {100, std::string(64, '0')};
  return {encode_index(index), encode(manifest), ""};
}

}  // namespace maniple::fuzz
