#!/usr/bin/env bash
# An elastic job is resized; an elastic job of several nodes, all on this machine, loses nodes and gets others; elastic
# jobs end early and are continued. The weights equal the weights of an undisturbed run. The logs of jobs that were not
# continued are equal, too. Usage: elastic_nodes_test.sh MANIPLE PROGRAM
set -euo pipefail
maniple=$1 program=$2
work=$(mktemp -d)
launchers=()
end() {
  for pid in "${launchers[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  rm -rf "$work"
}
trap end EXIT
export XDG_RUNTIME_DIR=$work
arguments=(--samples 6000 --epochs 3)

fail() {
  echo "$1" >&2
  for output in "$work"/*.txt; do
    echo "== $(basename "$output")" >&2
    tr '\r' '\n' <"$output" | grep -v 'samples/s' | tail -n 30 >&2
  done
  exit 1
}
weights() { tr '\r' '\n' <"$1" | sed -n 's/.*, weights \([0-9a-f]*\)$/\1/p'; }
log() { sed 's/"seconds":[^,]*,//' "$1/log.jsonl"; }
rows() { cat "$work/$1/log.jsonl" 2>/dev/null | wc -l; }
same_weights() {
  [[ $(weights "$work/node0.txt") == "$expected" ]] || fail "$1: other weights than $expected"
  echo "$1: the same weights"
}
same() {
  same_weights "$1"
  cmp <(log "$work/undisturbed") <(log "$work/$2") || fail "$1: another log"
  echo "$1: the same log"
}
# launch OUTPUT ARGUMENT...: a launcher in the background; its pid is in `pid`.
launch() {
  "$maniple" run --verbose --join-timeout "$join" --elastic "$range" "${@:2}" "$program" "${arguments[@]}" >"$work/$1.txt" 2>&1 &
  pid=$!
  launchers+=("$pid")
}
ended() {
  local status=0
  wait "$1" || status=$?
  ((status == $2)) || fail "a launcher ended with $status, not with $2"
}
# until_true PID CONDITION...: waits for it while the launcher PID runs.
until_true() {
  until "${@:2}"; do
    kill -0 "$1" 2>/dev/null || fail "the job has ended before: ${*:2}"
    sleep 0.05
  done
}
printed() { grep -q "$2" "$work/$1.txt"; }
more_rows() { (($(rows "$1") > $2)); }
up() { [[ $("$maniple" ps --json | sed -n 's/.*"ranks_up": \([0-9]*\),/\1/p' | sort -n | tail -n 1) == "$1" ]]; }
job_name() { "$maniple" ps --json | sed -n 's/.*"id": "\(.*\)",/\1/p' | head -n 1; }

"$maniple" run -n 2 "$program" "${arguments[@]}" --log "$work/undisturbed" >"$work/node0.txt" 2>&1 || fail "the first run"
expected=$(weights "$work/node0.txt")
[[ -n $expected ]] || fail "no weights were printed"

# Another size.
range=1:4 join=60
arguments+=(--log "$work/resized")
launch node0 -n 2
first=$pid
until_true "$first" more_rows resized 0
job=$(job_name)
"$maniple" resize "$job" 4 >"$work/resize.txt"
grep -q "job $job: from 2 to 4 workers" "$work/resize.txt" || fail "what resize printed"
until_true "$first" up 4
"$maniple" resize "$job" 1 >"$work/resize.txt"
until_true "$first" up 1
if "$maniple" resize "$job" 5 >"$work/resize.txt" 2>&1; then fail "more than --elastic allows"; fi
grep -q "allows 1 to 4" "$work/resize.txt" || fail "why resize refused"
ended "$first" 0
same "a job of 2, 4 and 1 workers" resized

# Nodes come and go.
range=2:4 join=60
umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$work/secret"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
nodes=(--nnodes 1:3 --master "127.0.0.1:$port" --secret-file "$work/secret" -n 2)
arguments=("${arguments[@]:0:4}" --log "$work/nodes")
launch node0 "${nodes[@]}" --node-rank 0
first=$pid
launch node1 "${nodes[@]}" --node-rank 1
second=$pid
until_true "$first" more_rows nodes 0
kill -KILL "$second"
until_true "$first" printed node0 'node 1 (host .*) is lost'
launch node2 "${nodes[@]}"
third=$pid
until_true "$first" printed node0 'joins with 2 workers'
until_true "$first" more_rows nodes "$(rows nodes)"
kill -TERM "$third"
ended "$third" 143
printed node2 'this node has left the job' || fail "the text of the node that left"
ended "$first" 0
same "a node that is killed, and one that joins and leaves" nodes

# Too few workers: the survivors save, and another job continues.
range=3:4 join=1
arguments=("${arguments[@]:0:4}" --log "$work/resumed" --checkpoints "$work/checkpoints")
launch node0 "${nodes[@]}" --node-rank 0
first=$pid
launch node1 "${nodes[@]}" --node-rank 1
second=$pid
until_true "$first" more_rows resumed 0
kill -KILL "$second"
ended "$first" 1
printed node0 'timed out after 1 s: fewer than 3 workers are ready' || fail "the text of the timeout"
step=$(basename "$(find "$work/checkpoints" -maxdepth 1 -name 'step-*' | sort | tail -n 1)")
[[ -n $step ]] || fail "the survivors did not save"
"$maniple" run -n 3 "$program" "${arguments[@]}" >"$work/node0.txt" 2>&1 || fail "the run that continues"
same_weights "a job that ended with too few workers and was continued from $step"

# All workers leave: the training ends with a checkpoint.
range=1:2 join=60
arguments=("${arguments[@]:0:4}" --log "$work/preempted" --checkpoints "$work/preempted-checkpoints")
launch node0 -n 2
first=$pid
until_true "$first" more_rows preempted 0
kill -USR1 "$first"
ended "$first" 0
[[ -n $(find "$work/preempted-checkpoints" -maxdepth 1 -name 'step-*') ]] || fail "no checkpoint after SIGUSR1"
"$maniple" run -n 1 "$program" "${arguments[@]}" >"$work/node0.txt" 2>&1 || fail "the run after SIGUSR1"
same_weights "a job that was ended by SIGUSR1 and continued"
