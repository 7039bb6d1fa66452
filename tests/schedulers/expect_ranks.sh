# For the tests of schedulers: `expect_ranks N COMMAND...` runs the command and wants a line of each of N ranks, once.
# None of the variables by which ranks usually find each other is set.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT MANIPLE_SECRET_FD MANIPLE_SECRET_FILE
failures=0

skip() {
  echo "skipped: $1"
  exit 77
}

expect_ranks() {
  local count=$1 output status=0 expected
  shift
  output=$(timeout 150 "$@" 2>"$scratch/errors") || status=$?
  expected=$(for ((rank = 0; rank < count; ++rank)); do echo "rank $rank of $count: sum $((count * (count + 1) / 2))"; done | sort)
  if [[ $status != 0 || $(sort <<<"$output") != "$expected" ]]; then
    printf 'FAILED: %s\n  exit code %s, output:\n%s\n  errors:\n%s\n' "$*" "$status" "$output" "$(cat "$scratch/errors")"
    failures=$((failures + 1))
  else
    echo "passed: $*"
  fi
}
