#!/usr/bin/env bash
# 08_spawn on one "machine" and on two, and on from its checkpoint with another number of processes. Usage: ... PROGRAM
set -euo pipefail
program=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# expect TEXT: it is in the output of the latest run.
expect() {
  grep -qF -- "$1" "$scratch/output" || { echo "expected \"$1\" in:" && cat "$scratch/output" && exit 1; }
}
refuse() {
  ! grep -qF -- "$1" "$scratch/output" || { echo "did not expect \"$1\" in:" && cat "$scratch/output" && exit 1; }
}

"$program" --nprocs 2 --epochs 1 --resume "$scratch/run" >"$scratch/output"
expect "world size 2 = 1 nodes x 2 processes; each: batch size 48, 1 workers"
expect "epoch 1: loss"
expect "over 2000 samples"
refuse "resumed"

"$program" --nprocs 3 --epochs 2 --workers 4 --resume "$scratch/run" >"$scratch/output"
expect "world size 3 = 1 nodes x 3 processes; each: batch size 32, 2 workers"
expect "resumed from step 1: epoch 1, place 0 of 2000, shuffle 1, seed 7"
expect "epoch 2: loss"
refuse "epoch 1: loss"

# Two nodes of two processes each, on this machine: their rendezvous is a file that the URL names, and hold the same
# secret.
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$scratch/secret")
node() {
  MANIPLE_SECRET_FILE="$scratch/secret" MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
    "$program" --nodes 2 --node-rank "$1" --nprocs 2 --epochs 1 --dist-url "file://$scratch/rendezvous"
}
node 1 >"$scratch/other" 2>&1 &
other=$!
node 0 >"$scratch/output" || { cat "$scratch/other" && exit 1; }
wait "$other" || { cat "$scratch/other" && exit 1; }
expect "world size 4 = 2 nodes x 2 processes; each: batch size 24, 1 workers"
expect "epoch 1: loss"

# Mistakes end it with one line.
if "$program" --nprocs 0 >"$scratch/output" 2>&1; then echo "0 processes were started" && exit 1; fi
expect "spawn: nprocs is 0"
if "$program" --batch-size 7 >"$scratch/output" 2>&1; then echo "7 samples were divided by 2" && exit 1; fi
expect "a batch of 7 is not a multiple of 2 processes"
if "$program" --epochs many >"$scratch/output" 2>&1; then echo "many epochs" && exit 1; fi
expect '--epochs is "many"; expected a number'
