#!/usr/bin/env bash
# Ranks that MPICH's launcher (Hydra) starts find each other. Usage: mpich_test.sh PROGRAM
set -euo pipefail
program=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
. "$(dirname "$0")/expect_ranks.sh"

launcher=$(command -v mpiexec.hydra || command -v mpirun.mpich) || skip "MPICH is not installed"

expect_ranks 1 "$launcher" -n 1 "$program"
expect_ranks 4 "$launcher" -n 4 "$program"
# Through a script, so that the launcher is not the parent of the ranks.
expect_ranks 3 "$launcher" -n 3 bash -c "'$program'; exit"
exit "$failures"
