#!/usr/bin/env bash
# Workers of an elastic job are killed and asked to leave. The weights and the log equal the weights and the log of an
# undisturbed run. (elastic_endurance_test.sh also stops workers.) Usage: elastic_example_test.sh MANIPLE PROGRAM
set -euo pipefail
maniple=$1 program=$2
work=$(mktemp -d)
job=
trap '[[ -z $job ]] || kill "$job" 2>/dev/null || true; rm -rf "$work"' EXIT
arguments=(--samples 6000 --epochs 2)

fail() {
  echo "$1" >&2
  [[ ! -e $work/output ]] || tr '\r' '\n' <"$work/output" | grep -v 'samples/s' | tail -n 40 >&2
  exit 1
}
weights() { tr '\r' '\n' <"$1" | sed -n 's/.*, weights \([0-9a-f]*\)$/\1/p'; }
log() { sed 's/"seconds":[^,]*,//' "$1/log.jsonl"; }
# same WHAT LOG: the job has ended like the undisturbed one.
same() {
  [[ $(weights "$work/output") == "$expected" ]] || fail "$1: other weights than $expected"
  cmp <(log "$work/undisturbed") <(log "$work/$2") || fail "$1: another log"
  echo "$1: the same weights and log"
}
# start LOG: an elastic job in the background; returns when it has trained.
start() {
  "$maniple" run --verbose -n 3 --elastic 1:3 "$program" "${arguments[@]}" --log "$work/$1" >"$work/output" 2>&1 &
  job=$!
  until [[ -s $work/$1/log.jsonl ]]; do
    kill -0 "$job" 2>/dev/null || fail "the job has ended early"
    sleep 0.05
  done
}
pid_of() { sed -n "s/^maniple: rank $1 is pid \([0-9]*\).*/\1/p" "$work/output" | head -n 1; }
finish() {
  local status=0
  wait "$job" || status=$?
  job=
  ((status == 0)) || fail "the job has failed with $status"
}

"$maniple" run -n 2 "$program" "${arguments[@]}" --log "$work/undisturbed" >"$work/output" 2>&1 || fail "the first run"
expected=$(weights "$work/output")
[[ -n $expected ]] || fail "no weights were printed"

"$maniple" run -n 4 --elastic 1:4 "$program" "${arguments[@]}" --kill-every 25 --log "$work/killed" >"$work/output" 2>&1 ||
  fail "a job whose ranks kill themselves"
(($(grep -c 'signal SIGKILL' "$work/output") >= 3)) || fail "fewer than 3 ranks were killed"
same "ranks that kill themselves" killed

start left
kill -TERM "$(pid_of 0)"
finish
grep -q 'worker 0 leaves the job' "$work/output" || fail "the worker did not leave"
same "a rank that leaves" left
