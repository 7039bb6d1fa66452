#include "train/checkpoint/broadcast_state.h"

#include <sstream>
#include <string>
#include <vector>

#include "comm/base/check.h"
#include "train/tensor/public_call.h"

namespace maniple {
namespace {

std::string characters(std::istream& in, std::size_t count) {
  std::string text(count, ' ');
  in.read(text.data(), static_cast<std::streamsize>(count));
  return text;
}

NamedState state_like(const std::string& description) {
  NamedState state;
  std::istringstream in(description);
  for (std::string line; std::getline(in, line) && !line.empty();) {
    std::istringstream fields(line);
    int dtype = 0;
    std::size_t dimensions = 0;
    fields >> dtype >> dimensions;
    std::vector<std::int64_t> shape(dimensions);
    for (std::int64_t& extent : shape) fields >> extent;
    std::string name;
    std::getline(fields >> std::ws, name);
    state.tensors[name] = torch::empty(shape, static_cast<torch::ScalarType>(dtype));
  }
  for (std::size_t name_length = 0, length = 0; in >> name_length >> length;) {
    in.get();
    const std::string name = characters(in, name_length);
    state.texts[name] = characters(in, length);
  }
  return state;
}

}  // namespace

/// One line per tensor, "DTYPE DIMENSIONS EXTENT ... NAME", and an empty line; then each text, "LENGTH LENGTH NAME
/// TEXT".
std::string description_of(const NamedState& state) {
  std::string text;
  for (const auto& [name, tensor] : state.tensors) {
    MANIPLE_REQUIRE(tensor.defined() && name.find('\n') == std::string::npos,
                    "tensor \"{}\" is undefined, or its name has several lines", name);
    text += format_text("{} {} {} {}\n", static_cast<int>(tensor.scalar_type()), tensor.dim(),
                        joined(tensor.sizes(), " "), name);
  }
  text += '\n';
  for (const auto& [name, value] : state.texts)
    text += format_text("{} {} {}{}", name.size(), value.size(), name, value);
  return text;
}

void broadcast_state(NamedState& state, const std::string& description, int source, ProcessGroup& ranks) {
  const std::string received = ranks.broadcast_object(description, source, {}, public_place());
  if (ranks.rank() != source) state = state_like(received);
  for (const auto& [name, tensor] : state.tensors) {
    const torch::Tensor bytes = tensor.detach().to(torch::kCPU).contiguous();
    if (bytes.numel() == 0) continue;
    ranks.broadcast(Buffer{bytes.data_ptr(), bytes.nbytes(), DType::uint8}, source, {}, public_place());
  }
}

}  // namespace maniple
