// Reads a state dict file written by torch.save (.pt, .pth, .bin): a zip archive with a pickle, data.pkl, and one entry
// per storage with its bytes. Reading needs neither Python nor LibTorch, and executes nothing: see zip_archive.h and
// pickle.h.
#pragma once

#include <string_view>

#include "train/weights/stored_tensor.h"

namespace maniple {

/// `key`: see read_state_dict. Throws ProtocolError for damaged files. Throws InvalidArgument for files that are not
/// state dicts (TorchScript, compressed, big-endian, other classes in the pickle); the error text says what the file is
/// and what to do.
StoredTensors read_torch_file(std::uint64_t file_bytes, const ReadAt& read, std::string_view key);

/// Throws InvalidArgument if a file that begins with these bytes has a torch.save format from before PyTorch 1.6.
void refuse_legacy_torch_file(std::string_view first_bytes);

}  // namespace maniple
