#!/usr/bin/env bash
# Starts a program as several ranks on this machine: scripts/ranks.sh 4 build/bin/examples/01_hello_ranks [arguments]
# Sets what env:// reads (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and gives the ranks a secret of their own.
# Returns the status of the first rank that failed; the others then have five seconds to say what they saw.
set -euo pipefail
if (($# < 2)) || [[ ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 RANKS PROGRAM [ARGUMENTS]" >&2
  exit 2
fi
ranks=$1
shift

scratch=$(mktemp -d)
pids=()
reaper=""
finish() {
  ((${#pids[@]} == 0)) || kill -KILL "${pids[@]}" 2>/dev/null || true
  [[ -z $reaper ]] || kill "$reaper" 2>/dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A port below the range that the kernel gives to clients, on which nobody answers.
free_port() {
  local port
  while port=$((20000 + RANDOM % 12000)); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port"
}

# 32 bytes as hexadecimal digits, in a file that only its owner may read.
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$scratch/secret")
export MANIPLE_SECRET_FILE="$scratch/secret"
MASTER_PORT=$(free_port)
export MASTER_ADDR=127.0.0.1 MASTER_PORT
export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks NODE_RANK=0

for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank LOCAL_RANK=$rank "$@" &
  pids+=($!)
done

status=0
while ((${#pids[@]} > 0)); do
  code=0
  wait -n -p finished "${pids[@]}" || code=$?
  for i in "${!pids[@]}"; do [[ ${pids[i]} != "$finished" ]] || unset "pids[$i]"; done
  if ((code != 0 && status == 0)); then
    status=$code
    if ((${#pids[@]} > 0)); then
      (sleep 5 && kill -KILL "${pids[@]}") >/dev/null 2>&1 &
      reaper=$!
    fi
  fi
done
exit "$status"
