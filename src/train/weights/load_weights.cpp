#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <set>

#include <ATen/Parallel.h>

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"
#include "train/tensor_layout.h"
#include "train/weights/weight_tensors.h"
#include <maniple/train/weights.h>

namespace maniple {
namespace {

/// Bytes read at a time: enough for the disk, few enough to stay in the cache until they are converted.
constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;

/// A tensor of a file and the module's tensor that receives it.
struct Assignment {
  const StoredTensor* from = nullptr;
  torch::ScalarType type{};
  torch::Tensor to;
  bool transposed = false;
};

/// Rows of a tensor that are contiguous in its file.
struct Piece {
  const RegularFile* file = nullptr;
  std::uint64_t begin = 0;
  std::size_t bytes = 0;
  char* memory = nullptr;    // destination of unconverted bytes; or
  torch::Tensor to;          // the rows that receive converted values,
  torch::ScalarType type{};  // converted from this dtype
};

std::string shape_text(const std::vector<std::int64_t>& shape) { return format_text("[{}]", joined(shape)); }

bool convertible(torch::ScalarType from, torch::ScalarType to) {
  if (from == to) return true;
  if (c10::isFloatingType(from)) return c10::isFloatingType(to);
  return c10::isIntegralType(from, false) && c10::isIntegralType(to, false);
}

/// Why the tensor in the file does not fit the module's tensor; empty if it fits.
std::string misfit(const std::string& name, const StoredTensor& from, const torch::Tensor& to, bool transposed,
                   bool convert) {
  const auto type = dtype_of_stored(from.dtype);
  if (!type) return format_text("{}: {} in the file, a dtype that this LibTorch does not have", name, from.dtype);
  if (transposed && from.shape.size() != 2)
    return format_text("{}: {} in the file; only matrices can be transposed", name, shape_text(from.shape));
  std::vector<std::int64_t> shape = from.shape;
  if (transposed) std::swap(shape[0], shape[1]);
  const bool fits = to.sizes() == c10::IntArrayRef(shape) &&
                    (convert ? convertible(*type, to.scalar_type()) : *type == to.scalar_type());
  if (fits) return {};
  return format_text("{}: {} {}{} in the file, {} {} in the module", shown_name(name), from.dtype,
                     shape_text(from.shape), transposed ? " (to be transposed)" : "",
                     stored_dtype(to.scalar_type()).value_or(c10::toString(to.scalar_type())),
                     shape_text(to.sizes().vec()));
}

/// Adds the pieces of one tensor. Rows are indices of the first dimension, or single elements if both sides have the
/// same order.
void add_pieces(const Assignment& assignment, const RegularFile& file, std::vector<Piece>& pieces) {
  torch::Tensor to = assignment.transposed ? assignment.to.t() : assignment.to;
  if (to.numel() == 0) return;
  if (to.is_contiguous()) to = to.view({-1});
  const std::int64_t rows = to.size(0);
  const auto element = static_cast<std::int64_t>(c10::elementSize(assignment.type));
  const std::int64_t row_bytes = to.numel() / rows * element;
  const std::int64_t at_once = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
  const bool as_they_are =
      to.device().is_cpu() && to.dim() == 1 && to.is_contiguous() && to.scalar_type() == assignment.type;
  for (std::int64_t row = 0; row < rows; row += at_once) {
    const std::int64_t count = std::min(at_once, rows - row);
    Piece piece;
    piece.file = &file;
    piece.begin = assignment.from->begin + static_cast<std::uint64_t>(row * row_bytes);
    piece.bytes = count * row_bytes;
    if (as_they_are)
      piece.memory = static_cast<char*>(to.data_ptr()) + row * row_bytes;
    else
      piece.to = to.narrow(0, row, count);
    piece.type = assignment.type;
    pieces.push_back(std::move(piece));
  }
}

void read_piece(const Piece& piece, torch::Tensor& buffer) {
  const std::size_t at = piece.begin;
  if (piece.memory != nullptr) return piece.file->read(at, piece.memory, piece.bytes);
  const auto bytes = static_cast<std::int64_t>(piece.bytes);
  if (!buffer.defined() || buffer.numel() < bytes) buffer = torch::empty({bytes}, torch::kUInt8);
  piece.file->read(at, buffer.data_ptr(), piece.bytes);
  piece.to.copy_(torch::from_blob(buffer.data_ptr(), piece.to.sizes(), torch::TensorOptions().dtype(piece.type)));
}

void copy_all(const WeightsFiles& files, const std::vector<Assignment>& assignments) {
  const torch::NoGradGuard no_grad;
  std::vector<Piece> pieces, on_devices;
  MappedFiles mapped(files);
  for (const Assignment& assignment : assignments) {
    const RegularFile& file = *files.files[assignment.from->file];
    if (is_row_major(*assignment.from)) {
      add_pieces(assignment, file, assignment.to.device().is_cpu() ? pieces : on_devices);
      continue;
    }
    const torch::Tensor from = mapped.tensor(*assignment.from, assignment.type);
    torch::Tensor to = assignment.to;
    to.copy_(assignment.transposed ? from.t() : from);
    mapped.release();
  }
  const auto in_order = [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.begin) < std::tie(b.file, b.begin);
  };
  std::sort(pieces.begin(), pieces.end(), in_order);
  std::sort(on_devices.begin(), on_devices.end(), in_order);
  for (const auto& file : files.files) ::posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_SEQUENTIAL);
  // All threads read near the same offset, which suits disks.
  std::atomic<std::size_t> next = 0;
  const auto threads = std::min<std::int64_t>(at::get_num_threads(), static_cast<std::int64_t>(pieces.size()));
  at::parallel_for(0, threads, 1, [&](std::int64_t, std::int64_t) {
    const torch::NoGradGuard no_grad_here;  // grad mode is thread-local
    torch::Tensor buffer;
    for (std::size_t i = next++; i < pieces.size(); i = next++) read_piece(pieces[i], buffer);
  });
  torch::Tensor buffer;
  for (const Piece& piece : on_devices) read_piece(piece, buffer);
}

std::string listed(const std::vector<std::string>& names, bool quoted = true) {
  std::vector<std::string> texts;
  for (const std::string& name : names) texts.push_back(quoted ? format_text("\"{}\"", shown_name(name)) : name);
  return shortened(texts);
}

WeightsReport load_into(const NamedTensors& tensors, const std::string& path, const LoadWeightsOptions& options,
                        const std::function<void(torch::Device)>& move) {
  const Renaming renaming(options.rename, options.rename_by);
  const NameRules transpose(options.transpose);
  const WeightsFiles files = open_weights(path, options.key);
  WeightsReport report;
  report.ignored = files.stored.ignored;
  std::map<std::string, std::size_t> stored = rename_stored(files, renaming, report.ignored);

  // By memory: a tensor with several names is loaded if any of them is in the file; if there are several, the last one
  // wins, as in Python.
  std::map<std::string, std::size_t> assigned;
  std::vector<Assignment> assignments;
  std::vector<std::pair<std::string, std::string>> not_there;  // name, memory
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    MANIPLE_REQUIRE(names.insert(name).second, "weights are to be loaded into two tensors called \"{}\"",
                    shown_name(name));
    MANIPLE_REQUIRE(tensor.defined() && tensor.layout() == torch::kStrided && !tensor.is_meta(),
                    "weights cannot be loaded into \"{}\": it is undefined, sparse, or on the device meta",
                    shown_name(name));
    const std::string memory = memory_of(tensor).value_or("of " + name);
    const auto found = stored.find(name);
    if (found == stored.end()) {
      not_there.emplace_back(name, memory);
      continue;
    }
    const StoredTensor& from = files.stored.tensors[found->second];
    stored.erase(found);
    const bool transposed = transpose.matches(from.name);
    if (std::string why = misfit(name, from, tensor, transposed, options.convert_dtype); !why.empty()) {
      report.mismatched.push_back(std::move(why));
      continue;
    }
    report.loaded.push_back(name);
    Assignment assignment{&from, *dtype_of_stored(from.dtype), tensor, transposed};
    const auto [place, added] = assigned.emplace(memory, assignments.size());
    if (added)
      assignments.push_back(std::move(assignment));
    else
      assignments[place->second] = std::move(assignment);
  }
  for (const auto& [name, memory] : not_there)
    (assigned.count(memory) != 0 ? report.loaded : report.missing).push_back(name);
  for (const auto& [name, place] : stored) report.unexpected.push_back(name);

  MANIPLE_REQUIRE(!options.strict || report.complete(),
                  "{} does not fit the module: {}. Nothing was loaded; strict = false loads the rest", files.path,
                  report.text());
  MANIPLE_REQUIRE(!assignments.empty() || report.complete(), "nothing in {} fits the module: {}", files.path,
                  report.text());
  if (options.device) move(*options.device);
  for (Assignment& assignment : assignments) assignment.to = assignment.to.detach();
  copy_all(files, assignments);
  for (const Assignment& assignment : assignments) {
    if (!assignment.to.is_inference())
      assignment.to.unsafeGetTensorImpl()->bump_version();  // the detached tensor shares this counter
  }
  return report;
}

}  // namespace

std::string WeightsReport::text() const {
  std::vector<std::string> parts;
  if (complete())
    parts.push_back(format_text("all {} tensors fit", loaded.size()));
  else
    parts.push_back(format_text("{} tensors fit", loaded.size()));
  if (!missing.empty()) parts.push_back(format_text("{} missing in the file: {}", missing.size(), listed(missing)));
  if (!unexpected.empty())
    parts.push_back(format_text("{} not in the module: {}", unexpected.size(), listed(unexpected)));
  if (!mismatched.empty())
    parts.push_back(format_text("{} of another shape or dtype: {}", mismatched.size(), listed(mismatched, false)));
  if (!ignored.empty()) parts.push_back(format_text("{} ignored: {}", ignored.size(), listed(ignored, false)));
  return joined(parts, "; ");
}

WeightsReport load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options) {
  detail::require_whole(
      module, "load_weights",
      "load the whole tensors with read_weights and give them to set_full_parameters, or load the module "
      "before it is divided");
  return load_into(named_tensors_of(module), path, options, [&](torch::Device device) { module.to(device); });
}

WeightsReport load_weights(const std::vector<std::pair<std::string, torch::Tensor>>& tensors, const std::string& path,
                           const LoadWeightsOptions& options) {
  for (const auto& [name, tensor] : tensors)
    detail::require_whole(name, tensor, "load_weights",
                          "load the whole tensors with read_weights and give them to set_full_parameters");
  return load_into(tensors, path, options, [&](torch::Device device) {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, tensor] : tensors) tensor.set_data(tensor.to(device));
  });
}

torch::OrderedDict<std::string, torch::Tensor> read_weights(const std::string& path,
                                                            const ReadWeightsOptions& options) {
  const Renaming renaming(options.rename, options.rename_by);
  const NameRules transpose(options.transpose);
  const WeightsFiles files = open_weights(path, options.key);
  std::vector<std::string> ignored;
  std::vector<std::string> names(files.stored.tensors.size());
  for (const auto& [name, place] : rename_stored(files, renaming, ignored)) names[place] = name;
  MappedFiles mapped(files);
  torch::OrderedDict<std::string, torch::Tensor> tensors;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) continue;
    const StoredTensor& stored = files.stored.tensors[i];
    const auto type = dtype_of_stored(stored.dtype);
    MANIPLE_REQUIRE(type, "{}: tensor \"{}\" has dtype {}, which this LibTorch does not have", files.path,
                    shown_name(stored.name), stored.dtype);
    torch::Tensor tensor = mapped.tensor(stored, *type);
    if (transpose.matches(stored.name)) {
      MANIPLE_REQUIRE(tensor.dim() == 2, "{}: tensor \"{}\" has shape {}; only matrices can be transposed", files.path,
                      shown_name(stored.name), shape_text(stored.shape));
      tensor = tensor.t();
    }
    tensors.insert(names[i], std::move(tensor));
  }
  return tensors;
}

}  // namespace maniple
