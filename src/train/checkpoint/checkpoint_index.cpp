#include "train/checkpoint/checkpoint_index.h"

#include <limits>
#include <set>

#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/safetensors.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kIndexFormat = "maniple-sharded-checkpoint-1";
constexpr std::size_t kMaxDimensionsOfView = 64;

ProtocolError wrong_tensor(const std::string& part, const std::string& name, std::string_view what) {
  return ProtocolError(format_text("tensor \"{}\" of part \"{}\": {}", shown_name(name), shown_name(part), what));
}

const Json* member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

/// False if `list` is not a list of whole numbers.
bool read_extents(const Json* list, Extents& extents) {
  if (list == nullptr || !list->is_array() || list->size() > kMaxDimensionsOfView) return false;
  for (const Json& extent : *list) {
    if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max())
      return false;
    extents.push_back(extent.get<std::int64_t>());
  }
  return true;
}

IndexedTensor read_tensor(const std::string& part, const std::string& name, const Json& json, std::size_t files) {
  IndexedTensor tensor;
  const Json* dtype = member(json, "dtype");
  const Json* pieces = member(json, "pieces");
  if (dtype == nullptr || !dtype->is_string() || pieces == nullptr || !pieces->is_array() ||
      !read_extents(member(json, "shape"), tensor.shape)) {
    throw wrong_tensor(part, name, "it needs dtype, shape and pieces");
  }
  tensor.dtype = dtype->get<std::string>();
  const auto element = safetensors_element_bytes(tensor.dtype);
  if (!element) throw wrong_tensor(part, name, format_text("unknown dtype \"{}\"", shown_name(tensor.dtype)));
  if (!tensor_bytes(tensor.shape, *element)) throw wrong_tensor(part, name, "its shape is larger than any file");
  tensor.view = tensor.shape;
  if (const Json* view = member(json, "view")) {
    tensor.view.clear();
    if (!read_extents(view, tensor.view) || !tensor_bytes(tensor.view, *element) ||
        elements_of(tensor.view) != elements_of(tensor.shape)) {
      throw wrong_tensor(part, name, "its view has not as many elements as its shape");
    }
  }
  std::set<std::pair<std::size_t, std::string_view>> places;
  for (const Json& each : *pieces) {
    IndexedPiece piece;
    piece.box.view = tensor.view;
    if (!each.is_array() || each.size() != 4 || !each[0].is_number_unsigned() || !each[1].is_string() ||
        !read_extents(&each[2], piece.box.offset) || !read_extents(&each[3], piece.box.size)) {
      throw wrong_tensor(part, name, "a piece is not [file, key, offset, size]");
    }
    if (each[0].get<std::uint64_t>() >= files)
      throw wrong_tensor(part, name, "a piece is in a file that is not listed");
    piece.file = each[0].get<std::size_t>();
    piece.key = each[1].get<std::string>();
    tensor.pieces.push_back(std::move(piece));
  }
  std::vector<const TensorBox*> boxes;
  for (const IndexedPiece& piece : tensor.pieces) {
    if (!places.emplace(piece.file, piece.key).second) throw wrong_tensor(part, name, "two pieces are in one place");
    boxes.push_back(&piece.box);
  }
  if (const std::string error = cover_error(boxes, tensor.view); !error.empty()) throw wrong_tensor(part, name, error);
  return tensor;
}

IndexedPart read_part(const std::string& name, const Json& json, std::size_t files) {
  IndexedPart part;
  const Json* texts = member(json, "texts");
  const Json* tensors = member(json, "tensors");
  if (!is_plain_name(name)) throw ProtocolError("a part of the index has a name that no file can have");
  if (texts == nullptr || !texts->is_object() || tensors == nullptr || !tensors->is_object()) {
    throw ProtocolError(format_text("part \"{}\" of the index has no texts and tensors", shown_name(name)));
  }
  for (const auto& [key, text] : texts->items()) {
    if (!text.is_string())
      throw ProtocolError(format_text("\"{}\" of part \"{}\" is not text", shown_name(key), shown_name(name)));
    part.texts[key] = text.get<std::string>();
  }
  for (const auto& [key, tensor] : tensors->items()) part.tensors[key] = read_tensor(name, key, tensor, files);
  return part;
}

}  // namespace

std::string rank_file_name(std::size_t rank, std::size_t ranks) {
  return format_text("rank-{:05}-of-{:05}.safetensors", rank, ranks);
}

std::string encode_index(const CheckpointIndex& index) {
  Json parts = Json::object();
  for (const auto& [name, part] : index.parts) {
    Json tensors = Json::object();
    for (const auto& [key, tensor] : part.tensors) {
      Json pieces = Json::array();
      for (const IndexedPiece& piece : tensor.pieces)
        pieces.push_back(Json::array({piece.file, piece.key, piece.box.offset, piece.box.size}));
      Json& entry = tensors[key] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"pieces", std::move(pieces)}};
      if (tensor.view != tensor.shape) entry["view"] = tensor.view;
    }
    Json& entry = parts[name] = Json::object();
    entry["texts"] = Json(Json::value_t::object);
    for (const auto& [key, text] : part.texts) entry["texts"][key] = text;
    entry["tensors"] = std::move(tensors);
  }
  Json json = Json::object();
  json["format"] = kIndexFormat;
  json["files"] = index.files;
  json["parts"] = std::move(parts);
  try {
    return json.dump() + "\n";
  } catch (const Json::exception& error) {
    throw InvalidArgument(format_text("a name or a text of the checkpoint is not valid UTF-8: {}", error.what()));
  }
}

CheckpointIndex parse_index(std::string_view text) {
  // As in a safetensors header, duplicate names and deep nesting are refused while parsing.
  std::vector<std::set<std::string>> open;
  std::string error;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    constexpr int kDeepest = 8;
    if (depth > kDeepest) error = "the index is nested too deeply";
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end && !open.empty()) open.pop_back();
    if (event == Json::parse_event_t::key && !open.empty()) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!open.back().insert(name).second) error = format_text("\"{}\" stands in the index twice", shown_name(name));
    }
    return error.empty();
  };
  Json json;
  try {
    json = Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception&) {
    throw ProtocolError("the index is not valid JSON");
  }
  if (!error.empty()) throw ProtocolError(error);
  const Json* format = member(json, "format");
  if (format == nullptr || *format != kIndexFormat) throw ProtocolError("the index is of another format");
  const Json* files = member(json, "files");
  const Json* parts = member(json, "parts");
  if (files == nullptr || !files->is_array() || files->empty() || files->size() > kMaxFilesOfCheckpoint ||
      parts == nullptr || !parts->is_object()) {
    throw ProtocolError("the index has no files and parts");
  }
  CheckpointIndex index;
  for (const Json& file : *files) {
    if (!file.is_string() || !is_plain_name(file.get_ref<const std::string&>()))
      throw ProtocolError("the index names a file outside the checkpoint");
    index.files.push_back(file.get<std::string>());
  }
  for (const auto& [name, part] : parts->items()) index.parts[name] = read_part(name, part, index.files.size());
  return index;
}

}  // namespace maniple
