#!/usr/bin/env bash
# scripts/fetch_mnist.sh where MNIST cannot be had, or is not what it should be. Usage: fetch_mnist_test.sh SCRIPT
set -euo pipefail
script=${1:?the script}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# expect STATUS TEXT MIRRORS: runs it with a folder of its own, without npm (a PATH that lacks it), and looks at what is
# left.
mkdir "$work/bin"
for program in awk bash curl cut dirname env grep gzip head mkdir mktemp mv rm sha256sum tail tar timeout; do
  ln -s "$(command -v "$program")" "$work/bin/$program"
done
expect() {
  local status=0
  rm -rf "$work/data"
  PATH="$work/bin" MNIST_MIRRORS=$3 "$script" "$work/data" >"$work/said" 2>&1 || status=$?
  if [[ $status != "$1" ]] || ! grep -q "$2" "$work/said" || [[ -n $(ls -A "$work/data") ]]; then
    echo "FAILED: expected exit $1, \"$2\" and an empty folder, got $status, $(ls -A "$work/data" | xargs) and:"
    cat "$work/said"
    failed=1
  fi
}

expect 3 "npm is not there" ""
expect 3 "curl: .*open file" "file://$work/nothing"
mkdir "$work/mirror"
for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
  echo "not these" | gzip >"$work/mirror/$name-ubyte.gz"
done
expect 1 "a checksum differs; nothing was kept" "file://$work/nothing file://$work/mirror"
echo "no gzip" >"$work/mirror/t10k-labels-idx1-ubyte.gz"
expect 3 "gzip: .*not in gzip format" "file://$work/mirror"
exit "$failed"
