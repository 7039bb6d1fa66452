// Reads the tensors in a pickle that torch.save wrote for a dictionary of tensors. Executes nothing.
//
// A pickle is a program for a small stack machine (https://docs.python.org/3/library/pickletools.html). Python runs it
// to rebuild the objects, and it may call any Python function. Here its instructions only make plain values. It may
// name only the functions and classes that dictionaries of tensors need (the table in pickle.cpp); any other is refused
// by name.
//
// Memory and time are bounded by the length of the pickle: values refer to each other by number, and nothing is visited
// recursively. Protocols 2 to 5. Without LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace maniple {

/// The memory of one or more tensors; its bytes are an entry of the archive.
struct PickledStorage {
  std::string key;             ///< the entry's name is data/KEY
  std::uint64_t elements = 0;  ///< each has `element_bytes` bytes
  std::uint64_t element_bytes = 1;
};

/// A view of a storage; every element lies inside the storage.
struct PickledTensor {
  PickledStorage storage;
  std::string dtype;             ///< as safetensors spells it
  std::uint64_t first_byte = 0;  ///< in the storage
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in elements
};

struct PickledStateDict {
  std::vector<std::pair<std::string, PickledTensor>> tensors;  ///< in the dictionary's order, names unique
  std::vector<std::string> ignored;                            ///< "epoch (a whole number)"
};

/// `key` names a dictionary inside the saved one ("model" of {"model": {...}, "epoch": 3}), or a path of several levels
/// ("state/model"); empty: the outermost. Throws ProtocolError for a damaged pickle, and InvalidArgument, naming the
/// content, for a pickle that holds something else.
PickledStateDict read_state_dict(std::string_view pickle, std::string_view key);

}  // namespace maniple
