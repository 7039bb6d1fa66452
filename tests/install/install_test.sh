#!/usr/bin/env bash
# Usage: install_test.sh CMAKE BUILD_DIR COMPILER [PREFIXES]   where other packages (LibTorch) were found
set -euo pipefail
cmake=$1 build=$2 compiler=$3 prefixes=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null

# Everything goes under the prefix, and nothing of it points back at the source tree.
if grep -rlF "$(cd "$here/../.." && pwd)" "$work/prefix/include" "$work"/prefix/lib*/cmake; then
  echo "the installed files above name the source tree"
  exit 1
fi

# The guides are installed beside README.md, whose links to them hold.
documents=$(dirname "$(find "$work/prefix" -name README.md -path '*/doc/*' -not -path '*/docs/*')")
for page in $(grep -oE '\(docs/[a-z_/]+\.(md|svg)' "$documents/README.md" | tr -d '('); do
  [[ -f $documents/$page ]] || { echo "$page is not installed"; exit 1; }
done

# From here on it is used from another place: nothing in it may depend on where it was installed.
mv "$work/prefix" "$work/moved"
consumer() {
  "$cmake" -G Ninja -S "$here/consumer" -B "$1" -DCMAKE_PREFIX_PATH="$work/moved${prefixes:+;$prefixes}" -DCMAKE_CXX_COMPILER="$compiler" "${@:2}"
}

if consumer "$work/absent" -DCOMPONENT=absent >"$work/absent.log" 2>&1; then
  echo "a component that does not exist was found"
  exit 1
fi
grep -q 'no component "absent"; installed are: .*comm' "$work/absent.log" || { cat "$work/absent.log"; exit 1; }

consumer "$work/build"
"$cmake" --build "$work/build"
"$work/moved/bin/maniple" run --no-prefix -n 2 "$work/build/consumer" "file://$work/rendezvous"

# The plugins are in the package, and a program that was built with it finds them there.
unset MANIPLE_PLUGINS MANIPLE_MPI
"$work/moved/bin/maniple" backends | tee "$work/backends"
grep -qE "^nccl +(here|missing .*NCCL: )" "$work/backends"  # what is missing says how to get it
has_plugin() { [[ -n $(find "$work/moved" -name "libmaniple_$1.so") ]]; }
# run_with BACKEND COMMAND...: wants the lines of both ranks.
run_with() {
  local backend=$1
  shift
  grep -qE "^$backend +here" "$work/backends"
  "$@" | tee "$work/output"
  for rank in 0 1; do grep -qx "rank $rank of 2 over $backend: 3" "$work/output"; done
}
if has_plugin gloo; then
  run_with gloo "$work/moved/bin/maniple" run --no-prefix -n 2 "$work/build/consumer" "file://$work/gloo_rendezvous" gloo
fi
if has_plugin openmpi; then
  as_root=()
  ((EUID != 0)) || as_root=(--allow-run-as-root)
  run_with mpi mpirun.openmpi "${as_root[@]}" --oversubscribe --bind-to none -n 2 "$work/build/consumer" env:// mpi
fi

# Where LibTorch is, the training library too.
if [[ -n $(find "$work/moved" -name Maniple-train-targets.cmake) ]]; then
  consumer "$work/train" -DCOMPONENT=train -DSOURCE=train_consumer.cpp
  "$cmake" --build "$work/train"
  "$work/moved/bin/maniple" run --no-prefix -n 2 "$work/train/consumer" "file://$work/train_rendezvous"
fi
