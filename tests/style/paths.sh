#!/usr/bin/env bash
# paths.sh SOURCE_DIR FILE...: no library holds a path of the sources that it was built from, which errors would show to
# users. A default argument SourceLocation::current() that the library evaluates for itself is such a path: see
# src/train/tensor/public_call.h.
set -euo pipefail
sources=$1
shift
# Where LibTorch's macros have __FILE__ in them; as "maniple/src/...", see cmake/torch.cmake.
allowed='^maniple/src/train/(optim/optim|sync_batch_norm/sync_batch_norm)\.cpp$'
copy=$(mktemp)
trap 'rm -f "$copy"' EXIT
failed=0
for file in "$@"; do
  strip --strip-debug -o "$copy" "$file"
  found=$(LC_ALL=C grep -aoE "($sources|maniple)/(src|plugins|tools|include)/[A-Za-z0-9_/.]+" "$copy" | grep -vE "$allowed" | sort -u || true)
  [[ -n $found ]] || continue
  printf '%s holds paths of the sources it was built from:\n%s\n' "$file" "$found"
  failed=1
done
exit $failed
