#include "doctor/blas.h"

#include <fmt/format.h>

#include "doctor/system_files.h"

namespace maniple::doctor {
namespace {

struct Maker {
  const char* part_of_path;
  const char* name;
};
constexpr Maker kFast[] = {{"openblas", "OpenBLAS"},
                           {"mkl", "MKL"},
                           {"blis", "BLIS"},
                           {"armpl", "Arm Performance Libraries"},
                           {"nvpl", "NVPL"}};

}  // namespace

Findings judge(const BlasFacts& facts) {
  if (facts.path.empty()) {
    return {{Verdict::warn, "no libblas.so.3: Debian's LibTorch needs one (the one from pytorch.org brings its own)",
             "apt-get install libopenblas0-pthread"}};
  }
  for (const Maker& maker : kFast) {
    if (facts.path.find(maker.part_of_path) != std::string::npos)
      return {{Verdict::ok, fmt::format("{} ({})", maker.name, facts.path)}};
  }
  const bool atlas = facts.path.find("atlas") != std::string::npos;
  return {{Verdict::warn,
           fmt::format("libblas.so.3 is {} ({}): matrices are multiplied up to 20 times slower",
                       atlas ? "ATLAS" : "the reference BLAS", facts.path),
           "apt-get install libopenblas0-pthread (then: update-alternatives --display libblas.so.3-$(gcc "
           "-print-multiarch))"}};
}

// Not loaded to look at it: OpenBLAS starts its threads at once.
BlasFacts look_at_blas() { return {.path = find_library("libblas.so.3")}; }

}  // namespace maniple::doctor
