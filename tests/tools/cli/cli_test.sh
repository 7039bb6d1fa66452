#!/bin/sh
# The program as a user sees it: help, tables, refusals, and one real measurement that leaves nothing behind.
# Usage: cli_test.sh MANIPLE VERSION_H
maniple=$1
failures=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# expect CODE PATTERN ARGUMENTS...: the exit code, and a pattern in what it prints
expect() {
  code=$1 pattern=$2
  shift 2
  output=$(TMPDIR=$scratch "$maniple" "$@" 2>&1)
  got=$?
  if [ "$got" != "$code" ] || ! printf '%s' "$output" | grep -q -e "$pattern"; then
    echo "FAILED: maniple $*: expected exit $code and \"$pattern\", got exit $got and:"
    printf '%s\n' "$output"
    failures=$((failures + 1))
  fi
}

expect 0 'bench' --help
expect 0 'bench' # no arguments: help
version=$(sed -nE 's/^#define MANIPLE_VERSION_STRING "(.*)".*/\1/p' "$2")
expect 0 "^maniple $version\$" version
expect 0 "^maniple $version\$" --version
expect 0 'MANIPLE_TRANSPORT  *auto  *auto, loopback, shm, tcp  *overrides the transport' knobs
expect 0 'MANIPLE_STAGE_KIB  *0  *0 or 16 to 1048576' knobs
expect 2 'no command "frobnicate"' frobnicate
expect 2 'not expected: --frobnicate' bench --frobnicate
expect 2 'no operation given' bench
export MANIPLE_TCP_STREAMS=17
expect 2 'MANIPLE_TCP_STREAMS is "17"; expected a whole number from 1 to 16' bench all_reduce
unset MANIPLE_TCP_STREAMS
export MANIPLE_STAGE_KB=1
expect 0 'MANIPLE_STAGE_KB is not known; did you mean MANIPLE_STAGE_KIB?' knobs
unset MANIPLE_STAGE_KB
expect 2 'unknown operation "all_redoos"' bench all_redoos
expect 2 '^maniple: --sizes is "12Q"; expected bytes such as 4, 64K' bench all_reduce --sizes 12Q
expect 2 '^maniple: --ranks is "2,two"; expected numbers such as 2,4$' bench all_reduce --ranks 2,two
expect 2 'no system is named "nosuch"' bench all_reduce --systems nosuch
expect 2 'expected some of .*send; or all' bench all_redoos
expect 2 'allocate is not measured by itself' bench allocate
expect 2 '^maniple: --hosts is "0"; expected a whole number, at least 1$' bench all_reduce --hosts 0
expect 2 '^maniple: --busy is "-1"; expected a whole number from 0 to 256$' bench all_reduce --busy -1
expect 2 'busy is for operations such as all_reduce; .optim. is measured without it' bench optim --busy 2
expect 2 'transport shm does not leave a host' bench all_reduce --hosts 2 --transport shm
expect 2 '^maniple: --iterations is "-1"; expected a whole number, at least 0$' bench all_reduce --iterations -1
expect 2 '^maniple: --repeat is "0"; expected a whole number, at least 1$' bench all_reduce --repeat 0
expect 2 '^maniple: --warmup is "-5"; expected a whole number, at least -1$' bench all_reduce --warmup -5
expect 2 '^maniple: --budget is "0"; expected a number, at least 0.001$' bench all_reduce --budget 0
expect 1 'write /nonexistent/out.json: No such file' bench all_reduce --json /nonexistent/out.json
for option in --nproc --nprocs --nproc=2 --np=2 -c -p --ntasks --num_processes; do
  expect 2 "no option $option: use -n N for the number of processes" run $option 2 true
done
expect 0 'fine' run -np 1 echo fine
expect 0 'fine' run --np 1 echo fine
expect 0 'fine' run --nproc_per_node 1 echo fine
expect 2 '^maniple: -n needs a value: -n N, then the program$' run -n
expect 2 '^maniple: -n is "true"; expected a number of processes .*; if that is the program, the number is missing: -n 2 true$' run -n true
expect 2 '^maniple: -n is "0"; expected a number of processes from 1 to 16384, auto, gpu or cpu$' run -n 0 true
expect 2 '^maniple: --hosts needs a value: --hosts a:4,b:4, then the program$' run --hosts
# One form, by the name that was typed.
expect 2 '^maniple: --nproc_per_node is "x1"; expected a number of processes' run --nproc_per_node=x1 true
expect 2 '^maniple: -np is "two"; expected a number of processes' run -np two true
expect 2 '^maniple: -n is "0x"; expected a number of processes' run -n0x true
expect 2 '^maniple: -n needs a value: -n N, then the program$' run -n --bind cores true
expect 2 '^maniple: --rdzv_endpoint is "a:x"; expected HOST:PORT' run --rdzv_endpoint a:x true
expect 2 '^maniple: --master_port is "x"; expected a whole number from 0 to 65535$' run --master_port x true
expect 2 '^maniple: --grace is "soon"; expected a number of seconds$' run --grace soon true
expect 2 '^maniple: --color is "blue"; expected auto, always or never$' run --color=blue true
expect 2 '^maniple: --ranks needs a value: --ranks TEXT$' bench all_reduce --ranks
expect 2 '^maniple: --iterations is "many"; expected a whole number, at least 0$' bench all_reduce --iterations many
expect 2 '^maniple: --step is "last"; expected a whole number, at least 0$' checkpoint ls "$scratch" --step last
expect 2 '^maniple: --step needs a value: --step INT$' checkpoint ls "$scratch" --step
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0
expect 0 '^maniple: mpirun has started 2 launchers' run -n 1 true
expect 2 'needs --master' run --nnodes 2 -n 1 true
unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK
# Columns fit what is in them, whatever it is.
mkdir -p "$scratch/checkpoints/step-1000000000000000000"
aligned=$("$maniple" checkpoint ls "$scratch/checkpoints" |
  awk 'NR == 1 { head = index($0, "STATE") } NR == 2 { row = index($0, "cannot open") } END { print (head > 0 && head == row) }')
[ "$aligned" = 1 ] || { echo "FAILED: checkpoint ls: the columns are not aligned"; failures=$((failures + 1)); }
rm -r "$scratch/checkpoints"
mkdir "$scratch/checkpoints"
expect 2 'subcommand is required' checkpoint
expect 2 'there is no checkpoint in .*/checkpoints; expected folders like step-' checkpoint ls "$scratch/checkpoints"
expect 2 'there is no checkpoint in' checkpoint verify /nonexistent
expect 2 'OUT is required' checkpoint merge "$scratch/checkpoints"
expect 2 '^maniple: RANKS is "0"; expected a whole number from 1 to [0-9]*$' checkpoint split "$scratch/checkpoints" "$scratch/out" 0
rmdir "$scratch/checkpoints"
expect 0 'all_reduce' bench --list
expect 0 'with 1 busy process$' bench all_reduce --ranks 2 --sizes 4 --budget 5 --busy 1
expect 0 'native *shm' bench all_reduce --ranks 2 --sizes 4,64K --budget 5 --json "$scratch/out.json" --csv "$scratch/out.csv"
expect 0 'native *loopback' bench all_reduce --ranks 3 --sizes 4K --budget 5 --transport loopback
expect 0 'all_reduce cuda, 2 ranks, MPS' bench gpu --list
expect 2 'no measurement.s name contains' bench gpu --only frobnicate
export CUDA_VISIBLE_DEVICES=
expect 2 'bench gpu: there is no NVIDIA GPU here' bench gpu
unset CUDA_VISIBLE_DEVICES
for file in out.json out.csv; do
  [ -s "$scratch/$file" ] || { echo "FAILED: $file was not written"; failures=$((failures + 1)); }
done
rm -f "$scratch/out.json" "$scratch/out.csv"
[ -z "$(ls -A "$scratch")" ] || { echo "FAILED: left behind: $(ls -A "$scratch")"; failures=$((failures + 1)); }
exit "$failures"
