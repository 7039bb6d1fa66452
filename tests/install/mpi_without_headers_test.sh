#!/usr/bin/env bash
# An MPI whose compiler wrapper is there and whose headers are not (Debian's mpich without libmpich-dev) counts as
# absent. Usage: mpi_without_headers_test.sh CMAKE MPI_CMAKE
set -euo pipefail
cmake=${1:?cmake} module=${2:?mpi.cmake}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/headers"
cat >"$work/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.25)
project(Probe LANGUAGES NONE)
include($module)
if(TARGET maniple_mpi_mpich OR TARGET maniple_mpi_openmpi)
  message(FATAL_ERROR "an MPI without headers was taken")
endif()
maniple_find_mpi(whole $work/whole)
if(NOT TARGET maniple_mpi_whole)
  message(FATAL_ERROR "an MPI with headers was not taken")
endif()
EOF
for name in openmpi mpich; do
  printf '#!/bin/sh\necho "gcc -I%s/headers -lmpi"\n' "$work" >"$work/mpicc.$name"
  chmod +x "$work/mpicc.$name"
done
mkdir "$work/with" && touch "$work/with/mpi.h"
printf '#!/bin/sh\necho "gcc -I%s/with -lmpi"\n' "$work" >"$work/whole" && chmod +x "$work/whole"
PATH="$work:$PATH" "$cmake" -S "$work" -B "$work/build" >"$work/said" 2>&1 || { cat "$work/said"; exit 1; }
grep -q 'MPI mpich: mpicc.mpich is there, but no mpi.h in .*libmpich-dev' "$work/said" || { cat "$work/said"; exit 1; }
grep -q 'MPI openmpi: mpicc.openmpi is there, but no mpi.h in .*libopenmpi-dev' "$work/said" || { cat "$work/said"; exit 1; }
