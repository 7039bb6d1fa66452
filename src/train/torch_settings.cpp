#include <maniple/train/torch_settings.h>

#include <torch/torch.h>

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <limits>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "train/data/split_mix.h"

namespace maniple {
namespace {

#if defined(__x86_64__)
constexpr bool kMkldnnIsFast = true;
#else
constexpr bool kMkldnnIsFast = false;  // it depends on the processor, so it is measured
#endif

/// How many times faster the other way must be to be preferred over the usual one; more than measurement noise.
constexpr double kClearly = 1.5;

/// Milliseconds for forward and backward of a small convolution: the best of `runs` after a warm-up.
double trial_ms(bool mkldnn, int runs) {
  at::globalContext().setUserEnabledMkldnn(mkldnn);
  const auto input = torch::ones({4, 32, 24, 24}).requires_grad_();
  const auto weight = torch::ones({64, 32, 3, 3}).requires_grad_();
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    torch::conv2d(input, weight).sum().backward();
    const double elapsed = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (i > 0) best = std::min(best, elapsed);
  }
  return best;
}

/// Decides, and leaves LibTorch with that setting.
void choose_convolution(TorchSettings& result) {
  const std::string setting = knob_word(Knob::mkldnn);
  if (!at::globalContext().hasMKLDNN()) {
    if (setting == "on") log_warning("{} is on, but this LibTorch was built without oneDNN", info(Knob::mkldnn).name);
    return;
  }
  if (setting == "measure" || (setting == "auto" && !kMkldnnIsFast)) {
    // Alternates, so that other load on the machine affects both.
    result.mkldnn_ms = result.blas_ms = std::numeric_limits<double>::infinity();
    for (int turn = 0; turn < 2; ++turn) {
      result.blas_ms = std::min(result.blas_ms, trial_ms(false, 2));
      result.mkldnn_ms = std::min(result.mkldnn_ms, trial_ms(true, 2));
    }
    result.mkldnn =
        kMkldnnIsFast ? result.mkldnn_ms < kClearly * result.blas_ms : kClearly * result.mkldnn_ms < result.blas_ms;
  } else {
    result.mkldnn = setting == "on" || setting == "auto";
  }
  at::globalContext().setUserEnabledMkldnn(result.mkldnn);
}

/// The file with the matrix product that LibTorch calls, if it is in a separate library.
std::string blas_file() {
  void* const product = ::dlsym(RTLD_DEFAULT, "sgemm_");
  Dl_info where = {};
  if (product == nullptr || ::dladdr(product, &where) == 0 || where.dli_fname == nullptr) return "";
  std::array<char, PATH_MAX> resolved = {};
  const std::string file = ::realpath(where.dli_fname, resolved.data()) != nullptr ? resolved.data() : where.dli_fname;
  return file.find("libtorch") != std::string::npos ? "" : file;
}

/// Distributions install every BLAS under the same name, libblas.so.3, each in its own folder.
bool is_reference_blas(const std::string& file) {
  if (file.find("libblas.so") == std::string::npos) return false;
  for (const char* fast : {"openblas", "mkl", "blis", "atlas", "flexiblas", "armpl"}) {
    if (file.find(fast) != std::string::npos) return false;
  }
  return true;
}

}  // namespace

TorchSettings apply_fast_settings(const FastSettings& settings) {
  MANIPLE_REQUIRE(settings.threads >= 0, "apply_fast_settings: {} threads; expected 0 or more", settings.threads);
  if (settings.threads > 0 && !environment_text("OMP_NUM_THREADS")) torch::set_num_threads(settings.threads);
  if (settings.flush_denormals && !at::globalContext().setFlushDenormal(true)) {
    log_warning("this processor cannot flush denormal numbers");
  }
  TorchSettings result;
  result.threads = torch::get_num_threads();
  choose_convolution(result);
  result.blas = blas_file();
  result.reference_blas = is_reference_blas(result.blas);
  if (result.reference_blas) {
    warn_once(format_text(
        "LibTorch multiplies matrices with the reference BLAS ({}), about 20 times slower than OpenBLAS; on Debian: "
        "apt-get install libopenblas0-pthread",
        result.blas));
  }
  return result;
}

std::string TorchSettings::text() const {
  std::string measured;
  if (mkldnn_ms > 0) measured = format_text(" (measured: oneDNN {:.1f} ms, BLAS {:.1f} ms)", mkldnn_ms, blas_ms);
  return format_text("convolutions by {}{}, BLAS {}, {} thread{}", mkldnn ? "oneDNN" : "BLAS", measured,
                     blas.empty() ? "inside LibTorch" : blas, threads, threads == 1 ? "" : "s");
}

std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream) {
  // Stream 0 uses the seed itself, so that a program on one rank draws the same numbers as plain LibTorch.
  const std::uint64_t given = stream == 0 ? seed : mixed(seed + SplitMix::kStep * stream);
  torch::manual_seed(given);
  return given;
}

}  // namespace maniple
