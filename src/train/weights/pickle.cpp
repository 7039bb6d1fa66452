#include "train/weights/pickle.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>

#include "comm/base/check.h"
#include "train/checkpoint/safetensors.h"
#include "train/weights/pickle_machine.h"
#include "train/weights/stored_tensor.h"

namespace maniple {
namespace {

constexpr std::size_t kMaxTensors = 200'000;
constexpr std::size_t kMaxStorageKeyBytes = 256;
constexpr std::size_t kMaxArguments = 16;
constexpr std::size_t kMaxDimensions = 64;
constexpr std::size_t kMaxNameBytes = 4096;

/// What the pickle may call. call() implements each of these itself.
enum class Function : std::uint8_t {
  ordered_dict,
  tensor,          // (storage, offset, shape, strides, ...)
  typed_tensor,    // (storage, offset, shape, strides, requires_grad, hooks, dtype, ...)
  first_argument,  // rebuilds a parameter, a torch.Size or a type tag
  ignored,
};

struct NamedFunction {
  std::string_view module, name;
  Function function;
};
constexpr std::array kFunctions = {
    NamedFunction{"collections", "OrderedDict", Function::ordered_dict},
    NamedFunction{"torch._utils", "_rebuild_tensor", Function::tensor},
    NamedFunction{"torch._utils", "_rebuild_tensor_v2", Function::tensor},
    NamedFunction{"torch._utils", "_rebuild_tensor_v3", Function::typed_tensor},
    NamedFunction{"torch._utils", "_rebuild_parameter", Function::first_argument},
    NamedFunction{"torch._utils", "_rebuild_parameter_with_state", Function::first_argument},
    NamedFunction{"torch.jit._pickle", "restore_type_tag", Function::first_argument},  // written by torch::pickle_save
    NamedFunction{"torch", "Size", Function::first_argument},
    NamedFunction{"torch", "device", Function::ignored},
};

struct NamedType {
  std::string_view name;   // in module torch
  std::string_view dtype;  // as safetensors spells it; empty for untyped bytes
};
constexpr std::array kStorageTypes = {
    NamedType{"FloatStorage", "F32"},     NamedType{"DoubleStorage", "F64"},       NamedType{"HalfStorage", "F16"},
    NamedType{"BFloat16Storage", "BF16"}, NamedType{"LongStorage", "I64"},         NamedType{"IntStorage", "I32"},
    NamedType{"ShortStorage", "I16"},     NamedType{"CharStorage", "I8"},          NamedType{"ByteStorage", "U8"},
    NamedType{"BoolStorage", "BOOL"},     NamedType{"ComplexFloatStorage", "C64"}, NamedType{"UntypedStorage", ""},
};
constexpr std::array kDtypes = {
    NamedType{"float32", "F32"},
    NamedType{"float64", "F64"},
    NamedType{"float16", "F16"},
    NamedType{"bfloat16", "BF16"},
    NamedType{"int64", "I64"},
    NamedType{"int32", "I32"},
    NamedType{"int16", "I16"},
    NamedType{"int8", "I8"},
    NamedType{"uint8", "U8"},
    NamedType{"uint16", "U16"},
    NamedType{"uint32", "U32"},
    NamedType{"uint64", "U64"},
    NamedType{"bool", "BOOL"},
    NamedType{"complex64", "C64"},
    NamedType{"float8_e5m2", "F8_E5M2"},
    NamedType{"float8_e4m3fn", "F8_E4M3"},
};

std::uint64_t element_bytes_of(std::string_view dtype) {
  return dtype.empty() ? 1 : safetensors_element_bytes(dtype).value();
}

}  // namespace

void PickleMachine::name_global(std::string_view module, std::string_view name) {
  for (const NamedFunction& known : kFunctions) {
    if (module == known.module && name == known.name) {
      make(PickleKind::function, static_cast<std::int64_t>(known.function));
      return;
    }
  }
  if (module == "torch" || module == "torch.storage") {
    for (std::size_t i = 0; i < kStorageTypes.size(); ++i) {
      if (name != kStorageTypes[i].name) continue;
      make(PickleKind::storage_type, static_cast<std::int64_t>(i));
      return;
    }
    for (std::size_t i = 0; i < kDtypes.size(); ++i) {
      if (name != kDtypes[i].name) continue;
      make(PickleKind::dtype, static_cast<std::int64_t>(i));
      return;
    }
  }
  throw InvalidArgument(
      format_text("it refers to {}.{}, and only dictionaries of plain tensors can be read: in Python, save "
                  "module.state_dict() alone, by torch.save or safetensors",
                  shown_name(module), shown_name(name)));
}

void PickleMachine::call() {
  const PickleRef arguments = pop(), callee = pop();
  if (values_[arguments].kind != PickleKind::tuple) fail("arguments are not a tuple");
  if (values_[callee].kind != PickleKind::function) fail(format_text("{} is called", described(values_[callee].kind)));
  if (values_[arguments].items.size() > kMaxArguments) fail("a call has too many arguments");
  const std::vector<PickleRef> list = values_[arguments].items;
  switch (static_cast<Function>(values_[callee].number)) {
    case Function::ordered_dict: {
      std::vector<PickleRef> items;
      if (!list.empty()) {  // pairs; many dictionaries may be made from one list, so the sum is bounded
        const std::vector<PickleRef>& pairs = values_[list.front()].items;
        if (pairs.size() > kMaxPickledValues - paired_) fail("its dictionaries have too many entries");
        paired_ += pairs.size();
        for (const PickleRef pair : pairs) {
          if (values_[pair].items.size() != 2) fail("a pair of a dictionary has not two values");
          items.insert(items.end(), values_[pair].items.begin(), values_[pair].items.end());
        }
      }
      return make_dict(std::move(items));
    }
    case Function::tensor: return make_tensor(list, false);
    case Function::typed_tensor: return make_tensor(list, true);
    case Function::first_argument:
      if (list.empty()) fail("an argument is missing");
      return push(list.front());
    case Function::ignored: make(PickleKind::other); return;
  }
}

/// Makes a storage from ("storage", type, key, location, elements).
void PickleMachine::make_storage() {
  const PickleValue& id = values_[pop()];
  const auto is = [&](std::size_t i, PickleKind kind) { return values_[id.items[i]].kind == kind; };
  if (id.kind != PickleKind::tuple || id.items.size() < 5 || !is(0, PickleKind::text) ||
      values_[id.items[0]].text != "storage" || !is(1, PickleKind::storage_type) || !is(2, PickleKind::text) ||
      !is(4, PickleKind::integer))
    fail("a storage is not described as torch.save describes it");
  if (storages_.size() >= kMaxTensors) fail(format_text("it has more than {} storages", kMaxTensors));
  const std::string_view key = values_[id.items[2]].text;
  const std::int64_t elements = values_[id.items[4]].number;
  if (key.size() > kMaxStorageKeyBytes) fail("the name of a storage is too long");
  if (elements < 0) fail("a storage has less than no elements");
  const std::string_view dtype = kStorageTypes[values_[id.items[1]].number].dtype;
  storages_.push_back({std::string(key), static_cast<std::uint64_t>(elements), element_bytes_of(dtype)});
  storage_dtypes_.push_back(dtype);
  make(PickleKind::storage, static_cast<std::int64_t>(storages_.size() - 1));
}

std::vector<std::int64_t> PickleMachine::extents(PickleRef ref, std::string_view what) const {
  const PickleValue& value = values_[ref];
  if (value.kind != PickleKind::tuple && value.kind != PickleKind::list)
    fail(format_text("the {} of a tensor is not a tuple", what));
  if (value.items.size() > kMaxDimensions) fail(format_text("a tensor has more than {} dimensions", kMaxDimensions));
  std::vector<std::int64_t> numbers;
  for (const PickleRef item : value.items) {
    if (values_[item].kind != PickleKind::integer || values_[item].number < 0)
      fail(format_text("the {} of a tensor has something else in it than whole numbers from 0", what));
    numbers.push_back(values_[item].number);
  }
  return numbers;
}

void PickleMachine::make_tensor(const std::vector<PickleRef>& arguments, bool typed) {
  if (tensors_.size() >= kMaxTensors) fail(format_text("it makes more than {} tensors", kMaxTensors));
  if (arguments.size() < (typed ? 7u : 4u)) fail("an argument of a tensor is missing");
  if (values_[arguments[0]].kind != PickleKind::storage) fail("a tensor has no storage");
  const std::size_t which = values_[arguments[0]].number;
  PickledTensor tensor;
  tensor.storage = storages_[which];
  tensor.dtype = storage_dtypes_[which].empty() ? "U8" : storage_dtypes_[which];
  if (typed) {
    if (values_[arguments[6]].kind != PickleKind::dtype) fail("the dtype of a tensor is something else");
    tensor.dtype = kDtypes[values_[arguments[6]].number].dtype;
  }
  // With conj or neg, the elements differ from the stored bytes.
  if (const std::size_t metadata = typed ? 7 : 6; arguments.size() > metadata)
    MANIPLE_REQUIRE(
        values_[arguments[metadata]].items.empty(),
        "a tensor in it is conjugated or negated lazily; call resolve_conj() and resolve_neg() before torch.save");
  tensor.shape = extents(arguments[2], "shape");
  tensor.strides = extents(arguments[3], "strides");
  if (tensor.shape.size() != tensor.strides.size())
    fail(format_text("a tensor has {} extents and {} strides", tensor.shape.size(), tensor.strides.size()));
  const PickleValue& offset = values_[arguments[1]];
  if (offset.kind != PickleKind::integer || offset.number < 0)
    fail("the offset of a tensor is not a whole number from 0");
  const std::uint64_t element = element_bytes_of(tensor.dtype);
  const auto bytes = tensor_bytes(tensor.shape, element);
  if (!bytes) fail("a tensor is larger than any file");
  // The last element, counted from the beginning of the storage, must lie inside it.
  constexpr auto kMostBytes = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (tensor.storage.elements > kMostBytes / tensor.storage.element_bytes) fail("a storage is larger than any file");
  const std::uint64_t elements = tensor.storage.elements * tensor.storage.element_bytes / element;
  auto last = static_cast<std::uint64_t>(offset.number);
  for (std::size_t i = 0; i < tensor.shape.size() && *bytes > 0 && last < elements; ++i) {
    const auto steps = static_cast<std::uint64_t>(tensor.shape[i] - 1);
    const auto stride = static_cast<std::uint64_t>(tensor.strides[i]);
    if (steps > 0 && stride > elements / steps) fail("the strides of a tensor lead out of its storage");
    last += steps * stride;
  }
  if (*bytes > 0 && last >= elements)
    fail(format_text("a tensor reaches element {} of a storage of {}", last, elements));
  if (*bytes > 0) tensor.first_byte = static_cast<std::uint64_t>(offset.number) * element;
  tensors_.push_back(std::move(tensor));
  make(PickleKind::tensor, static_cast<std::int64_t>(tensors_.size() - 1));
}

namespace {

std::string key_text(const PickleValue& key) {
  if (key.kind == PickleKind::text) return std::string(key.text);
  if (key.kind == PickleKind::integer) return std::to_string(key.number);
  return described(key.kind);
}

bool holds_tensors(const PickleMachine& machine, const PickleValue& dict) {
  for (std::size_t i = 1; i < dict.items.size(); i += 2) {
    if (machine[dict.items[i]].kind == PickleKind::tensor) return true;
  }
  return false;
}

}  // namespace

PickledStateDict read_state_dict(std::string_view pickle, std::string_view key) {
  PickleMachine machine(pickle);
  PickleRef chosen = machine.run();
  const auto keys_of = [&](const PickleValue& dict) {
    std::vector<std::string> keys;
    for (std::size_t i = 0; i < std::min(dict.items.size(), 2 * kMaxTensors); i += 2)
      keys.push_back("\"" + shown_name(key_text(machine[dict.items[i]])) + "\"");
    return keys;
  };
  for (std::string_view rest = key; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find('/'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const PickleValue& dict = machine[chosen];
    std::optional<PickleRef> found;
    for (std::size_t i = 0; dict.kind == PickleKind::dict && i < dict.items.size(); i += 2) {
      if (const PickleValue& name = machine[dict.items[i]]; name.kind == PickleKind::text && name.text == part)
        found = dict.items[i + 1];
    }
    MANIPLE_REQUIRE(dict.kind == PickleKind::dict, "there is no key \"{}\" in it: it is {}", shown_name(part),
                    described(dict.kind));
    MANIPLE_REQUIRE(found, "there is no key \"{}\" in it; there are {}", shown_name(part), shortened(keys_of(dict)));
    chosen = *found;
  }
  const PickleValue& dict = machine[chosen];
  MANIPLE_REQUIRE(dict.kind == PickleKind::dict,
                  "it holds {}; expected a dictionary of tensors, such as module.state_dict()", described(dict.kind));
  PickledStateDict result;
  std::set<std::string_view> names;
  std::vector<std::string> inside;
  std::set<PickleRef> looked_at;  // a dictionary may occur many times
  if (dict.items.size() > 2 * kMaxTensors) throw ProtocolError("its dictionary has too many entries");
  for (std::size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const PickleValue &name = machine[dict.items[i]], &value = machine[dict.items[i + 1]];
    if (value.kind == PickleKind::dict && looked_at.insert(dict.items[i + 1]).second && holds_tensors(machine, value))
      inside.push_back("\"" + shown_name(key_text(name)) + "\"");
    if (value.kind != PickleKind::tensor || name.kind != PickleKind::text) {
      result.ignored.push_back(format_text("{} ({})", shown_name(key_text(name)), described(value.kind)));
      continue;
    }
    if (name.text.size() > kMaxNameBytes) throw ProtocolError("the name of a tensor is too long");
    if (!names.insert(name.text).second)
      throw ProtocolError(format_text("two tensors are called \"{}\"", shown_name(name.text)));
    result.tensors.emplace_back(std::string(name.text), machine.tensor(value));
  }
  MANIPLE_REQUIRE(
      !result.tensors.empty() || inside.empty(),
      "the tensors in it are in dictionaries inside of the one that was saved; set the option `key` to one of {}",
      shortened(inside));
  return result;
}

}  // namespace maniple
