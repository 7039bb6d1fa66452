// The files behind a path of weights: one safetensors file, one of torch.save, several with an index, or a folder with
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
  std::string path;  ///< that of the file or of the index, for messages
  std::vector<std::unique_ptr<RegularFile>> files;
  StoredTensors stored;  ///< names are unique in all files together
};

/// Opens them and reads what is in them, but no tensor. `key`: see read_state_dict. Throws ProtocolError, SystemError
/// or InvalidArgument, naming the file and what is wrong.
WeightsFiles open_weights(const std::string& path, const std::string& key);

/// How a model in several files (shards) is saved in the Hugging Face form: which of them has which tensor.
struct WeightsIndex {
  std::map<std::string, std::string> files;  ///< by name of tensor; plain names, in the index's own folder
  std::uint64_t total_bytes = 0;             ///< of all tensors; for other readers, not looked at here
};

/// Throws ProtocolError saying what is wrong.
WeightsIndex parse_weights_index(std::string_view text);
std::string encode_weights_index(const WeightsIndex& index);

/// The part of a path before its last "/", with it; empty if there is none.
std::string folder_of(const std::string& path);
bool is_folder(const std::string& path) noexcept;

}  // namespace maniple
