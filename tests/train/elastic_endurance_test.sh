#!/usr/bin/env bash
# Random workers of an elastic job of 8 are killed or stopped; before, rank 0 dies between the end of a step and the
# writing of its row. The weights and the log equal the weights and the log of an undisturbed run, and in each epoch
# every sample is in exactly one committed step. Prints the throughput compared with the undisturbed run.
# Usage: elastic_endurance_test.sh MANIPLE PROGRAM FAULTS EPOCHS [SEED]
set -euo pipefail
maniple=$1 program=$2 faults=$3 epochs=$4
RANDOM=${5:-1}  # the seed of $RANDOM
samples=4096 batch=16 ranks=8
steps=$((epochs * samples / batch / ranks))
work=$(mktemp -d)
job=
trap '[[ -z $job ]] || kill "$job" 2>/dev/null || true; rm -rf "$work"' EXIT

fail() {
  echo "$1" >&2
  [[ ! -e $work/output ]] || tail -n 60 "$work/output" >&2
  exit 1
}
# start NAME "OPTION..." ARGUMENT...: a job in the background. Its files are in the folder NAME.
start() {
  folder=$work/$1
  mkdir "$folder"
  # shellcheck disable=SC2086 # several options
  "$maniple" run -n $ranks $2 "$program" "$folder" $samples "$epochs" "${@:3}" >"$work/output" 2>&1 &
  job=$!
}
finish() {
  local status=0
  wait "$job" || status=$?
  job=
  ((status == 0)) || fail "the job has failed with $status"
  check
}
# Prints the recorded lines of one kind.
records() { awk -v kind="$1" '$1 == kind && $NF == "."' "$folder"/records.*; }
# Every sample is in exactly one committed step of each epoch. Batches that several processes have recorded must agree.
check() {
  local committed
  committed=$(records step | cut -d' ' -f2 | sort -un | tee "$work/steps" | tail -n 1)
  ((committed == steps && $(wc -l <"$work/steps") == steps)) || fail "the last of $steps steps was $committed"
  records batch | sort -u | sort -s -k3,3n | awk -v samples=$samples -v steps=$steps -v epochs="$epochs" '
    function wrong(text) { print text; bad = 1 }
    function end_epoch() {
      if (count != samples) wrong("epoch " epoch " used " count " samples")
      split("", used)
      count = 0
      ++ended
    }
    NR > 1 && $3 != epoch { end_epoch() }
    {
      epoch = $3
      if ($2 < 1 || $2 > steps) wrong("step " $2 " was not committed")
      if (($2, $4) in batches) wrong("step " $2 ": virtual rank " $4 " had two different batches")
      batches[$2, $4]
      for (i = 5; i < NF; ++i) {
        if ($i in used) wrong("epoch " epoch ": sample " $i " is in two batches")
        used[$i]
        ++count
      }
    }
    END {
      end_epoch()
      if (ended != epochs) wrong(ended " epochs")
      exit bad
    }' >"$work/wrong" || fail "$(head -n 20 "$work/wrong")"
}
# Prints the number of committed steps per second and the mean number of ranks.
speed() {
  records step | awk '
    !($2 in steps) { steps[$2]; ++count; ranks += $3 }
    first == "" || $4 < first { first = $4 }
    $4 > last { last = $4 }
    END { printf "%.3f %.2f\n", (count - 1) / (last - first), ranks / count }'
}

runs() { [[ /proc/$1/exe -ef $program ]]; }
# Prints the workers that have trained. (A replacement has no records before it has joined.)
workers() {
  local file
  for file in "$folder"/records.*; do
    if [[ -s $file ]] && runs "${file##*.}"; then echo "${file##*.}"; fi
  done
}
# The latest step of which a worker has recorded anything.
step_now() { tail -qn 1 "$folder"/records.* 2>/dev/null | awk '$2 > step { step = $2 } END { print step + 0 }'; }
# await_step STEP: fails if the job ends before.
await_step() {
  until (($(step_now) >= $1)); do
    kill -0 "$job" 2>/dev/null || fail "the job has ended before step $1"
    sleep 0.1  # sleep: between two polls
  done
}
# A stopped worker goes on after 5 seconds, unless the launcher has replaced it before.
stop() {
  local end=$((SECONDS + 5))
  kill -STOP "$1"
  while runs "$1" && ((SECONDS < end)); do sleep 0.1; done  # sleep: between two polls
  kill -CONT "$1" 2>/dev/null || true
}

start undisturbed ""
finish
read -r full _ < <(speed)

start disturbed "--elastic 1:$ranks" 10
killed=1
for ((fault = 1; fault <= faults; ++fault)); do
  await_step $((steps * fault / (faults + 1) + 1))
  mapfile -t alive < <(workers)
  victim=${alive[RANDOM % ${#alive[@]}]}
  if ((RANDOM % 3 == 0)); then
    stop "$victim"
  else
    kill -KILL "$victim" && ((++killed))
  fi
done
finish
(($(grep -c 'is replaced' "$work/output") >= killed)) || fail "fewer than $killed workers were replaced"
cmp "$work/undisturbed/weights.safetensors" "$work/disturbed/weights.safetensors" || fail "other weights"
log() { sed 's/"seconds":[^,]*,//' "$work/$1/log.jsonl"; }
cmp <(log undisturbed) <(log disturbed) || fail "another log"
read -r disturbed mean < <(speed)
awk -v full="$full" -v disturbed="$disturbed" -v mean="$mean" -v steps=$steps -v faults="$faults" -v killed=$killed 'BEGIN {
  printf "%d steps, %d kills and %d stops of workers: the same weights, log and samples\n", steps, killed, faults + 1 - killed
  printf "%.2f steps a second, %.1f %% of %.2f without faults; %.2f ranks on average\n", disturbed, 100 * disturbed / full, full, mean
}'
