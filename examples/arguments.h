// Parses the examples' options: "--name value" sets a variable, and "--name" alone sets a bool to true.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <variant>

using Place = std::variant<std::string*, std::size_t*, double*, bool*>;

/// "cpu", "cuda" (this rank's GPU) or "cuda:1" as a torch::Device, for programs that use LibTorch.
template <class Device>
Device device_named(const std::string& name, int local_rank, std::size_t gpus) {
  const Device device(name);
  if (!device.is_cuda() || device.has_index()) return device;
  if (gpus == 0) throw std::invalid_argument("--device cuda: LibTorch sees no GPU");
  return Device("cuda:" + std::to_string(static_cast<std::size_t>(local_rank) % gpus));
}

inline void read_arguments(int argc, char** argv, const std::map<std::string, Place>& places) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto place = places.find(name);
    if (place == places.end())
      throw std::invalid_argument("no option " + name + "; the head of the source file lists them");
    if (auto* flag = std::get_if<bool*>(&place->second)) {
      **flag = true;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(name + " needs a value");
    const std::string value = argv[i];
    std::size_t end = value.size();
    try {
      if (auto* text = std::get_if<std::string*>(&place->second)) **text = value;
      if (auto* count = std::get_if<std::size_t*>(&place->second)) **count = std::stoull(value, &end);
      if (auto* number = std::get_if<double*>(&place->second)) **number = std::stod(value, &end);
    } catch (const std::logic_error&) {
      end = value.size() + 1;
    }
    if (end != value.size()) throw std::invalid_argument(name + " is \"" + value + "\"; expected a number");
  }
}
