#!/usr/bin/env bash
# Builds everything that concerns GPUs and runs its tests and benchmarks, on a machine with an NVIDIA GPU and the CUDA toolkit (nvcc).
# Usage: scripts/gpu_test.sh [--no-bench]
#
# LibTorch is the one inside the PyTorch of `python3`, if there is one with CUDA; otherwise what CMake finds. The last line is
# "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/.."

bench=1
case "${1:-}" in
  "") ;;
  --no-bench) bench='' ;;
  *) echo "usage: $0 [--no-bench]" >&2; exit 2 ;;
esac
command -v nvcc >/dev/null || { echo "gpu_test: nvcc is not there; install the CUDA toolkit, or add its bin folder to PATH" >&2; exit 2; }
nvidia-smi -L >/dev/null 2>&1 || { echo "gpu_test: nvidia-smi finds no GPU" >&2; exit 2; }

torch=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path if torch.version.cuda else "")' 2>/dev/null || true)
werror=OFF
[[ ${CI:-} != true ]] || werror=ON
cmake --preset release -DMANIPLE_WERROR=$werror --log-level=WARNING ${torch:+-DCMAKE_PREFIX_PATH="$torch"}
cmake --build --preset release -j "$(nproc)" --target tests_gpu maniple_plugins maniple cuda_plugin_bench

status=0 output=build/gpu_output.txt tally=build/gpu_tally.txt
ctest --preset release-gpu -j 1 2>&1 | tee "$output" || status=$?
awk -v stage=gpu -v root=$((EUID == 0)) -f scripts/tally.awk tests/expected_skips.txt "$output" build/Testing/Temporary/LastTest.log >"$tally" || status=1
grep -v '^total ' "$tally" || true
read -r passes fails skips < <(sed -n 's/^total //p' "$tally")
if [[ -n $bench ]]; then
  for ranks in 2 4; do build/bin/tests/cuda_plugin_bench "$ranks" || status=1; done
  if cmake --build --preset release --target ddp_gpu_worker; then
    for model in mlp resnet50 gpt2; do build/libexec/maniple/ddp_gpu_worker "$model" || status=1; done
  fi
fi
if ((status != 0 && fails == 0)); then fails=1; fi
printf '%d skipped\n%d passed, %d failed\n' "$skips" "$passes" "$fails"
((fails == 0))
