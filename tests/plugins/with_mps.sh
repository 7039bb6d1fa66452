#!/usr/bin/env bash
# Runs a command with an MPS daemon of its own, so that kernels of the processes it starts run side by side on a GPU.
# Usage: with_mps.sh COMMAND [ARGUMENT...]. Without nvidia-cuda-mps-control it ends with 77, which ctest counts as a
# skip.
set -euo pipefail

if ! command -v nvidia-cuda-mps-control >/dev/null; then
  echo "[  SKIPPED ] needs nvidia-cuda-mps-control"
  exit 77
fi
folder=$(mktemp -d /tmp/maniple-mps-test-XXXXXX)
mkdir "$folder/pipe" "$folder/log"
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
stop() {
  echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1 || true
  # What did not end by itself: processes whose environment names this folder.
  for environment in /proc/[0-9]*/environ; do
    pid=${environment#/proc/}
    pid=${pid%/environ}
    if [[ $pid != "$$" ]] && grep -qzxsF "CUDA_MPS_PIPE_DIRECTORY=$folder/pipe" "$environment"; then
      kill -KILL "$pid" 2>/dev/null || true
    fi
  done
  if [[ -s $folder/log/server.log ]]; then
    echo "with_mps: the last lines of the server's log:"
    tail -n 5 "$folder/log/server.log"
  fi
  rm -rf "$folder"
}
trap stop EXIT
nvidia-cuda-mps-control -d
"$@"
