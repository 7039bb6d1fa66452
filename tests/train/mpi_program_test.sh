#!/usr/bin/env bash
# The program of mpi_program.cpp under a real mpirun, and what it says without one.
# Usage: mpi_program_test.sh openmpi|mpich PROGRAM MANIPLE
set -euo pipefail
mpi=$1 program=$2 maniple=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT MANIPLE_SECRET_FD MANIPLE_SECRET_FILE MANIPLE_MPI
failures=0

case $mpi in
  openmpi)
    mpirun=(mpirun.openmpi --oversubscribe --bind-to none)
    ((EUID != 0)) || mpirun+=(--allow-run-as-root)
    ;;
  mpich) mpirun=(mpiexec.hydra) ;;
esac

# expect NAME STATUS TEXT... -- COMMAND...: wants the status ("0" or "bad"), and every TEXT somewhere in what is
# printed.
expect() {
  local name=$1 expected=$2 texts=() status=0 text problem=
  shift 2
  while [[ $1 != -- ]]; do
    texts+=("$1")
    shift
  done
  shift
  timeout 60 "$@" >"$scratch/output" 2>&1 || status=$?
  ((status != 124)) || problem="it hangs"
  [[ $expected == 0 && $status == 0 || $expected == bad && $status != 0 ]] || problem+=" exit status $status;"
  for text in "${texts[@]}"; do grep -qF -- "$text" "$scratch/output" || problem+=" \"$text\" is missing;"; done
  if [[ -z $problem ]]; then
    echo "passed: $name"
  else
    printf 'FAILED: %s:%s output:\n%s\n' "$name" "$problem" "$(cat "$scratch/output")"
    failures=$((failures + 1))
  fi
}

expect "two ranks" 0 "Rank-0 has sent the following tensor to Rank-1" "Rank-1 has received the following tensor from Rank-0" \
  " 1" "-1" -- "${mpirun[@]}" -n 2 "$program"
[[ $mpi == openmpi ]] || exit "$failures"

needs="the mpi backend needs mpirun"
expect "no mpirun" bad "$needs" "start with \`mpirun -n N $program\`" -- "$program"
expect "maniple run" bad "$needs" "start with \`mpirun -n 2 $program\`" -- "$maniple" run -n 2 "$program"
exit "$failures"
