#include "train/weights/weight_tensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "train/checkpoint/safetensors.h"
#include "train/state_key.h"
#include <maniple/train/module_wrapper.h>

namespace maniple {
namespace {

struct StoredDtype {
  torch::ScalarType type;
  const char* name;
};
constexpr StoredDtype kStoredDtypes[] = {
    {torch::kBool, "BOOL"},
    {torch::kUInt8, "U8"},
    {torch::kInt8, "I8"},
    {torch::kInt16, "I16"},
    {torch::kInt32, "I32"},
    {torch::kInt64, "I64"},
    {torch::kFloat16, "F16"},
    {torch::kBFloat16, "BF16"},
    {torch::kFloat32, "F32"},
    {torch::kFloat64, "F64"},
    {torch::kComplexFloat, "C64"},
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
    {c10::ScalarType::Float8_e5m2, "F8_E5M2"},
    {c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
#endif
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
    {c10::ScalarType::UInt16, "U16"},
    {c10::ScalarType::UInt32, "U32"},
    {c10::ScalarType::UInt64, "U64"},
#endif
};

}  // namespace

std::optional<std::string> stored_dtype(torch::ScalarType type) {
  for (const StoredDtype& entry : kStoredDtypes) {
    if (entry.type == type) return entry.name;
  }
  return std::nullopt;
}

std::optional<torch::ScalarType> dtype_of_stored(const std::string& name) {
  for (const StoredDtype& entry : kStoredDtypes) {
    if (name == entry.name) return entry.type;
  }
  return std::nullopt;
}

NamedTensors named_tensors_of(const torch::nn::Module& module) {
  // A wrapper's only child is "module"; skipped, so that files do not depend on whether the module was wrapped.
  const bool wrapped = dynamic_cast<const detail::ModuleWrapper*>(&module) != nullptr;
  NamedTensors tensors;
  const auto add = [&](const torch::OrderedDict<std::string, torch::Tensor>& named) {
    for (const auto& item : named) {
      if (!item.value().defined()) continue;
      tensors.emplace_back(wrapped ? inner_name(item.key()) : item.key(), item.value());
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return tensors;
}

std::optional<std::string> memory_of(const torch::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.layout() != torch::kStrided) return std::nullopt;
  const void* place = tensor.is_meta() ? static_cast<const void*>(tensor.unsafeGetTensorImpl()) : tensor.data_ptr();
  return format_text("{:x} {} {} [{}] [{}]", reinterpret_cast<std::uintptr_t>(place), tensor.device().str(),
                     static_cast<int>(tensor.scalar_type()), joined(tensor.sizes()), joined(tensor.strides()));
}

std::map<std::string, std::size_t> rename_stored(const WeightsFiles& files, const Renaming& renaming,
                                                 std::vector<std::string>& ignored) {
  std::map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < files.stored.tensors.size(); ++i) {
    const std::string& name = files.stored.tensors[i].name;
    const std::string renamed = renaming(name);
    if (renamed.empty()) {
      ignored.push_back(format_text("{} (left out by renaming)", shown_name(name)));
      continue;
    }
    const auto [place, added] = places.emplace(renamed, i);
    MANIPLE_REQUIRE(added, "{}: renaming calls both \"{}\" and \"{}\" \"{}\"", files.path,
                    shown_name(files.stored.tensors[place->second].name), shown_name(name), shown_name(renamed));
  }
  return places;
}

/// A copy-on-write mapping, so that its tensors can be written to. It reserves no swap, because a reservation for a
/// large file might be refused.
struct MappedFiles::Mapping {
  explicit Mapping(const RegularFile& file) : bytes(file.size()) {
    if (bytes == 0) return;
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.descriptor(), 0);
    if (mapped == MAP_FAILED) throw_system_error(format_text("map {} into memory", file.path()));
    begin = static_cast<char*>(mapped);
  }
  ~Mapping() {
    if (begin != nullptr) ::munmap(begin, bytes);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* begin = nullptr;
  std::size_t bytes = 0;
};

torch::Tensor MappedFiles::tensor(const StoredTensor& stored, torch::ScalarType type) {
  const auto options = torch::TensorOptions().dtype(type);
  std::int64_t last = 0;
  if (std::find(stored.shape.begin(), stored.shape.end(), 0) != stored.shape.end())
    return torch::empty(stored.shape, options);
  for (std::size_t i = 0; i < stored.shape.size(); ++i) last += (stored.shape[i] - 1) * stored.strides[i];
  std::shared_ptr<Mapping>& mapping = mapped_[stored.file];
  if (!mapping) mapping = std::make_shared<Mapping>(*files_.files[stored.file]);
  char* begin = mapping->begin + stored.begin;
  const std::size_t element = c10::elementSize(type);
  if (stored.begin % element == 0)
    return torch::from_blob(
        begin, stored.shape, stored.strides, [mapping](void*) mutable { mapping.reset(); }, options);
  const torch::Tensor own = torch::empty({last + 1}, options);
  std::memcpy(own.data_ptr(), begin, (last + 1) * element);
  return own.as_strided(stored.shape, stored.strides);
}

void MappedFiles::release() const noexcept {
  for (const auto& mapping : mapped_) {
    if (mapping && mapping->begin != nullptr) ::madvise(mapping->begin, mapping->bytes, MADV_DONTNEED);
  }
}

}  // namespace maniple
