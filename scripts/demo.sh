#!/usr/bin/env bash
# Shows Maniple's main use on a fresh Debian machine: installs missing packages, builds, and trains a network on MNIST
# with two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "demo: building"
cmake --preset release --log-level=WARNING
cmake --build --preset release --target examples maniple

# launch RANKS PROGRAM [ARGUMENTS]
launch() { build/bin/maniple run -n "$1" "${@:2}"; }
title() { printf '\n==== %s\n' "$1"; }

examples=build/bin/examples
if [[ ! -x $examples/05_ddp_mnist ]]; then
  echo "demo: LibTorch was not found, so there is no training; this is communication alone"
  title "every collective: what each rank held before -> and after"
  launch 4 $examples/comm/02_collectives
  exit 0
fi

title "a tensor goes from rank 0 to rank 1"
launch 2 $examples/02_send_recv

title "two ranks learn MNIST"
fetched=0
scripts/fetch_mnist.sh data/mnist || fetched=$?
export OMP_NUM_THREADS=1
case $fetched in
  0) launch 2 $examples/05_ddp_mnist --data data/mnist --epochs 2 --target 0.97 ;;
  3)
    echo "demo: NOT MNIST: without the files, the program draws digits by itself, which are much easier to learn"
    launch 2 $examples/05_ddp_mnist --data drawn --epochs 2 --target 0.97
    ;;
  *) exit "$fetched" ;;
esac

title "a rank dies; the others report it and their last operations"
launch 3 $examples/comm/06_lost_rank

title "go on with"
cat <<'TEXT'
  README.md                                                  a data-parallel program in 20 lines
  docs/coming_from_pytorch.md                                the same, line by line beside Python
  examples/05_ddp_mnist.cpp                                  what ran just now
  build/bin/examples/03_collectives                          every collective as a picture; start it with 4 ranks
  build/bin/maniple run -n 2 build/bin/examples/07_gpt       a small GPT learns a text, and writes some of its own
  cmake --build --preset release && build/bin/maniple bench all_reduce --ranks 2
TEXT
