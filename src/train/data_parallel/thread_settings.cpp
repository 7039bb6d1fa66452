#include "train/data_parallel/thread_settings.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>

#include <ATen/Parallel.h>

namespace maniple {
namespace {

/// A function of whatever library LibTorch brought along; null if there is none of this name.
template <class Function>
Function* loaded(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

struct OpenBlas {
  int (*get)() = loaded<int()>("openblas_get_num_threads");
  void (*set)(int) = loaded<void(int)>("openblas_set_num_threads");
  int (*kind)() = loaded<int()>("openblas_get_parallel");  // 0: no threads, 1: its own, 2: those of OpenMP
  bool has_threads() const { return get != nullptr && set != nullptr && kind != nullptr && kind() == 1; }
};
const OpenBlas& open_blas() {
  static const OpenBlas functions;
  return functions;
}

std::mutex blas_mutex;
int blas_scopes = 0, blas_threads_before = 0;

}  // namespace

void use_intra_op_threads(int threads) {
  thread_local int current = 0;
  if (current == threads) return;
  at::get_num_threads();  // a thread's first operation sets the number of the process; let that be over
  static auto* const openmp = loaded<void(int)>("omp_set_num_threads");
  static auto* const mkl = loaded<int(int)>("MKL_Set_Num_Threads_Local");
  if (openmp != nullptr) openmp(threads);
  if (mkl != nullptr) mkl(threads);
  current = threads;
}

BlasThreads::BlasThreads(int threads) {
  if (!open_blas().has_threads()) return;
  const std::lock_guard lock(blas_mutex);
  if (blas_scopes++ == 0) blas_threads_before = open_blas().get();
  open_blas().set(std::min(threads, blas_threads_before));
}

BlasThreads::~BlasThreads() {
  if (!open_blas().has_threads()) return;
  const std::lock_guard lock(blas_mutex);
  if (--blas_scopes == 0) open_blas().set(blas_threads_before);
}

}  // namespace maniple
