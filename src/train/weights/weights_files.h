// The files at a weights path: one safetensors file, one torch.save file, several files with an index, or a folder with
// one of these. Without LibTorch.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "train/disk_file.h"
#include "train/weights/stored_tensor.h"

namespace maniple {

struct WeightsFiles {
  std::string path;  ///< path of the file or of the index, for messages
  std::vector<std::unique_ptr<RegularFile>> files;
  StoredTensors stored;  ///< names are unique across all files
};

/// Opens the files and reads their lists of tensors, but no tensor data. `key`: see read_state_dict. Throws
/// ProtocolError, SystemError or InvalidArgument, naming the file and what is wrong.
WeightsFiles open_weights(const std::string& path, const std::string& key);

/// The index of a model saved in several files (shards) in the Hugging Face form: the file of each tensor.
struct WeightsIndex {
  std::map<std::string, std::string> files;  ///< by tensor name; plain file names, in the index's own folder
  std::uint64_t total_bytes = 0;             ///< of all tensors; written for other readers, not checked here
};

/// Throws ProtocolError saying what is wrong.
WeightsIndex parse_weights_index(std::string_view text);
std::string encode_weights_index(const WeightsIndex& index);

/// The path up to its last "/", inclusive; empty if there is none.
std::string folder_of(const std::string& path);
bool is_folder(const std::string& path) noexcept;

}  // namespace maniple
