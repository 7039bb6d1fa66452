#!/usr/bin/env bash
# Installs the libraries, static ones and then shared ones, into an empty prefix and uses the package from projects that
# know nothing but find_package(Maniple). Usage: install_test.sh CMAKE BUILD_DIR COMPILER "static shared"|static
# [PREFIXES]
# PREFIXES: where other packages (LibTorch) were found.
set -euo pipefail
cmake=$1 build=$2 compiler=$3 kinds=$4 prefixes=${5:-}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH MANIPLE_PLUGINS MANIPLE_MPI

# install_kind KIND: into the folder KIND. Nothing in it may depend on where it was installed, so it is moved.
install_kind() {
  "$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
  "$cmake" --install "$build" --prefix "$work/prefix" --component "$1" >/dev/null  # if it is not the kind of this build
  if [[ $1 == static ]]; then
    find "$work/prefix" \( -name 'libmaniple.so*' -o -name 'libmaniple_train.so*' -o -path '*/Maniple/shared/*' \) -delete
    find "$work/prefix" -path '*/Maniple/shared' -delete
  else
    find "$work/prefix" \( -name 'libmaniple_*.a' ! -name libmaniple_start.a -o -path '*/Maniple/static/*' \) -delete
    find "$work/prefix" -path '*/Maniple/static' -delete
  fi
  # Everything goes under the prefix, and nothing of it points back at the source tree.
  if grep -rlF "$(cd "$here/../.." && pwd)" "$work/prefix/include" "$work"/prefix/lib*/cmake; then
    echo "the installed files above name the source tree"
    exit 1
  fi
  mv "$work/prefix" "$work/$1"
}
install_kind static

# The guides are installed beside README.md, whose links to them hold.
documents=$(dirname "$(find "$work/static" -name README.md -path '*/doc/*' -not -path '*/docs/*')")
for page in $(grep -oE '\(docs/[a-z_/]+\.(md|svg)' "$documents/README.md" | tr -d '('); do
  [[ -f $documents/$page ]] || { echo "$page is not installed"; exit 1; }
done

# consumer NAME KIND ARGUMENTS...: builds the program NAME with the package in folder KIND.
consumer() {
  "$cmake" -G Ninja -S "$here/consumer" -B "$work/$2_$1" -DCMAKE_PREFIX_PATH="$work/$2${prefixes:+;$prefixes}" \
    -DCMAKE_CXX_COMPILER="$compiler" "${@:3}" && "$cmake" --build "$work/$2_$1"
}

if consumer absent static -DCOMPONENT=absent >"$work/absent.log" 2>&1; then
  echo "a component that does not exist was found"
  exit 1
fi
grep -q 'no component "absent"; installed are: .*comm' "$work/absent.log" || { cat "$work/absent.log"; exit 1; }

has_plugin() { [[ -n $(find "$work/static" -name "libmaniple_$1.so") ]]; }
# run_with BACKEND COMMAND...: wants the lines of both ranks.
run_with() {
  local backend=$1
  shift
  grep -qE "^$backend +here" "$work/backends"
  "$@" | tee "$work/output"
  for rank in 0 1; do grep -qx "rank $rank of 2 over $backend: 3" "$work/output"; done
}

# use KIND: runs the programs that were built with it.
use() {
  local kind=$1 launcher="$work/$1/bin/maniple"
  # Only what links maniple::launch has a start of its own.
  for name in comm launch train; do
    [[ -x $work/${kind}_$name/consumer ]] || continue
    # (With pipefail, `nm | grep -q` fails if grep ends before nm has written everything.)
    nm --defined-only "$work/${kind}_$name/consumer" >"$work/symbols"
    defines=$(grep -c ' __libc_start_main$' "$work/symbols" || true)
    [[ $defines == $([[ $name == launch ]] && echo 1 || echo 0) ]] || { echo "$kind $name: __libc_start_main defined: $defines"; exit 1; }
  done
  "$launcher" run --no-prefix -n 2 "$work/${kind}_comm/consumer" "file://$work/${kind}_rendezvous"
  "$work/${kind}_launch/consumer" | tee "$work/output"
  grep -q '^spawned: .*on purpose' "$work/output"

  # The plugins are in the package, and a program that was built with it finds them there.
  "$launcher" backends | tee "$work/backends"
  grep -qE "^nccl +(here|missing .*(NCCL: |no NVIDIA driver))" "$work/backends"  # what is missing says what it needs
  if has_plugin gloo; then
    run_with gloo "$launcher" run --no-prefix -n 2 "$work/${kind}_comm/consumer" "file://$work/${kind}_gloo_rendezvous" gloo
  fi
  if has_plugin openmpi; then
    as_root=()
    ((EUID != 0)) || as_root=(--allow-run-as-root)
    run_with mpi mpirun.openmpi "${as_root[@]}" --oversubscribe --bind-to none -n 2 "$work/${kind}_comm/consumer" env:// mpi
  fi
  if ((has_train)); then
    "$launcher" run --no-prefix -n 2 "$work/${kind}_train/consumer" "file://$work/${kind}_train_rendezvous"
  fi
}

# Where LibTorch is, the training library too.
has_train=0
[[ -z $(find "$work/static" -name Maniple-train-targets.cmake) ]] || has_train=1
consumer comm static
consumer launch static -DCOMPONENT=launch -DSOURCE=spawn_consumer.cpp
((!has_train)) || consumer train static -DCOMPONENT=train -DSOURCE=train_consumer.cpp
use static

# The same objects with shared libraries.
[[ $kinds == *shared* ]] || exit 0
install_kind shared
mapfile -t libraries < <(find "$work/shared" -name 'libmaniple*.so.*.*.*' -type f | sort)
"$here/exports.sh" "$here/../.." "${libraries[@]}"
version=$(sed -nE 's/^#define MANIPLE_VERSION_STRING "(.*)".*/\1/p' "$here/../../include/maniple/version.h")
for library in "${libraries[@]}"; do
  readelf -d "$library" >"$work/dynamic"
  # Before 1.0 major.minor identifies the binary interface.
  interface=${version%.*}
  [[ $version == 0.* ]] || interface=${version%%.*}
  grep -qE "SONAME.*\[libmaniple(_train)?\.so\.$interface\]" "$work/dynamic" || { cat "$work/dynamic"; exit 1; }
  grep -qE 'R(UN)?PATH.*\[\$ORIGIN[]:]' "$work/dynamic" || { cat "$work/dynamic"; exit 1; }
  if grep -E 'R(UN)?PATH' "$work/dynamic" | grep -F "$build"; then exit 1; fi
done
object() { echo "$work/static_$1/CMakeFiles/consumer.dir/$2.o"; }
consumer comm shared -DSOURCE="$(object comm consumer.cpp)"
consumer launch shared -DCOMPONENT=launch -DSOURCE="$(object launch spawn_consumer.cpp)"
((!has_train)) || consumer train shared -DCOMPONENT=train -DSOURCE="$(object train train_consumer.cpp)"
for program in "$work"/shared_*/consumer; do
  ldd "$program" >"$work/needs"
  grep -q "libmaniple.so.* => $work/shared/lib" "$work/needs" || { cat "$work/needs"; exit 1; }
done
use shared
