// The tensors in a pickle, as torch.save writes it for a dictionary of tensors. Nothing is executed.
//
// A pickle is a program for a small stack machine (https://docs.python.org/3/library/pickletools.html) that Python runs
// to make the objects again, and that may call any function of Python. Here its instructions only make plain values,
// and of functions and classes it may name those that dictionaries of tensors need (the table in pickle.cpp); any other
// is refused by its name.
//
// Memory and time are bounded by the length of the pickle: values refer to each other by number, nothing is visited
// recursively. Protocols 2 to 5. Without LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace maniple {

/// The memory of one or several tensors; its bytes are an entry of the archive.
struct PickledStorage {
  std::string key;             ///< the entry is data/KEY
  std::uint64_t elements = 0;  ///< of `element_bytes` each
  std::uint64_t element_bytes = 1;
};

/// A view of a storage, inside of it in every element.
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

/// `key` names a dictionary inside the one that was saved ("model" of {"model": {...}, "epoch": 3}), or several levels
/// of them ("state/model"); empty: the outermost. Throws ProtocolError for a damaged pickle; InvalidArgument for one
/// that holds something else, naming it.
PickledStateDict read_state_dict(std::string_view pickle, std::string_view key);

}  // namespace maniple
