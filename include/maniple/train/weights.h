// Loads and saves model weights in file formats shared with Python and other programs.
//
//   maniple::save_weights(*net, "net.safetensors");
//   // everything fits, or nothing is changed
//   maniple::load_weights(*net, "net.safetensors");
//   maniple::load_weights(*gpt2, "gpt2/", {.rename = {{"^h\\.", "blocks."}},           // a folder from Hugging Face
//                                         .transpose = {"c_(attn|proj|fc)\\.weight$"}});
//   // saved by torch.save({"model": ..., "epoch": 3})
//   maniple::load_weights(*net, "trained.pt", {.key = "model"});
//   for (const auto& item : maniple::read_weights("net.safetensors")) print(item.key(), item.value().sizes());
//
// Input           - a safetensors file
//                 - a file of torch.save (.pt, .pth, .bin) with a dictionary of tensors. Python is not needed, and
//                   nothing in the file is executed: a pickle that refers to anything but tensors is rejected, and the
//                   error names the reference
//                 - several such files with an index (model.safetensors.index.json). The path is the index, or the name
//                   that a single file would have
//                 - a folder with one of these
//                 The format is detected from the file's contents, not from its name.
// Output          safetensors; several files and an index if max_shard_bytes requires it. Each file is written under
//                 another name, synced and renamed, so a path never refers to an incomplete file.
// Names           As in named_parameters() and named_buffers(), "fc1.weight"; for DistributedDataParallel and
//                 DataParallel without the prefix "module.". `rename` and `rename_by` change them. Regular expressions
//                 are POSIX extended (grep -E) plus \d. All matches are replaced; \1 to \9 refer to the groups in
//                 parentheses. A tensor whose name becomes empty is skipped.
// Dtypes          Converted to the module's: float32, float64, float16 and bfloat16 into each other, integers into each
//                 other.
// Devices         The module's tensors stay on their devices, unless `device` moves them.
// Tied weights    A tensor with several names in the module is saved once, under the first name, and loaded if the file
//                 has one of the names.
// Memory          Data is read directly into the module's memory, or through a buffer of some MiB: loading a 10 GB
//                 model does not need another 10 GB.
// Ranks           None of these functions is a collective. With DistributedDataParallel, either rank 0 loads before the
//                 module is wrapped (the wrapper copies its weights to all ranks), or every rank loads. Only rank 0
//                 saves. See docs/weights.md.
//
// Errors: SystemError for failed system calls, ProtocolError for damaged files, InvalidArgument for everything else.
// All errors name the file.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct LoadWeightsOptions {
  /// True: names on one side only, and different shapes, are an error that lists all of them, and nothing is changed.
  /// False: everything that fits is loaded; it is still an error if nothing fits.
  bool strict = true;
  /// Regular expressions and replacements, applied in order to the names in the file. The results are looked up in the
  /// module.
  std::vector<std::pair<std::string, std::string>> rename = {};
  std::function<std::string(const std::string&)> rename_by = {};  ///< applied after `rename`
  /// Matrices whose name in the file matches one of these are transposed, for example the Conv1D layers of GPT-2.
  std::vector<std::string> transpose = {};
  bool convert_dtype = true;  ///< false: a different dtype is a mismatch, like a different shape
  /// Device for the module, once everything is known to fit; default: it stays on its device.
  std::optional<torch::Device> device = {};
  /// For torch.save files: the key of the dictionary to load. "a/b" selects "b" inside "a".
  std::string key = {};
};

/// Result of loading.
struct WeightsReport {
  std::vector<std::string> loaded;      ///< names in the module
  std::vector<std::string> missing;     ///< in the module, but not in the file
  std::vector<std::string> unexpected;  ///< in the file (after renaming), but not in the module
  std::vector<std::string> mismatched;  ///< "fc.weight: F32 [3, 4] in the file, F32 [4, 3] in the module"
  std::vector<std::string> ignored;     ///< not a tensor ("epoch (a whole number)"), or removed by renaming

  bool complete() const noexcept { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  std::string text() const;  ///< one line; long lists are truncated, with the number of omitted names
};

/// Loads parameters and buffers, without recording gradients. If reading fails midway (a bad disk, a file that
/// shrinks), some tensors are loaded and others not; all other errors are detected before anything is changed.
WeightsReport load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});

/// The same for named tensors, for example from a torch::jit::Module.
WeightsReport load_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                           const LoadWeightsOptions& options = {});

struct SaveWeightsOptions {
  /// Maximum file size. Larger models are saved in several files NAME-00001-of-00003.safetensors; a file may exceed the
  /// limit if it holds a single tensor. 0: always one file.
  std::uint64_t max_shard_bytes = 0;
  std::optional<torch::ScalarType> dtype = {};  ///< dtype of all floating-point tensors in the file; default: unchanged
  std::vector<std::pair<std::string, std::string>> rename = {};   ///< from names in the module to names in the file
  std::function<std::string(const std::string&)> rename_by = {};  ///< applied after `rename`
  std::vector<std::string> transpose = {};                        ///< as in LoadWeightsOptions: names in the file
  /// Text entries saved in the file; some readers in Python expect "format".
  std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
};

/// `path` ends in ".safetensors", or is a folder, in which model.safetensors is written. Replaces existing files,
/// including the files and index of an earlier save with another number of files.
void save_weights(const torch::nn::Module& module, const std::string& path, const SaveWeightsOptions& options = {});
void save_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                  const SaveWeightsOptions& options = {});

struct ReadWeightsOptions {
  std::vector<std::pair<std::string, std::string>> rename = {};
  std::function<std::string(const std::string&)> rename_by = {};
  std::vector<std::string> transpose = {};
  std::string key = {};
};

/// All tensors of the file, by name, in file order. They are mapped from the file: bytes are read on first use, and
/// writing to a tensor changes neither the file nor other mappings. Do not change the file while the tensors are in
/// use: if it shrinks, the process ends with SIGBUS.
torch::OrderedDict<std::string, torch::Tensor> read_weights(const std::string& path,
                                                            const ReadWeightsOptions& options = {});

}  // namespace maniple
