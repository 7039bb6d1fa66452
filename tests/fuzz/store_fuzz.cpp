#include <cstddef>
#include <cstdint>

#include "fuzz/entry_points.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  maniple::fuzz::store({reinterpret_cast<const char*>(data), size});
  return 0;
}
