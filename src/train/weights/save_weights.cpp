#include <unistd.h>

#include <algorithm>
#include <deque>
#include <set>

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"
#include "train/tensor_layout.h"
#include "train/weights/weight_tensors.h"
#include <maniple/train/weights.h>

namespace maniple {
namespace {

constexpr std::string_view kEnding = ".safetensors";
constexpr std::int64_t kWrittenAtOnce = std::int64_t{16}
                                        << 20;  // bytes of a tensor that must be copied or converted before writing

/// A tensor in the form that the file will have.
struct Saved {
  SafetensorsEntry entry;
  torch::Tensor tensor;  // has that shape, but maybe another dtype
  torch::ScalarType type{};
};

/// The tensors to save, in the module's order. A tensor with several names is saved once; its other names go into
/// `metadata`, as in Hugging Face's files.
std::vector<Saved> chosen_tensors(const NamedTensors& tensors, const SaveWeightsOptions& options,
                                  std::map<std::string, std::string>& metadata) {
  const Renaming renaming(options.rename, options.rename_by);
  const NameRules transpose(options.transpose);
  MANIPLE_REQUIRE(!options.dtype || c10::isFloatingType(*options.dtype), "dtype is {}; expected a floating-point dtype",
                  c10::toString(options.dtype.value_or(torch::kFloat32)));
  std::vector<Saved> chosen;
  std::map<std::string, std::string> saved_as;  // name in the file, by memory
  std::set<std::string> names;
  for (const auto& [own_name, tensor] : tensors) {
    MANIPLE_REQUIRE(
        tensor.defined() && tensor.layout() == torch::kStrided && !tensor.is_meta() && !tensor.is_quantized(),
        "\"{}\" cannot be saved: it is undefined, sparse, quantized, or on the device meta", own_name);
    const std::string name = renaming(own_name);
    if (name.empty()) continue;
    MANIPLE_REQUIRE(names.insert(name).second, "two tensors would be saved under the name \"{}\"", shown_name(name));
    if (const auto memory = memory_of(tensor)) {
      const auto [kept, is_new] = saved_as.emplace(*memory, name);
      if (!is_new) {
        metadata[name] = kept->second;
        continue;
      }
    }
    Saved saved;
    saved.type = options.dtype && c10::isFloatingType(tensor.scalar_type()) ? *options.dtype : tensor.scalar_type();
    saved.tensor = tensor.detach();
    if (transpose.matches(name)) {
      MANIPLE_REQUIRE(tensor.dim() == 2, "\"{}\" has shape [{}]; only matrices can be transposed", shown_name(name),
                      joined(tensor.sizes()));
      saved.tensor = saved.tensor.t();
    }
    const auto type = stored_dtype(saved.type);
    saved.entry = {name, type.value_or(c10::toString(saved.type)), saved.tensor.sizes().vec()};
    chosen.push_back(std::move(saved));
  }
  return chosen;
}

/// Writes a tensor in row-major order and the file's dtype, using little additional memory.
void write_tensor(DurableFile& file, const Saved& saved) {
  torch::Tensor tensor = saved.tensor;
  if (tensor.numel() == 0) return;
  if (tensor.is_contiguous()) tensor = tensor.view({-1});
  const bool as_it_is = tensor.device().is_cpu() && tensor.scalar_type() == saved.type && tensor.is_contiguous();
  if (as_it_is) return file.write(tensor.data_ptr(), tensor.nbytes());
  const std::int64_t rows = tensor.size(0);
  const std::int64_t row_bytes = tensor.numel() / rows * static_cast<std::int64_t>(c10::elementSize(saved.type));
  const std::int64_t at_once = std::max<std::int64_t>(1, kWrittenAtOnce / row_bytes);
  for (std::int64_t row = 0; row < rows; row += at_once) {
    const torch::Tensor part =
        tensor.narrow(0, row, std::min(at_once, rows - row)).to(torch::kCPU, saved.type).contiguous();
    file.write(part.data_ptr(), part.nbytes());
  }
}

void write_file(DurableFile& file, std::vector<Saved> tensors, const std::map<std::string, std::string>& metadata) {
  // Wide elements first: then all tensors are aligned in the file, and readers can use them in place.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Saved& a, const Saved& b) { return c10::elementSize(a.type) > c10::elementSize(b.type); });
  SafetensorsHeader header;
  header.metadata = metadata;
  for (const Saved& saved : tensors) header.entries.push_back(saved.entry);
  place_safetensors(header);
  file.write(encode_safetensors(header));
  for (const Saved& saved : tensors) write_tensor(file, saved);
  file.sync();
}

/// Divides tensors into parts, in order, with as many per part as fit. A tensor that is too large gets its own part.
std::vector<std::vector<Saved>> divided(std::vector<Saved> tensors, std::uint64_t most_bytes) {
  std::vector<std::vector<Saved>> parts(1);
  std::uint64_t bytes = 0;
  for (Saved& saved : tensors) {
    const std::uint64_t more = static_cast<std::uint64_t>(saved.tensor.numel()) * c10::elementSize(saved.type);
    if (most_bytes != 0 && !parts.back().empty() && more > most_bytes - std::min(bytes, most_bytes)) {
      parts.emplace_back();
      bytes = 0;
    }
    bytes += more;
    parts.back().push_back(std::move(saved));
  }
  return parts;
}

/// The files of an earlier save at this path, from its index.
std::vector<std::string> files_of_index(const std::string& path, const std::string& stem) {
  std::set<std::string> files;
  try {
    for (const auto& [name, file] : parse_weights_index(read_small_file(path, 100'000'000)).files) {
      const std::string full = folder_of(path) + file;
      if (full.starts_with(stem + "-") && full.ends_with(kEnding)) files.insert(full);
    }
  } catch (const Error&) {  // there is no index, or Maniple did not write it
  }
  return {files.begin(), files.end()};
}

void save(const NamedTensors& tensors, std::string path, const SaveWeightsOptions& options) {
  const torch::NoGradGuard no_grad;
  if (is_folder(path)) path += path.ends_with('/') ? "model.safetensors" : "/model.safetensors";
  MANIPLE_REQUIRE(
      path.ends_with(kEnding),
      "{}: weights are saved as safetensors; give a name that ends in .safetensors, or a folder that is there", path);
  std::map<std::string, std::string> metadata(options.metadata.begin(), options.metadata.end());
  const auto parts = divided(chosen_tensors(tensors, options, metadata), options.max_shard_bytes);
  const std::string stem = path.substr(0, path.size() - kEnding.size()), index_path = path + ".index.json";
  const std::vector<std::string> old = files_of_index(index_path, stem);
  std::set<std::string> current;
  std::deque<DurableFile> files;
  WeightsIndex index;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string name =
        parts.size() == 1 ? path : format_text("{}-{:05}-of-{:05}{}", stem, i + 1, parts.size(), kEnding);
    for (const Saved& saved : parts[i]) {
      index.files[saved.entry.name] = name.substr(folder_of(name).size());
      index.total_bytes += static_cast<std::uint64_t>(saved.tensor.numel()) * c10::elementSize(saved.type);
    }
    write_file(files.emplace_back(name, DurableFile::Hash::none), parts[i], metadata);
    current.insert(name);
  }
  if (parts.size() > 1) {
    DurableFile& index_file = files.emplace_back(index_path, DurableFile::Hash::none);
    index_file.write(encode_weights_index(index));
    index_file.sync();
    // An index must never refer to files of two saves, even if this process is killed here. So the old index is removed
    // first, and the new one is published last.
    ::unlink(index_path.c_str());
  }
  DurableFile::publish(files);
  // Otherwise files of an earlier save would be taken for this one's.
  ::unlink(parts.size() == 1 ? index_path.c_str() : path.c_str());
  for (const std::string& file : old) {
    if (current.count(file) == 0) ::unlink(file.c_str());
  }
}

}  // namespace

void save_weights(const torch::nn::Module& module, const std::string& path, const SaveWeightsOptions& options) {
  detail::require_whole(module, "save_weights",
                        "call full_parameters on all ranks and save its tensors on one, or use Checkpoint with "
                        "CheckpointOptions::sharded");
  save(named_tensors_of(module), path, options);
}

void save_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                  const SaveWeightsOptions& options) {
  for (const auto& [name, tensor] : tensors)
    detail::require_whole(name, tensor, "save_weights",
                          "call full_parameters on all ranks and save its tensors on one, or use Checkpoint with "
                          "CheckpointOptions::sharded");
  save(tensors, path, options);
}

}  // namespace maniple
