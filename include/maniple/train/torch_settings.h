// Chooses LibTorch settings that are fast on this machine.
//
//   const auto settings = maniple::apply_fast_settings();   // once, at the beginning of main, before the first tensor
//
// It sets:
//
//   Convolutions   LibTorch computes them with oneDNN or as BLAS matrix products. On x86-64 oneDNN is faster. On
//                  aarch64 the faster way depends on the LibTorch build: Debian's oneDNN is about five times slower
//                  than its BLAS. Therefore, on aarch64, a few convolutions are timed both ways (some 50 ms), and
//                  oneDNN is used only if it is clearly faster. MANIPLE_MKLDNN=on or off overrides the choice; measure
//                  times them on any machine. The two ways round differently: set MANIPLE_MKLDNN to on or off if
//                  results must be bit for bit equal between runs and neither way is clearly faster.
//   BLAS           Left unchanged. The reference BLAS, twenty times slower than OpenBLAS, causes a warning that names
//                  the package to install.
//   Threads        Left unchanged: LibTorch reads OMP_NUM_THREADS, and uses all cores without it. With several ranks on
//                  a host that is too many; `threads` > 0 sets the number unless OMP_NUM_THREADS is set.
#pragma once

#include <string>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct FastSettings {
  /// Threads per operation, unless OMP_NUM_THREADS is set; 0: LibTorch's default.
  int threads = 0;
  /// Treat numbers below 1.2e-38 as zero. Faster when activations vanish; results may differ in the last bits.
  bool flush_denormals = false;
};

/// Findings and decisions.
struct TorchSettings {
  bool mkldnn = false;          ///< convolutions use oneDNN
  double mkldnn_ms = 0;         ///< time of the trial with oneDNN; 0: not measured
  double blas_ms = 0;           ///< the same with BLAS
  std::string blas;             ///< path of the BLAS library; empty: built into LibTorch
  bool reference_blas = false;  ///< the slow reference BLAS is in use
  int threads = 1;
  std::string text() const;  ///< all fields in one line
};

/// Throws InvalidArgument unless MANIPLE_MKLDNN is auto, measure, on or off.
TorchSettings apply_fast_settings(const FastSettings& settings = {});

// ---- Reproducible random numbers ------------------------------------------------------------------------------------
//
//   maniple::seed_all(7, world->rank());   // each rank draws its own numbers; dropout differs between ranks
//   maniple::seed_all(7);                  // every rank draws the same numbers; weights start out equal
//
// Two runs of the same program on the same number of ranks then produce bit-identical weights.

/// Seeds LibTorch's generators (CPU and, if present, CUDA) with a number derived from `seed` and `stream`. Equal pairs
/// give equal numbers; different streams are independent. Returns the number passed to the generators.
std::uint64_t seed_all(std::uint64_t seed, std::uint64_t stream = 0);

}  // namespace maniple
