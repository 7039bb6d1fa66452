// Tensors and files of weights: dtypes by name, the names of a module's tensors, and tensors that lie in a mapped file.
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

/// As safetensors spells it; nullopt for a dtype that the format does not have.
std::optional<std::string> stored_dtype(torch::ScalarType type);
/// Nullopt for a dtype that this LibTorch does not have.
std::optional<torch::ScalarType> dtype_of_stored(const std::string& name);

/// Parameters and buffers, in the module's order, under the names that they have in files.
NamedTensors named_tensors_of(const torch::nn::Module& module);

/// Equal for tensors that are the same memory under several names; nullopt for empty ones.
std::optional<std::string> memory_of(const torch::Tensor& tensor);

/// The two ways to rename, together.
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

/// The tensors of files, renamed: index into WeightsFiles::stored by name. Those left out are added to `ignored`.
/// Throws InvalidArgument if two get the same name.
std::map<std::string, std::size_t> rename_stored(const WeightsFiles& files, const Renaming& renaming,
                                                 std::vector<std::string>& ignored);

/// Files mapped into memory, each when it is first needed, and for as long as there are tensors in it.
class MappedFiles {
 public:
  explicit MappedFiles(const WeightsFiles& files) : files_(files), mapped_(files.files.size()) {}

  /// A tensor whose memory is the file's. (One that is not aligned there has memory of its own.)
  torch::Tensor tensor(const StoredTensor& stored, torch::ScalarType type);
  /// Tells the system that what was read through mappings so far need not stay in memory.
  void release() const noexcept;

 private:
  struct Mapping;
  const WeightsFiles& files_;
  std::vector<std::shared_ptr<Mapping>> mapped_;
};

}  // namespace maniple
