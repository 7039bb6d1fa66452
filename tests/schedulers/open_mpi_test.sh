#!/usr/bin/env bash
# Ranks that Open MPI's mpirun starts find each other. Usage: open_mpi_test.sh PROGRAM
set -euo pipefail
program=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
. "$(dirname "$0")/expect_ranks.sh"

mpirun=$(command -v mpirun.openmpi || command -v mpirun) || skip "Open MPI is not installed"
as_root=()
((EUID != 0)) || as_root=(--allow-run-as-root)
version=$("$mpirun" "${as_root[@]}" --version 2>&1 || true)
[[ $version == *"Open MPI"* || $version == *"OpenRTE"* ]] || skip "$mpirun is not Open MPI's"

expect_ranks 1 "$mpirun" "${as_root[@]}" --oversubscribe -n 1 "$program"
expect_ranks 4 "$mpirun" "${as_root[@]}" --oversubscribe -n 4 "$program"
exit "$failures"
