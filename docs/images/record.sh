#!/usr/bin/env bash
# Makes the pictures of README.md from what the programs really print. Usage: docs/images/record.sh [MNIST FOLDER]
# Needs tmux, root (for a host name of its own), and the release build with its examples. Without a folder the digits
# are drawn.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PWD/build/bin:$PATH OMP_NUM_THREADS=1
columns=112
data=${1:-drawn}
work=$(mktemp -d)
server=""
trap 'tmux -L "$server" kill-server 2>/dev/null || true; rm -rf "$work"' EXIT
ln -s "$PWD/build/bin/examples/05_ddp_mnist" "$work/train"
[[ $data == drawn ]] || ln -s "$(realpath "$data")" "$work/mnist"
[[ $data == drawn ]] || data=mnist

# record NAME SHOWN COMMAND: the screen after COMMAND has ended on a terminal, below the line SHOWN that a user would
# type.
record() {
  server=maniple-record-$1-$$  # one server per picture: a server that is ending refuses new sessions
  tmux -L $server -f /dev/null new-session -d -x $columns -y 40 -c "$work" \
    "unshare --uts sh -c 'hostname node1; printf \"\\033[1m\$ %s\\033[0m\\n\" \"$2\"; $3; tmux -L $server wait-for -S done; sleep 60'"
  tmux -L $server wait-for done
  tmux -L $server capture-pane -p -e -N | sed -e 's/[ \t]*$//' | awk 'NF { for (; blank; --blank) print ""; print; next } { ++blank }' |
    awk -v columns=$columns -f docs/images/terminal.awk >"docs/images/$1.svg"
  tmux -L $server kill-server
}

# Stops rank 1 of the training (SIGSTOP), as if it hung, in the middle of its epoch.
cat >"$work/stop_rank_1" <<'SCRIPT'
sleep 8
for pid in $(pgrep -x train); do
  if [ "$(readlink "/proc/$pid/cwd")" = "$PWD" ] && grep -qzx RANK=1 "/proc/$pid/environ"; then kill -STOP "$pid"; fi
done
SCRIPT
command="./train --data $data --epochs 1"
record training "maniple run -n 2 $command" "maniple run -n 2 $command"
record failure "maniple run -n 4 $command" "sh stop_rank_1 & maniple run -n 4 $command"
