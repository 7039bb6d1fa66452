#!/usr/bin/env bash
# Faults in an elastic job: every run ends with the weights and the log of the undisturbed run, or with one clear
# message. The program is elastic_program.cpp. Usage: elastic_faults_test.sh MANIPLE PROGRAM CASE ..., where "long" is
# the cases that take longer, and "fault" the others.
set -euo pipefail
maniple=$1 program=$2
shift 2
work=$(mktemp -d)
trap '[[ -z $job ]] || kill "$job" 2>/dev/null || true; rm -rf "$work"' EXIT
job= name= status=0

fail() {
  echo "$name: $1" >&2
  [[ ! -e $work/$name.out ]] || tail -n 40 "$work/$name.out" >&2
  exit 1
}
# run RANKS RANGE [OPTION ...]: a job in the background; `finish` waits for it.
start() {
  mkdir -p "$work/$name"
  "$maniple" run --verbose -n "$1" --elastic "$2" ${launcher[@]+"${launcher[@]}"} "$program" "$work/$name" "${@:3}" \
    >"$work/$name.out" 2>&1 &
  job=$!
}
finish() {
  status=0
  wait "$job" || status=$?
  job=
  # The program's argument marks its processes.
  if pgrep -f "elastic_program $work/$name( |\$)" >/dev/null; then fail "a process is left"; fi
  [[ -z $(find "$work/$name" -name '*.replaced*' -o -name '.pending*') ]] || fail "a pending checkpoint is left"
}
run() { start "$@" && finish; }
launcher=()
pid_of() { sed -n "s/^maniple: rank $1 is pid \([0-9]*\).*/\1/p" "$work/$name.out" | tail -n 1; }
# until_true COMMAND: polls while the job runs.
until_true() {
  until "$@"; do
    kill -0 "$job" 2>/dev/null || fail "the job has ended early"
    sleep 0.05
  done
}
shows() { grep -q -- "$1" "$work/$name.out"; }
has_file() { [[ -e $work/$name/$1 ]]; }
times() { grep -c -- "$1" "$work/$name.out" || true; }
# expect TEXT [TIMES]
expect() { shows "$1" || fail "\"$1\" is not in the output"; }
expect_code() { ((status == $1)) || fail "exit code $status, expected $1"; }
weights_of() { sed -n 's/.*, weights \([0-9a-f]*\)$/\1/p' "$work/$1.out" | sort -u; }
# Without seconds; a job that was killed as a whole and started again has written some rows twice.
log_of() { sed 's/"seconds":[^,]*,//' "$work/$1/log.jsonl" | grep -v '"kind":"resumed"' | awk '!seen[$0]++'; }
# same_as NAME: like that run, which was not disturbed.
same_as() {
  expect_code 0
  [[ $(weights_of "$name") == "$(weights_of "$1")" ]] || fail "other weights than without faults: $(weights_of "$name")"
  diff <(log_of "$1") <(log_of "$name") >&2 || fail "another log than without faults"
}
# undisturbed NAME [OPTION ...]: a run to compare with, made once.
undisturbed() {
  local caller=$name
  name=$1
  if [[ ! -e $work/$name.out ]]; then
    mkdir "$work/$name"
    "$maniple" run -n 2 "$program" "$work/$name" "${@:2}" >"$work/$name.out" 2>&1 || fail "the undisturbed run"
    [[ $(weights_of "$name") =~ ^[0-9a-f]{16}$ ]] || fail "no weights were printed, or different ones"
  fi
  name=$caller
}
bare() { undisturbed plain; }

# --- more workers than virtual ranks; data that the virtual ranks do not divide

surplus() {
  bare
  run 6 1:6
  same_as plain
  (($(times 'this process leaves the job') == 2)) || fail "2 surplus workers expected to leave"
  (($(times 'worker [0-9] is replaced') == 0)) || fail "a worker was replaced"
}
uneven_data() {
  undisturbed uneven --samples 349 --virtual-ranks 3
  run 3 1:3 --samples 349 --virtual-ranks 3 --fault kill:loss:13:1 --fault kill:loss:14:0
  same_as uneven
}

# --- replacements that differ

# refused TEXT OPTION VALUE: the replacement of worker 1 has that option and ends with that text; the others go on.
refused() {
  bare
  run 2 1:2 --fault kill:loss:4:1 --fault next:step:6:0 "--again-$2" "$3"
  expect "$1"
  same_as plain
}
another_width() { refused 'parameter 0.weight: .* \[16, 1, 5, 5\]' width 16; }
another_option() { refused 'max_grad_norm 5, and this rank max_grad_norm 1' clip 1; }
another_optimizer() { refused 'optimizer' optimizer sgd; }
another_count() { refused 'virtual_ranks 4, and this rank virtual_ranks 8' virtual-ranks 8; }
other_threads() { refused 'virtual_threads 1, and this rank virtual_threads 2' virtual-threads 2; }
other_data() { refused 'training data of 360 samples.* of 320 samples' samples 320; }
other_test_data() { refused 'evaluation data of 50 samples.* of 40 samples' test-samples 40; }
other_epochs() { refused 'epochs 2, and this rank epochs 1' epochs 1; }
# The seed is part of the state.
another_seed() {
  bare
  run 2 1:2 --fault kill:loss:4:1 --fault next:step:6:0 --again-seed 5
  same_as plain
}
given_up() {
  bare
  local waits=() step
  for step in 6 7 8 9; do waits+=(--fault "next:step:$step:0"); done
  run 2 1:2 --fault kill:loss:4:1 --again-width 16 "${waits[@]}"
  same_as plain
  expect 'has failed 5 times in a row; it is not replaced'
  (($(times 'rank 1 is pid') == 5)) || fail "5 starts of worker 1 expected"
}

# --- deaths

joined=(--fault next:step:6:all)  # the survivors wait for the replacement
two_in_one_step() { bare; run 3 1:3 --fault kill:loss:5:0,2 "${joined[@]}"; same_as plain; }
all_but_one() { bare; run 4 1:4 --fault kill:loss:5:0,1,2 "${joined[@]}"; same_as plain; }
everyone() { undisturbed saved --checkpoints 1; run 3 1:3 --checkpoints 1 --fault kill:loss:15:all; same_as saved; }
everyone_before_the_first_step() { bare; run 3 1:3 --fault kill:loss:0:all --again-seed 1; same_as plain; }
before_fit() { bare; run 3 1:3 --fault kill:made:-1:1; same_as plain; }
giver() { bare; run 3 1:3 --fault kill:loss:5:2 "${joined[@]}" --fault kill:saving:-1:0; same_as plain; }
receiver() { bare; run 3 1:3 --fault kill:loss:5:2 "${joined[@]}" --fault kill:loading:-1:2:1; same_as plain; }
forming() { bare; run 3 1:3 --fault kill:loss:5:2 "${joined[@]}" --fault kill:forming:2:1 --fault kill:forming:3:0; same_as plain; }
forming_again() {
  bare
  run 3 1:3 --fault kill:loss:5:2 "${joined[@]}" --fault kill:forming:3:2:1 --fault kill:forming:4:1
  same_as plain
}
in_evaluation() { bare; run 3 1:3 --fault kill:evaluation:12:1 --fault kill:evaluation:24:0; same_as plain; }
at_the_end() { bare; run 3 1:3 --fault kill:step:12:1 --fault next:step:14:all --fault kill:loss:23:2 --fault kill:step:24:1:1; same_as plain; }
after_fit() { bare; run 3 1:3 --fault kill:returned:24:1; same_as plain; }
while_saving() {
  undisturbed saved --checkpoints 1
  run 3 1:3 --checkpoints 1 --fault kill:saving:12:0 --fault kill:saving:24:1
  same_as saved
  [[ $(ls "$work/saved/checkpoints") == "$(ls "$work/$name/checkpoints")" ]] || fail "other checkpoints"
}

# --- hangs

hangs_at_start() { bare; run 3 1:3 --fault kill:loss:5:2 --fault hang:main:-1:2:1; same_as plain; }
stops_in_transfer() {
  bare
  run 3 1:3 --timeout 4 --fault kill:loss:5:2 "${joined[@]}" --fault stop:loading:-1:2:1 --fault stop:saving:-1:0
  same_as plain
}
stops_while_forming() {
  bare
  run 3 1:3 --timeout 4 --fault kill:loss:5:2 --fault stop:forming:2:1
  expect 'worker 1 is replaced'
  same_as plain
}

# --- errors of the program

throws_on_one() { bare; run 2 1:2 --fault throw:loss:5:1 "${joined[@]}"; same_as plain; expect 'the fault of the test'; }
throws_again_and_again() {
  bare
  local waits=() step
  for step in 1 2 3 4; do waits+=(--fault "next:step:$step:0"); done
  run 2 1:2 --fault throw:loss:-1:1:-1 "${waits[@]}"
  same_as plain
  expect 'has failed 5 times in a row; it is not replaced'
}
throws_on_all() {
  run 2 1:2 --fault throw:loss:5:all:-1
  expect_code 3
  expect 'the fault of the test'
  (($(times 'is pid') <= 10)) || fail "more than 5 starts of each worker"
}

# --- signals

two_leave() { bare; run 4 1:4 --fault term:loss:5:0,2; same_as plain; (($(times 'leaves the job$') == 2)) || fail "two leave"; }
last_leaves() {
  undisturbed saved --checkpoints 1
  run 1 1:1 --checkpoints 1 --fault term:loss:14:0
  expect_code 0
  expect 'stopped after 15 steps'
  run 2 1:2 --checkpoints 1
  same_as saved
}
all_leave() {
  undisturbed saved --checkpoints 1
  run 2 1:2 --checkpoints 1 --fault term:loss:14:all
  expect_code 0
  expect 'stopped after 15 steps'
  run 3 1:3 --checkpoints 1
  same_as saved
}
killed_while_leaving() { bare; run 3 1:3 --fault term_kill:loss:5:0 "${joined[@]}"; same_as plain; }
below_the_minimum() {
  launcher=(--join-timeout 2)
  run 2 2:2 --fault kill:loss:5:1 --fault hang:main:-1:1:1
  launcher=()
  expect 'fewer than 2 workers are ready'
  ((status != 0)) || fail "exit code 0"
}
interrupted_below_the_minimum() {
  start 2 2:2 --fault kill:loss:5:1 --fault hang:main:-1:1:1
  until_true shows 'waiting for replacements'
  until_true has_file fault.1.1
  local began=$SECONDS
  kill -TERM "$job"
  finish
  expect_code 143
  # Worker 1 sleeps until SIGTERM; worker 0 does not sleep through the 30 s of --grace-interrupt.
  ((SECONDS - began < 20)) || fail "the end took $((SECONDS - began)) s"
}

# --- more parts of the Trainer

early_stopping() {
  local options=(--patience 1 --evaluate-every 1 --checkpoints 1 --epochs 4 --learning-rate 0.02)
  undisturbed early "${options[@]}"
  run 3 1:3 "${options[@]}" --fault kill:evaluation:4:0 --fault kill:loss:5:1
  same_as early
  (($(times ': 48 steps') == 0)) || fail "the training was not stopped early"
  [[ $(ls "$work/early/checkpoints/best") == "$(ls "$work/$name/checkpoints/best")" ]] || fail "another best step"
  cmp "$work"/early/checkpoints/best/*/model.safetensors "$work/$name"/checkpoints/best/*/model.safetensors || fail "another best model"
}
another_size_after_a_kill() {
  undisturbed saved_often --checkpoints 1 --save-every 5
  start 3 1:3 --checkpoints 1 --save-every 5 --fault kill:loss:7:1 --fault stop:step:17:0
  until_true has_file fault.1.0
  kill -KILL "$job"
  wait "$job" || true
  run 2 1:2 --checkpoints 1 --save-every 5 --fault kill:loss:20:0
  same_as saved_often
  (($(find "$work/$name/checkpoints" -name '*aside*' | wc -l) == 0)) || fail "a checkpoint was set aside"
}

ordinary=(surplus uneven_data another_width another_option another_optimizer other_data another_seed two_in_one_step
  all_but_one everyone before_fit giver receiver forming forming_again in_evaluation at_the_end after_fit while_saving
  throws_on_one two_leave last_leaves all_leave killed_while_leaving early_stopping another_size_after_a_kill)
long=(another_count other_threads other_test_data other_epochs given_up everyone_before_the_first_step hangs_at_start
  stops_in_transfer stops_while_forming throws_again_and_again throws_on_all below_the_minimum
  interrupted_below_the_minimum)
cases=("$@")
[[ ${cases[0]} != fault ]] || cases=("${ordinary[@]}")
[[ ${cases[0]} != long ]] || cases=("${long[@]}")
for name in "${cases[@]}"; do
  began=$SECONDS
  "$name"
  echo "$name: as expected ($((SECONDS - began)) s)"
done
