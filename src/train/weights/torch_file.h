// The file of a state dict as torch.save writes it (.pt, .pth, .bin): a zip archive with a pickle, data.pkl, and an
// entry for the bytes of each storage. Read without Python and without executing anything: see zip_archive.h and
// pickle.h. Without LibTorch.
#pragma once

#include <string_view>

#include "train/weights/stored_tensor.h"

namespace maniple {

/// `key`: see read_state_dict. Throws ProtocolError for damaged files; InvalidArgument for others than those of a state
/// dict (TorchScript, compressed, big-endian, other classes in the pickle), saying what it is and what to do.
StoredTensors read_torch_file(std::uint64_t file_bytes, const ReadAt& read, std::string_view key);

/// Throws InvalidArgument if a file that begins with these bytes is one of torch.save's formats from before PyTorch
/// 1.6.
void refuse_legacy_torch_file(std::string_view first_bytes);

}  // namespace maniple
