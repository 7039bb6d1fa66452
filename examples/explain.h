// --explain: prints each rank's memory and traffic per step before training starts. The bytes are computed; the
// programs compare them with the bytes actually sent in every step.
#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <maniple/maniple.h>

struct Traffic {
  std::string what = {};       ///< "activations to rank 1"
  std::uint64_t messages = 0;  ///< messages or collectives per step
  std::uint64_t bytes = 0;     ///< this rank's bytes in all of them together
};

/// The explanation of one rank.
struct Explanation {
  std::string holds = {};  ///< "layers 0 to 2"
  std::uint64_t parameters = 0, parameter_bytes = 0, gradient_bytes = 0, optimizer_bytes = 0, activation_bytes = 0;
  std::vector<Traffic> traffic = {};

  /// Counts the parameters; shared ones count once. AdamW keeps two numbers per trained parameter.
  void count(const std::vector<torch::Tensor>& all) {
    std::set<const void*> seen;
    for (const torch::Tensor& one : all) {
      if (!seen.insert(one.unsafeGetTensorImpl()).second) continue;
      parameters += static_cast<std::uint64_t>(one.numel());
      parameter_bytes += one.nbytes();
      gradient_bytes += one.requires_grad() ? one.nbytes() : 0;
    }
    optimizer_bytes = 2 * gradient_bytes;
  }

  std::string text(int rank) const {
    const auto mib = [](std::uint64_t bytes) {
      char number[32];
      std::snprintf(number, sizeof number, "%.2f MiB", static_cast<double>(bytes) / 1048576);
      return std::string(number);
    };
    std::string result = "rank " + std::to_string(rank) + ": " + holds + ", " + std::to_string(parameters) +
                         " parameters\n  memory: parameters " + mib(parameter_bytes) + ", gradients " +
                         mib(gradient_bytes) + ", AdamW " + mib(optimizer_bytes) + ", activations about " +
                         mib(activation_bytes) + "\n";
    for (const Traffic& one : traffic) {
      if (one.messages == 0) continue;
      result += "  in a step: " + one.what + ": " + std::to_string(one.messages) + " of " + std::to_string(one.bytes) +
                " bytes together\n";
    }
    return result;
  }
};

/// Rank 0 prints all ranks' explanations. Collective.
inline void print_explanations(const Explanation& mine) {
  for (const std::string& text : maniple::gather_object(mine.text(maniple::get_rank())))
    std::printf("%s", text.c_str());
  std::fflush(stdout);
}

/// Throws if the bytes sent in a step differ from the explained bytes.
inline void require_as_explained(const char* what, std::uint64_t explained, std::uint64_t measured) {
  if (explained != measured) {
    throw std::runtime_error("rank " + std::to_string(maniple::get_rank()) + ": " + what + ": " +
                             std::to_string(explained) + " bytes in a step by --explain, but " +
                             std::to_string(measured) + " were sent");
  }
}
