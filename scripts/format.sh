#!/usr/bin/env bash
# Formats the C++ sources by .clang-format with one fixed version of clang-format, because other versions break lines
# elsewhere.
# Usage: scripts/format.sh [--check] [FILE...]
#
# Without files, formats the whole repository. --check changes nothing, prints the changes that are needed, and fails if
# there are any. Exit code 77 with --check: this version is not installed.
set -euo pipefail
program=clang-format-19  # available on Debian 12 and 13; scripts/setup.sh installs it
check=0
if [[ ${1:-} == --check ]]; then check=1 && shift; fi
root=$(dirname "$0")/..
if ! command -v "$program" >/dev/null; then
  echo "format: $program is not installed (Debian: apt-get install $program)" >&2
  if ((check)); then exit 77; fi
  exit 1
fi

files=("$@")
if ((${#files[@]} == 0)); then
  cd "$root"
  mapfile -t files < <(git ls-files '*.h' '*.cpp' '*.inl' 2>/dev/null)
  # The sources are not a git checkout.
  if ((${#files[@]} == 0)); then mapfile -t files < <(find bench examples include plugins src tests tools -name '*.h' -o -name '*.cpp' -o -name '*.inl'); fi
fi
mode=(-i)
if ((check)); then mode=(--dry-run -Werror); fi
printf '%s\0' "${files[@]}" | xargs -0 -P "$(nproc)" -n 64 "$program" "${mode[@]}" --style=file
if ((check)); then echo "format: ${#files[@]} files are formatted"; fi
