#!/usr/bin/env bash
# Builds Maniple's GPU parts, runs their tests, and measures, on a machine with an NVIDIA GPU and the CUDA toolkit
# (nvcc). Usage: scripts/gpu_test.sh [--no-bench]
#
# Uses LibTorch and NCCL from python3's PyTorch if that PyTorch has CUDA, otherwise the ones that CMake finds. Also
# writes the results of `maniple bench gpu` to build/gpu_bench.json. The last line is "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/.."

bench=1
case "${1:-}" in
  "") ;;
  --no-bench) bench='' ;;
  *) echo "usage: $0 [--no-bench]" >&2; exit 2 ;;
esac
nvidia-smi -L >/dev/null 2>&1 || { echo "gpu_test: nvidia-smi finds no GPU" >&2; exit 2; }
[[ -n $(command -v nvcc) || ! -x /usr/local/cuda/bin/nvcc ]] || PATH=$PATH:/usr/local/cuda/bin
for tool in nvcc cmake ninja; do
  command -v $tool >/dev/null || {
    echo "gpu_test: $tool is not on PATH (nvcc: the CUDA toolkit; cmake 3.25 or later, ninja: scripts/setup.sh)" >&2
    exit 2
  }
done

# broken REASON: a step before the tests failed, so only print the last line.
broken() {
  echo "gpu_test: $1" >&2
  echo "0 passed, 1 failed"
  exit 1
}

torch=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path if torch.version.cuda else "")' 2>/dev/null || true)
nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null || true)
if [[ -n $torch && -n $nccl && -z ${NCCL_HOME:-} ]]; then
  export NCCL_HOME=$nccl LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$nccl/lib
fi
echo "gpu_test: LibTorch: ${torch:-what CMake finds}; NCCL: ${NCCL_HOME:-what CMake finds}"
werror=OFF
[[ ${CI:-} != true ]] || werror=ON
cmake --preset release -DMANIPLE_WERROR=$werror --log-level=WARNING ${torch:+-DCMAKE_PREFIX_PATH="$torch"} ||
  broken "CMake failed; scripts/setup.sh installs what it needs (Debian: libfmt-dev libcli11-dev nlohmann-json3-dev libssl-dev zlib1g-dev libgtest-dev libgmock-dev)"
cmake --build --preset release -j "$(nproc)" --target tests_gpu maniple_plugins maniple || broken "the build failed"

status=0 output=build/gpu_output.txt tally=build/gpu_tally.txt
# Each test runs about three rank processes, and most of their time is start-up.
ctest --preset release-gpu -j "$((($(nproc) + 3) / 4))" 2>&1 | tee "$output" || status=$?
awk -v stage=gpu -v root=$((EUID == 0)) -f scripts/tally.awk tests/expected_skips.txt "$output" build/Testing/Temporary/LastTest.log >"$tally" ||
  broken "the results of ctest could not be read"
grep -v '^total ' "$tally" || true
read -r passes fails skips < <(sed -n 's/^total //p' "$tally")
if ((passes == 0)); then status=1; fi  # no test ran
if [[ -n $bench ]]; then
  cmake --build --preset release -j "$(nproc)" --target bench_gpu || status=1
  timeout --kill-after=20 400 build/bin/maniple bench gpu --json build/gpu_bench.json || status=1
fi
if ((status != 0 && fails == 0)); then fails=1; fi
printf '%d skipped\n%d passed, %d failed\n' "$skips" "$passes" "$fails"
((fails == 0))
