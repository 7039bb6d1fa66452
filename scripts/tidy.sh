#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy. Usage: scripts/tidy.sh BUILD_FOLDER [SOURCE...]
#
# BUILD_FOLDER holds compile_commands.json. Without sources: those that every rank runs, from src/base to src/group, which takes two cores
# about two minutes; those that include LibTorch would take ten times as long, and plugins need the libraries of others. Exit code 77: this
# version is not installed.
set -euo pipefail
program=clang-tidy-19  # on Debian 12 and 13 alike; scripts/setup.sh installs it
build=$(cd "${1:?the build folder}" && pwd)
shift
cd "$(dirname "$0")/.."
if ! command -v "$program" >/dev/null; then
  echo "tidy: $program is not installed (Debian: apt-get install $program)" >&2
  exit 77
fi
sources=("$@")
if ((${#sources[@]} == 0)); then
  # Only what this build compiles: some files are for the other processor architecture.
  while read -r source; do
    if grep -qF "/$source\"" "$build/compile_commands.json"; then sources+=("$source"); fi
  done < <(find src/{base,net,shm,store,rendezvous,call,transport,session,collective,backend,group} -name '*.cpp' \
    -not -path 'src/backend/plugin/*/*' | sort)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Clang can read neither GCC's precompiled headers nor some of its options.
sed -E 's/-Winvalid-pch//g; s/-include [^ "]*cmake_pch\.hxx//g; s/-Wno-(restrict|array-bounds|stringop-overflow|stringop-overread)//g; s/-Werror//g' \
  "$build/compile_commands.json" >"$work/compile_commands.json"
printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -n 4 "$program" -p "$work" --quiet >"$work/said" 2>"$work/counts" || {
  cat "$work/said" "$work/counts"
  exit 1
}
echo "tidy: ${#sources[@]} sources, nothing to report"
