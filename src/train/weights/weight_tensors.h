// Tensors and weights files: dtypes by name, the names of a module's tensors, and tensors in mapped files.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "train/weights/name_rules.h"
#include "train/weights/weights_files.h"

namespace maniple {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// The dtype's name in safetensors; nullopt if the format does not have it.
std::optional<std::string> stored_dtype(torch::ScalarType type);
/// Nullopt for a dtype that this LibTorch does not have.
std::optional<torch::ScalarType> dtype_of_stored(const std::string& name);

/// Parameters and buffers, in the module's order, under the names that files use.
NamedTensors named_tensors_of(const torch::nn::Module& module);

/// Equal for tensors that are the same memory under several names; nullopt for empty tensors.
std::optional<std::string> memory_of(const torch::Tensor& tensor);

/// Both kinds of renaming: first the rules, then the function.
class Renaming {
 public:
  Renaming(const std::vector<std::pair<std::string, std::string>>& rules,
           const std::function<std::string(const std::string&)>& function)
      : rules_(rules), function_(function) {}
  std::string operator()(const std::string& name) const {
    std::string renamed = rules_.apply(name);
    return function_ && !renamed.empty() ? function_(renamed) : renamed;
  }

 private:
  NameRules rules_;
  std::function<std::string(const std::string&)> function_;
};

/// Renames the tensors of the files: maps each new name to an index into WeightsFiles::stored. Tensors that are left
/// out are added to `ignored`. Throws InvalidArgument if two tensors get the same name.
std::map<std::string, std::size_t> rename_stored(const WeightsFiles& files, const Renaming& renaming,
                                                 std::vector<std::string>& ignored);

/// Maps each file into memory when it is first needed, for as long as tensors refer to it.
class MappedFiles {
 public:
  explicit MappedFiles(const WeightsFiles& files) : files_(files), mapped_(files.files.size()) {}

  /// A tensor that uses the file's memory. (A tensor that is not aligned in the file is copied.)
  torch::Tensor tensor(const StoredTensor& stored, torch::ScalarType type);
  /// Advises the system that the pages read so far through mappings need not stay in memory.
  void release() const noexcept;

 private:
  struct Mapping;
  const WeightsFiles& files_;
  std::vector<std::shared_ptr<Mapping>> mapped_;
};

}  // namespace maniple
