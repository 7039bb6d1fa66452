#!/usr/bin/env bash
# Runs every test, from a clean clone. Usage: scripts/test.sh [--quick | --long]
#
#   (nothing)  release build and all tests; unit and thread-rank tests under the address and undefined-behaviour
#              sanitizers; five seconds of each fuzzer
#   --quick    only the release build and its tests, without tests of plugin backends (MPI, Gloo) and of the installed
#              package, clang-tidy, other compilers, and long waits
#   --long     like no option, plus tests labelled long, the thread sanitizer, the tests of maniple::train under both
#              sanitizers, and ten minutes of each fuzzer
#
# A skip that tests/expected_skips.txt does not list is a failure. Failed tests are not repeated: a test that fails
# sometimes has a race, or tests code with a race. With CI=true warnings are errors. The last line is "N passed, N
# failed".
set -euo pipefail
cd "$(dirname "$0")/.."

mode=plain fuzz_seconds=5
case "${1:-}" in
  "") ;;
  --quick) mode=quick ;;
  --long) mode=long fuzz_seconds=600 ;;
  *)
    echo "usage: $0 [--quick | --long]" >&2
    exit 2
    ;;
esac

jobs=$(nproc)
places=$((jobs + 1))  # for tests: one of them may be waiting (tests/CMakeLists.txt)
passed=0 failed=0 skipped=0
summary=() closing=()
werror=OFF
[[ ${CI:-} != true ]] || werror=ON

# stage NAME COMMAND...: runs COMMAND, prints its duration, and records a failure of the command itself.
stage() {
  local name=$1 start=$SECONDS verdict=ok
  shift
  printf '\n==== %s\n' "$name"
  if ! "$@"; then
    verdict=FAILED
    stage_failed=1
  fi
  summary+=("$(printf '%-32s %5d s  %s' "$name" $((SECONDS - start)) "$verdict")")
  printf '==== %s: %d s, %s\n' "$name" $((SECONDS - start)) "$verdict"
  [[ $verdict == ok ]]
}

configure_and_build() {
  cmake --preset "$1" -DMANIPLE_WERROR=$werror --log-level=WARNING && cmake --build --preset "$1" -j "$jobs"
}

# Clang before version 19 cannot compile the LibTorch of its Debian release.
build_train() {
  local compiler=g++ version
  version=$(clang++ -dumpversion)
  ((${version%%.*} < 19)) || compiler=clang++
  cmake --preset "$1" -DCMAKE_CXX_COMPILER=$compiler -DMANIPLE_WERROR=$werror --log-level=WARNING &&
    cmake --build --preset "$1" -j "$jobs"
}

# Sanitizers may fail if the kernel spreads addresses widely, so turn address randomization off.
steady_addresses() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then setarch "$(uname -m)" -R "$@"; else "$@"; fi
}

# run_tests PRESET BUILD_DIR NAME [COMMAND PREFIX...]: runs ctest, shows its output, and counts its results.
run_tests() {
  local preset=$1 build=$2 name=$3 status=0 log=$2/Testing/Temporary/LastTest.log
  local output=$build/ctest_output.txt tally=$build/tally.txt
  "${@:4}" ctest --preset "$preset" -j "$places" 2>&1 | tee "$output" || status=$?
  closing+=("-- $name" "$(sed -n '/% tests passed, /,$p' "$output" | grep -v '^Errors while\|^$' || true)")
  awk -v stage="$name" -v root=$((EUID == 0)) -f scripts/tally.awk tests/expected_skips.txt "$output" "$log" >"$tally" || return 1
  grep -v '^total ' "$tally" || true
  local passes fails skips
  read -r passes fails skips < <(sed -n 's/^total //p' "$tally")
  passed=$((passed + passes)) failed=$((failed + fails)) skipped=$((skipped + skips))
  # ctest and the tally must agree that tests ran and that none failed.
  ((status == 0 && fails == 0 && passes > 0))
}

# fuzz PROGRAM SECONDS: starts from its seeds and the inputs that earlier runs found. Output and exit status go to
# build-asan.
fuzz() {
  local name status=0
  name=$(basename "$1")
  mkdir -p "build-asan/corpus/$name" build-asan/findings
  MANIPLE_FUZZ_SEEDS=build-asan/corpus/$name "$1" -max_total_time="$2" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build-asan/findings/$name-" "build-asan/corpus/$name" >"build-asan/$name.log" 2>&1 || status=$?
  echo "$status" >"build-asan/$name.status"
}

# run_fuzzers SECONDS: runs every fuzzer for SECONDS, one per core.
run_fuzzers() {
  local program name status=0 count=0
  export -f fuzz
  rm -f build-asan/*_fuzz.status
  find build-asan/bin/tests -name '*_fuzz' -type f -executable -print0 | sort -z |
    xargs -0 -P "$jobs" -I{} bash -c 'fuzz "$@"' fuzz {} "$1" || status=1
  for program in build-asan/bin/tests/*_fuzz; do
    [[ -f $program && -x $program ]] || continue
    name=$(basename "$program")
    echo "fuzzed $name for $1 s"
    if [[ $(cat "build-asan/$name.status") == 0 ]]; then
      grep -E 'number_of_executed_units|peak_rss_mb' "build-asan/$name.log" | sed 's/^stat::/  /' || true
      passed=$((passed + 1))
    else
      tail -n 60 "build-asan/$name.log"
      echo "  FAILED: fuzzer $name; the input is in build-asan/findings"
      failed=$((failed + 1)) status=1
    fi
    count=$((count + 1))
  done
  ((count > 0)) || { echo "  FAILED: there is no fuzzer in build-asan/bin/tests"; failed=$((failed + 1)); status=1; }
  return "$status"
}

# build_beside PRESET: builds at idle priority while the tests run, because they often wait. await_build waits for the
# end of the build.
beside=''
build_beside() {
  local idle=()
  ! chrt --idle 0 true 2>/dev/null || idle=(chrt --idle 0)
  export -f configure_and_build
  export werror jobs
  mkdir -p build
  setsid "${idle[@]}" bash -c "configure_and_build $1" >build/beside.txt 2>&1 &
  beside=$!
  trap 'kill -- "-$beside" 2>/dev/null || true' EXIT
}
await_build() {
  local status=0
  wait "$beside" || status=$?
  trap - EXIT
  if ((status != 0)); then tail -n 200 build/beside.txt; fi
  return "$status"
}

stage_failed=0
stage setup scripts/setup.sh || exit 1

release_tests=release
[[ $mode == plain ]] || release_tests=release-$mode
if stage "build: release" configure_and_build release; then
  if [[ $mode != quick ]] && command -v clang++ >/dev/null; then build_beside asan-ubsan; fi
  stage "test: release" run_tests "$release_tests" build release || true
fi

if [[ $mode != quick ]]; then
  if command -v clang++ >/dev/null; then
    [[ -n $beside ]] || build_beside asan-ubsan
    if stage "build: asan-ubsan (the rest)" await_build; then
      stage "test: asan-ubsan" run_tests asan-ubsan build-asan asan-ubsan steady_addresses || true
      stage "fuzz" run_fuzzers "$fuzz_seconds" || true
    fi
    if [[ $mode == long ]] && stage "build: tsan" configure_and_build tsan; then
      stage "test: tsan" run_tests tsan build-tsan tsan steady_addresses || true
    fi
    if [[ $mode == long ]] && grep -q '^Torch_DIR:PATH=/' build/CMakeCache.txt; then
      for sanitizer in asan tsan; do
        stage "build: $sanitizer-train" build_train $sanitizer-train || continue
        stage "test: $sanitizer-train" run_tests $sanitizer-train build-$sanitizer-train $sanitizer-train steady_addresses || true
      done
    fi
  elif [[ ${CI:-} == true ]]; then
    stage "sanitizers: clang++ is not there" false || true
  else
    echo "sanitizers and fuzzers: skipped, clang++ is not there"
  fi
fi

printf '\n==== summary\n'
printf '%s\n' "${summary[@]}" "total: $SECONDS s; $skipped skipped, as expected"
printf '%s\n' "${closing[@]}"
# A stage that failed without a failing test, such as a build, is a failure too.
if ((stage_failed != 0 && failed == 0)); then failed=1; fi
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
