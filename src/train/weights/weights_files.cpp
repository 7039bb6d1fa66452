#include "train/weights/weights_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include "comm/base/files.h"
#include "train/checkpoint/safetensors.h"
#include "train/weights/torch_file.h"
#include "train/weights/zip_archive.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxIndexBytes = 100'000'000;
constexpr std::size_t kMaxShards = 100'000;
constexpr std::string_view kIndexEnding = ".index.json";

StoredTensors read_safetensors(const RegularFile& file, std::string_view first) {
  const std::uint64_t header_bytes = safetensors_header_bytes(first.substr(0, kSafetensorsPrefixBytes), file.size());
  std::string text(header_bytes, '\0');
  file.read(kSafetensorsPrefixBytes, text.data(), text.size());
  const std::uint64_t data = kSafetensorsPrefixBytes + header_bytes;
  StoredTensors stored;
  for (SafetensorsEntry& entry : parse_safetensors(text, file.size() - data).entries) {
    std::vector<std::int64_t> strides = row_major_strides(entry.shape);
    stored.tensors.push_back({std::move(entry.name), std::move(entry.dtype), std::move(entry.shape), std::move(strides),
                              data + entry.begin, 0});
  }
  return stored;
}

StoredTensors read_file(const RegularFile& file, const std::string& key) {
  std::string first(std::min<std::size_t>(512, file.size()), '\0');
  file.read(0, first.data(), first.size());
  const ReadAt read = [&](std::uint64_t offset, void* to, std::size_t count) { file.read(offset, to, count); };
  if (looks_like_zip(first)) return read_torch_file(file.size(), read, key);
  refuse_legacy_torch_file(first);
  if (first.size() > kSafetensorsPrefixBytes && first[kSafetensorsPrefixBytes] != '{')
    throw ProtocolError("it is neither a safetensors file nor one of torch.save");
  MANIPLE_REQUIRE(key.empty(), "key is \"{}\", but a safetensors file has no dictionaries in it, only tensors",
                  shown_name(key));
  return read_safetensors(file, first);
}

/// Calls `read`, and adds the file's name to its errors.
template <class Read>
auto naming(const std::string& path, Read&& read) {
  try {
    return read();
  } catch (const ProtocolError& error) {
    throw ProtocolError(format_text("{}: {}", path, error.what()));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(format_text("{}: {}", path, error.what()));
  }
}

/// The file for a path: the file in a folder, or the index if a model was saved in several files.
std::string resolved(const std::string& path) {
  if (!is_folder(path)) {
    if (const std::string index = path + std::string(kIndexEnding); !is_readable(path) && is_readable(index))
      return index;
    return path;
  }
  const std::string folder = path.ends_with('/') ? path : path + "/";
  for (const char* name :
       {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (is_readable(folder + name)) return folder + name;
  }
  std::vector<std::string> indices, files;
  for (const std::string& name : names_in(path)) {
    if (name.ends_with(".safetensors.index.json")) indices.push_back(name);
    if (name.ends_with(".safetensors")) files.push_back(name);
  }
  if (indices.size() == 1) return folder + indices.front();
  if (indices.empty() && files.size() == 1) return folder + files.front();
  std::sort(files.begin(), files.end());
  throw InvalidArgument(
      format_text("{}: {} weights; expected model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
                  "pytorch_model.bin.index.json, or one other .safetensors file{}{}",
                  path, files.empty() ? "this folder holds no" : "it is not clear which file of this folder holds the",
                  files.empty() ? "" : "; there are ", shortened(files)));
}

WeightsFiles open_shards(const std::string& path, const std::string& key) {
  WeightsFiles all;
  all.path = path;
  const WeightsIndex index = naming(path, [&] { return parse_weights_index(read_small_file(path, kMaxIndexBytes)); });
  std::set<std::string> shards;
  for (const auto& [name, file] : index.files) shards.insert(file);
  std::set<std::string> found;
  for (const std::string& shard : shards) {
    all.files.push_back(std::make_unique<RegularFile>(folder_of(path) + shard));
    const RegularFile& file = *all.files.back();
    StoredTensors stored = naming(file.path(), [&] { return read_file(file, key); });
    for (StoredTensor& tensor : stored.tensors) {
      const auto place = index.files.find(tensor.name);
      if (place != index.files.end() && place->second != shard) continue;  // the index decides which one counts
      tensor.file = all.files.size() - 1;
      if (!found.insert(tensor.name).second)
        throw ProtocolError(format_text("{}: tensor \"{}\" is also in another file, and the index names none",
                                        file.path(), shown_name(tensor.name)));
      all.stored.tensors.push_back(std::move(tensor));
    }
    std::move(stored.ignored.begin(), stored.ignored.end(), std::back_inserter(all.stored.ignored));
  }
  for (const auto& [name, file] : index.files) {
    if (found.count(name) == 0)
      throw ProtocolError(
          format_text("{}: tensor \"{}\" should be in {}, and is not", path, shown_name(name), shown_name(file)));
  }
  return all;
}

}  // namespace

std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(shape[i], 1);
  }
  return strides;
}

bool is_row_major(const StoredTensor& tensor) noexcept {
  std::int64_t step = 1;
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
    step *= tensor.shape[i];
  }
  return true;
}

std::string shortened(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 10;
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, names.size())));
  return names.size() <= kShown ? joined(first)
                                : format_text("{}, ... and {} more", joined(first), names.size() - kShown);
}

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

bool is_folder(const std::string& path) noexcept {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

WeightsIndex parse_weights_index(std::string_view text) {
  // As in parse_safetensors, duplicate names and nesting are refused while parsing.
  using Json = nlohmann::json;
  std::set<std::string> names;
  std::string error;
  bool in_map = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    constexpr int kDeepest = 16;
    if (depth > kDeepest) error = "the index is nested too deeply";
    if (event == Json::parse_event_t::key && depth == 1) in_map = parsed == "weight_map";
    if (event == Json::parse_event_t::key && depth == 2 && in_map) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names.insert(name).second) error = format_text("the index names tensor \"{}\" twice", shown_name(name));
    }
    return error.empty();
  };
  Json parsed;
  try {
    parsed = Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception&) {
    throw ProtocolError("the index is not valid JSON");
  }
  if (!error.empty()) throw ProtocolError(error);
  const auto map = parsed.is_object() ? parsed.find("weight_map") : parsed.end();
  if (!parsed.is_object() || map == parsed.end() || !map->is_object())
    throw ProtocolError("the index has no weight_map; expected {\"weight_map\": {\"NAME\": \"FILE\", ...}}");
  WeightsIndex index;
  std::set<std::string> files;
  for (const auto& [name, value] : map->items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos ||
        file.find('\0') != std::string::npos)
      throw ProtocolError(
          format_text("the index puts tensor \"{}\" into \"{}\"; expected the name of a file beside the index",
                      shown_name(name), shown_name(file)));
    files.insert(file);
    index.files[name] = file;
  }
  if (files.size() > kMaxShards)
    throw ProtocolError(format_text("the index names {} files; at most {} are allowed", files.size(), kMaxShards));
  return index;
}

std::string encode_weights_index(const WeightsIndex& index) {
  const nlohmann::json text = {{"metadata", {{"total_size", index.total_bytes}}}, {"weight_map", index.files}};
  try {
    return text.dump(2) + "\n";
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(format_text("the name of a tensor is not valid UTF-8: {}", error.what()));
  }
}

WeightsFiles open_weights(const std::string& path, const std::string& key) {
  const std::string chosen = resolved(path);
  if (chosen.ends_with(".json")) return open_shards(chosen, key);
  WeightsFiles all;
  all.path = chosen;
  all.files.push_back(std::make_unique<RegularFile>(chosen));
  all.stored = naming(chosen, [&] { return read_file(*all.files.front(), key); });
  return all;
}

}  // namespace maniple
