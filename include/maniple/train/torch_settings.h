// Settings that make LibTorch fast on the machine at hand.
//
//   const auto settings = maniple::apply_fast_settings();   // once, at the beginning of main, before the first tensor
//
// What it decides:
//
//   Convolutions   LibTorch computes them either with oneDNN or as matrix products with BLAS. oneDNN is the faster one
//                  on x86-64. On aarch64 that depends on how LibTorch was built: Debian's oneDNN is about five times
//                  slower than its BLAS, so there a few convolutions are timed both ways (some 50 ms) and oneDNN is
//                  switched off if it is clearly slower. MANIPLE_MKLDNN=on or off decides by hand; measure times them
//                  on any machine. The two ways round differently, so where results must agree to the last bit between
//                  runs, and one way is not clearly faster, decide by hand.
//   BLAS           Nothing is changed, but the reference BLAS, twenty times slower than OpenBLAS, gets a warning that
//                  says which package fixes it.
//   Threads        Left as they are: LibTorch reads OMP_NUM_THREADS, and takes all cores without it. With several ranks
//                  on a host that is too many; `threads` > 0 sets the number where OMP_NUM_THREADS does not.
#pragma once

#include <string>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct FastSettings {
  /// Threads of an operation, if OMP_NUM_THREADS is not set; 0: leave LibTorch's choice.
  int threads = 0;
  /// Treat numbers below 1.2e-38 as zero. Faster when activations die out; results may differ in those last bits.
  bool flush_denormals = false;
};

/// What was found and decided.
struct TorchSettings {
  bool mkldnn = false;          ///< convolutions use oneDNN
  double mkldnn_ms = 0;         ///< time of the trial with oneDNN; 0: not measured
  double blas_ms = 0;           ///< and without
  std::string blas;             ///< file of the BLAS library; empty: inside LibTorch
  bool reference_blas = false;  ///< the slow one
  int threads = 1;
  std::string text() const;  ///< all of it in one line
};

/// Throws InvalidArgument when MANIPLE_MKLDNN is none of auto, measure, on, off.
TorchSettings apply_fast_settings(const FastSettings& settings = {});

// ---- Random numbers that are the same from run to run ---------------------------------------------------------------
//
//   maniple::seed_all(7, world->rank());   // each rank draws its own numbers; dropout differs between ranks
//   maniple::seed_all(7);                  // every rank draws the same numbers; weights start out equal
//
// The same program, run twice on the same number of ranks, then gives bit-identical weights.

/// Seeds LibTorch's generators (CPU, and CUDA where there is one) with a number made from `seed` and `stream`. The same
/// pair always gives the same numbers; different streams are unrelated to each other. Returns what the generators were
/// given.
std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream = 0);

}  // namespace maniple
