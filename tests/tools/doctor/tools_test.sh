#!/usr/bin/env bash
# `maniple ps` and `maniple doctor` as a user meets them. Usage: tools_test.sh MANIPLE
set -uo pipefail
maniple=$1
failures=0
scratch=$(mktemp -d)
pid=
trap '[[ -z $pid ]] || kill "$pid" 2>/dev/null; wait 2>/dev/null; rm -rf "$scratch"' EXIT
export XDG_RUNTIME_DIR=$scratch/run
mkdir -m 700 "$XDG_RUNTIME_DIR"

# expect CODES PATTERN ARGUMENTS...: the exit code is one of CODES, and a pattern is in what it prints
expect() {
  local codes=$1 pattern=$2 output code=0
  shift 2
  output=$("$maniple" "$@" 2>&1) || code=$?
  [[ " $* " != *" --json "* ]] || output=$(tr -d '\n' <<<"$output")
  if [[ " $codes " != *" $code "* ]] || ! grep -q -e "$pattern" <<<"$output"; then
    printf 'FAILED: maniple %s: expected exit %s and "%s", got exit %s and:\n%s\n' "$*" "$codes" "$pattern" "$code" "$output"
    failures=$((failures + 1))
  fi
}

# Jobs of this user that do not belong to the test may run: their records are in the other directory.
expect 0 'no jobs are running\|^JOB' ps
expect 0 '^\[' ps --json
expect 2 'not expected' ps --frobnicate

"$maniple" run -n 2 sleep 600 >"$scratch/run.out" 2>&1 &
pid=$!
for ((i = 0; i < 600; ++i)); do
  "$maniple" ps | grep -q " 2/2 .*sleep 600" && break
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.1
done
expect 0 "^JOB *PID *RANKS *HOSTS *RESTARTS *ELAPSED *COMMAND" ps
expect 0 " [0-9][0-9]* *2/2 .* 0 .*sleep 600" ps
expect 0 '"world_size": 2' ps --json
# The pid shown belongs to the process that the user started, and is the one to signal.
shown=$("$maniple" ps | awk '/sleep 600/ { print $2 }')
[[ $shown == "$pid" ]] || { echo "FAILED: ps shows pid $shown, but the job was started as $pid"; failures=$((failures + 1)); }
kill "$shown" && wait "$pid"
code=$?
[[ $code == 143 ]] || { echo "FAILED: a job that gets SIGTERM ends with $code"; failures=$((failures + 1)); }
pid=

# Workers have the chance to save when that pid is signalled.
"$maniple" run -n 2 sh -c 'trap "echo saved; exit 0" TERM; echo up; while :; do sleep 0.1; done' >"$scratch/save.out" 2>&1 &
pid=$!
for ((i = 0; i < 600; ++i)); do
  [[ $(grep -c '] up' "$scratch/save.out") == 2 ]] && "$maniple" ps | grep -q " 2/2 " && break
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.1
done
kill "$("$maniple" ps | awk '/trap/ { print $2 }')"
wait "$pid"
pid=
[[ $(grep -c '] saved' "$scratch/save.out") == 2 ]] || { echo "FAILED: workers were not told"; failures=$((failures + 1)); }
[[ -z $(ls -A "$XDG_RUNTIME_DIR/maniple") ]] || { echo "FAILED: a record is left"; failures=$((failures + 1)); }

expect "0 1" 'network .*loopback works' doctor
expect "0 1" '"check": "blas"' doctor --json
expect 2 'is not a host' doctor --hosts '-oProxyCommand=true'

# A remote shell that stays here: drops the host and runs the rest.
printf '#!/bin/sh\nshift\nexec sh -c "$*"\n' >"$scratch/shell"
chmod 700 "$scratch/shell"
expect "0 1" '^ok *hosts *127.0.0.1 .*reached, and reaches this machine' doctor --hosts 127.0.0.1 --rsh "$scratch/shell"
expect "0 1" '^ok *hosts *localhost .*reached' doctor --hosts localhost:4 --rsh "$scratch/shell"
expect 1 'FAIL *hosts *no-such-host.invalid' doctor --hosts no-such-host.invalid --rsh "$scratch/shell"
expect 1 'FAIL *hosts *127.0.0.1 .*cannot be started there' doctor --hosts 127.0.0.1 --rsh false
expect 1 'FAIL .*was not found' doctor --hosts 127.0.0.1 --rsh "$scratch/nothing"
expect 1 'FAIL .*cannot be started there: .*nosuch' doctor --hosts 127.0.0.1 --rsh "$scratch/shell" --remote-program /nosuch
# One that answers with another version, and is not reached.
printf '#!/bin/sh\necho "listening 9.9.9 1"\necho "cannot-connect-back a wall"\n' >"$scratch/liar"
chmod 700 "$scratch/liar"
expect 1 'cannot reach this machine: a wall.*has maniple 9.9.9' doctor --json --hosts 127.0.0.1 --rsh "$scratch/liar"
exit "$failures"
