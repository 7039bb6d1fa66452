// Weights of a model in files that Python and other programs read and write, too.
//
//   maniple::save_weights(*net, "net.safetensors");
//   // everything fits, or nothing is changed
//   maniple::load_weights(*net, "net.safetensors");
//   maniple::load_weights(*gpt2, "gpt2/", {.rename = {{"^h\\.", "blocks."}},           // a folder from Hugging Face
//                                         .transpose = {"c_(attn|proj|fc)\\.weight$"}});
//   // of torch.save({"model": ..., "epoch": 3})
//   maniple::load_weights(*net, "trained.pt", {.key = "model"});
//   for (const auto& item : maniple::read_weights("net.safetensors")) print(item.key(), item.value().sizes());
//
// What is read    - a safetensors file
//                 - a file of torch.save (.pt, .pth, .bin) that holds a dictionary of tensors. Python is not needed,
//                   and nothing in the file is executed: a pickle that refers to anything else than tensors is refused
//                   by what it refers to
//                 - several of these with an index (model.safetensors.index.json): the path is the index, or the one
//                   file that the model would be
//                 - a folder with one of these
//                 What a file is is seen from its content, not from its name.
// What is saved   safetensors; several files and their index when max_shard_bytes says so. Each is written under
//                 another name, synced and renamed, so that a path never stands for half a file.
// Names           Those of named_parameters() and named_buffers(), "fc1.weight"; of DistributedDataParallel and
//                 DataParallel without the "module." in front. `rename` and `rename_by` change them. Regular
//                 expressions are POSIX extended ones (grep -E), and \d is understood; every place where they match is
//                 replaced; \1 to \9 is what matched in parentheses. A name that becomes empty is left out.
// Dtypes          Converted to those of the module: float32, float64, float16 and bfloat16 into each other, whole
//                 numbers into each other.
// Devices         The module's tensors stay where they are, unless `device` moves them.
// Tied weights    A tensor that has several names in the module is saved once, under the first, and loaded if one of
//                 them is there.
// Memory          Bytes go from the file right into the module's memory, or through some MiB: loading a model of 10 GB
//                 takes no second 10 GB.
// Ranks           None of this is a collective. With DistributedDataParallel rank 0 loads before the module is wrapped,
//                 which gives its weights to all ranks; or every rank loads. Rank 0 alone saves. See docs/weights.md.
//
// Errors: SystemError for what the system refuses, ProtocolError for damaged files, InvalidArgument for the rest; each
// names the file.
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
  /// True: names that only one side has, and other shapes, are an error that lists all of them, and nothing is changed.
  /// False: the rest is loaded; still an error if that is nothing.
  bool strict = true;
  /// Regular expression and replacement, applied in order to the names in the file: what comes out is looked for in the
  /// module.
  std::vector<std::pair<std::string, std::string>> rename = {};
  std::function<std::string(const std::string&)> rename_by = {};  ///< applied after `rename`
  /// Matrices whose name in the file matches one of these are transposed: the Conv1D layers of GPT-2, say.
  std::vector<std::string> transpose = {};
  bool convert_dtype = true;  ///< false: another dtype does not fit, as another shape
  /// Where the module goes, after everything was found to fit; default: it stays where it is.
  std::optional<torch::Device> device = {};
  /// Of files of torch.save: the dictionary inside the one that was saved; "a/b": the one at "b" of that at "a".
  std::string key = {};
};

/// What was found.
struct WeightsReport {
  std::vector<std::string> loaded;      ///< names in the module
  std::vector<std::string> missing;     ///< in the module, but not in the file
  std::vector<std::string> unexpected;  ///< in the file (after renaming), but not in the module
  std::vector<std::string> mismatched;  ///< "fc.weight: F32 [3, 4] in the file, F32 [4, 3] in the module"
  std::vector<std::string> ignored;     ///< no tensors ("epoch (a whole number)"), or left out by renaming

  bool complete() const noexcept { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  std::string text() const;  ///< one line; long lists are shortened, with how many more there are
};

/// Loads parameters and buffers. Autograd does not notice. If reading fails in the middle (a bad disk, a file that
/// becomes shorter), some tensors are loaded and others not; every other error is found before.
WeightsReport load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});

/// The same for any tensors with names: those of a torch::jit::Module, for instance.
WeightsReport load_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                           const LoadWeightsOptions& options = {});

struct SaveWeightsOptions {
  /// Tensors are distributed over files NAME-00001-of-00003.safetensors of at most this size (or with one tensor in
  /// it), if one does not do; 0: always one.
  std::uint64_t max_shard_bytes = 0;
  std::optional<torch::ScalarType> dtype = {};                    ///< of all floating-point tensors; default: their own
  std::vector<std::pair<std::string, std::string>> rename = {};   ///< from names in the module to those in the file
  std::function<std::string(const std::string&)> rename_by = {};  ///< applied after `rename`
  std::vector<std::string> transpose = {};                        ///< as in LoadWeightsOptions: of names in the file
  /// Texts that go with it; some readers in Python look for "format".
  std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
};

/// `path` ends in ".safetensors", or is a folder, which gets model.safetensors. Replaces what is there, also files and
/// the index of an earlier save in another number of files.
void save_weights(const torch::nn::Module& module, const std::string& path, const SaveWeightsOptions& options = {});
void save_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                  const SaveWeightsOptions& options = {});

struct ReadWeightsOptions {
  std::vector<std::pair<std::string, std::string>> rename = {};
  std::function<std::string(const std::string&)> rename_by = {};
  std::vector<std::string> transpose = {};
  std::string key = {};
};

/// All tensors of the file, by name, in its order. They lie in the file itself, mapped into memory: a tensor's bytes
/// are read when it is first used, and writing to it changes neither the file nor what others see. The file must not be
/// changed while they are in use: one that becomes shorter ends the process with SIGBUS.
torch::OrderedDict<std::string, torch::Tensor> read_weights(const std::string& path,
                                                            const ReadWeightsOptions& options = {});

}  // namespace maniple
