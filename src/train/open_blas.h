// Functions of OpenBLAS, if LibTorch multiplies matrices with it.
#pragma once

#include <dlfcn.h>

namespace maniple {

/// Looks up a function in whichever library LibTorch loaded; null if none has this name.
template <class Function>
Function* loaded_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

struct OpenBlas {
  int (*get)() = loaded_function<int()>("openblas_get_num_threads");
  void (*set)(int) = loaded_function<void(int)>("openblas_set_num_threads");
  int (*kind)() = loaded_function<int()>("openblas_get_parallel");  // 0: no threads, 1: its own, 2: OpenMP threads
  char* (*core)() = loaded_function<char*()>("openblas_get_corename");

  bool has_threads() const { return get != nullptr && set != nullptr && kind != nullptr && kind() == 1; }
};

inline const OpenBlas& open_blas() {
  static const OpenBlas functions;
  return functions;
}

}  // namespace maniple
