#!/usr/bin/env bash
# Ranks that Slurm's srun starts find each other. Usage: slurm_test.sh PROGRAM
#
# A whole Slurm of our own, for the time of the test: munged (who signs messages), slurmctld (who gives out nodes) and
# slurmd (the one node), with their files in a temporary directory and free ports of loopback. All of them are ended by
# their pids.
set -euo pipefail
program=$1
scratch=$(mktemp -d)
chmod 755 "$scratch"  # munged insists that its socket can be reached by everyone
. "$(dirname "$0")/expect_ranks.sh"
export PATH=$PATH:/usr/sbin:/sbin
pids=()

# Ends what was started, last first: TERM, and KILL for what stays.
stop_all() {
  local pid i
  for ((i = ${#pids[@]} - 1; i >= 0; --i)); do
    pid=${pids[i]}
    kill "$pid" 2>/dev/null || continue
    for ((wait = 0; wait < 200; ++wait)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.05; done
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  pids=()
}
trap 'stop_all; rm -rf "$scratch"' EXIT

for tool in munged slurmctld slurmd srun sinfo; do
  command -v "$tool" >/dev/null || skip "$tool is not installed (packages munge, slurmctld, slurmd, slurm-client)"
done

free_port() {
  local port
  while port=$((20000 + RANDOM % 10000)); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port"
}

show_logs() {
  local file
  for file in "$scratch"/*.out; do
    echo "---- $(basename "$file")"
    tail -n 30 "$file"
  done
}

# until_true SECONDS COMMAND...
until_true() {
  local until=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < until)) || return 1
    sleep 0.1
  done
}

start() {
  "$@" >"$scratch/$(basename "$1").out" 2>&1 &
  pids+=($!)
}

node_is_idle() { grep -q '^idle' <<<"$(sinfo --noheader --format=%T 2>/dev/null)"; }

user=$(id -un)
mkdir "$scratch/munge" "$scratch/state" "$scratch/spool"
mkdir -m 700 "$scratch/key"
head -c 128 /dev/urandom >"$scratch/key/key"
chmod 600 "$scratch/key/key"
start munged --foreground --force --key-file="$scratch/key/key" --socket="$scratch/munge/socket" \
  --pid-file="$scratch/munge/pid" --seed-file="$scratch/key/seed" --log-file="$scratch/munge/log" --num-threads=4
until_true 60 test -S "$scratch/munge/socket" || { echo "FAILED: munged does not start"; show_logs; exit 1; }

export SLURM_CONF=$scratch/slurm.conf
unset "${!SLURM_@}" 2>/dev/null || true
export SLURM_CONF=$scratch/slurm.conf
# A port may be taken between the look and the start: then another one.
for attempt in 1 2 3; do
  cat >"$SLURM_CONF" <<CONF
ClusterName=manipletest
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
AuthType=auth/munge
AuthInfo=socket=$scratch/munge/socket
CredType=cred/munge
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  start slurmctld -D -f "$SLURM_CONF"
  start slurmd -D -N localhost -f "$SLURM_CONF"
  until_true 60 node_is_idle && break
  echo "attempt $attempt: no node is ready"
  show_logs
  munged_pid=${pids[0]}
  pids=("${pids[@]:1}")
  stop_all
  pids=("$munged_pid")
done
node_is_idle || { echo "FAILED: Slurm does not start"; exit 1; }

expect_ranks 1 srun --ntasks=1 "$program"
expect_ranks 4 srun --ntasks=4 "$program"
# A step with fewer tasks than its job.
expect_ranks 2 salloc --quiet --ntasks=4 srun --ntasks=2 "$program"
((failures == 0)) || show_logs
exit "$failures"
