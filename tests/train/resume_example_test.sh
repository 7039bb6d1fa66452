#!/usr/bin/env bash
# 05_ddp_mnist is killed in the middle of its first epoch and goes on with another number of ranks; then it gets a
# signal to stop, and goes on again, to the end: in all it makes as many steps as without. Usage: ... MANIPLE PROGRAM
set -euo pipefail
maniple=$1
program=$2
scratch=$(mktemp -d)
job=""
finish() {
  [[ -z $job ]] || kill -KILL "$job" 2>/dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT
options=(--data drawn --train-samples 6000 --test-samples 500 --epochs 2 --batch-size 60 --workers 1
         --checkpoint "$scratch/run" --save-every 5)  # 100 steps in an epoch
fail() {
  echo "$1" && cat "$scratch/output" && exit 1
}
newest() { ls "$scratch/run" 2>/dev/null | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -1; }

# start RANKS: in the background, until a checkpoint of step $2 or later is there.
start() {
  "$maniple" run -n "$1" "$program" "${options[@]}" >"$scratch/output" 2>&1 &
  job=$!
  until [[ $(newest) -ge $2 ]]; do
    kill -0 "$job" 2>/dev/null || fail "it ended before step $2:"
    sleep 0.05  # sleep: between two polls
  done
}

start 2 30
kill -KILL "$job"
wait "$job" && fail "it was killed and says that all is well:"
while pgrep -f -- "--checkpoint $scratch/run" >/dev/null; do sleep 0.05; done  # sleep: until its ranks have ended
killed_at=$(newest)
((killed_at < 100)) || fail "it was too quick to be killed in its first epoch:"

start 3 $((killed_at + 10))
kill -TERM "$job"
code=0
wait "$job" || code=$?
((code == 143)) || fail "it got a stop signal and ended with exit code $code:"
grep -q "failed first" "$scratch/output" && fail "it got a stop signal and reports a failure:"
grep -qF "going on after step $killed_at: epoch 0, place $((killed_at * 60)) of 6000, shuffle 1, seed 7" "$scratch/output" ||
  fail "it did not go on after step $killed_at:"
grep -q "epoch 2: .*accuracy" "$scratch/output" && fail "it got a stop signal and went on:"
stopped_at=$(newest)

"$maniple" run -n 1 "$program" "${options[@]}" --target 0.9 >"$scratch/output" 2>&1 || fail "it did not end well:"
grep -q "going on after step $stopped_at:" "$scratch/output" || fail "it did not go on after step $stopped_at:"
grep -q "epoch 2: .*accuracy" "$scratch/output" || fail "it did not reach its end:"
(($(newest) == 200)) || fail "it made $(newest) steps, not 200:"

# Started once more it is at its end already, and does nothing of the last epoch again.
"$maniple" run -n 2 "$program" "${options[@]}" --target 0.9 >"$scratch/output" 2>&1 || fail "it did not end well when it had nothing left to do:"
grep -qF "going on after step 200: epoch 2, place 0 of 6000, shuffle 1, seed 7" "$scratch/output" || fail "it is not at its end:"
grep -q "epoch 2: .*accuracy" "$scratch/output" && fail "it did the end of the last epoch again:"
exit 0
