#!/usr/bin/env bash
# Usage: install_test.sh CMAKE BUILD_DIR COMPILER
set -euo pipefail
cmake=$1 build=$2 compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null

# Everything goes under the prefix, and nothing of it points back at the source tree.
if grep -rlF "$(cd "$here/../.." && pwd)" "$work/prefix/include" "$work"/prefix/lib*/cmake; then
  echo "the installed files above name the source tree"
  exit 1
fi

consumer() {
  "$cmake" -G Ninja -S "$here/consumer" -B "$1" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER="$compiler" "${@:2}"
}

if consumer "$work/absent" -DCOMPONENT=absent >"$work/absent.log" 2>&1; then
  echo "a component that does not exist was found"
  exit 1
fi
grep -q absent "$work/absent.log"

consumer "$work/build"
"$cmake" --build "$work/build"
"$here/../../scripts/ranks.sh" 2 "$work/build/consumer" "file://$work/meeting"

# Where LibTorch is, the training library too.
if [[ -n $(find "$work/prefix" -name Maniple-train-targets.cmake) ]]; then
  consumer "$work/train" -DCOMPONENT=train -DSOURCE=train_consumer.cpp
  "$cmake" --build "$work/train"
  "$here/../../scripts/ranks.sh" 2 "$work/train/consumer" "file://$work/train_meeting"
fi
