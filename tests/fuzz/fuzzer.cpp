// One fuzzer for each parser: MANIPLE_FUZZED names its entry point, MANIPLE_FUZZED_SEEDS its seeds.
// The seeds are written into the folder that the variable MANIPLE_FUZZ_SEEDS names; give it to the fuzzer as a corpus.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>

#include "fuzz/entry_points.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  const char* folder = std::getenv("MANIPLE_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  int number = 0;
  for (const std::string& seed : maniple::fuzz::MANIPLE_FUZZED_SEEDS()) {
    std::ofstream(std::string(folder) + "/seed_" + std::to_string(++number), std::ios::binary) << seed;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  maniple::fuzz::MANIPLE_FUZZED({reinterpret_cast<const char*>(data), size});
  return 0;
}
