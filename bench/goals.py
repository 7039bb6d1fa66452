#!/usr/bin/env python3
"""What the project wants of its own speed (the table in docs/benchmarks.md), checked against results of `maniple bench --json`.

    bench/goals.py --measure FOLDER [MANIPLE]    # runs the measurements as root, about ten minutes, and checks them
    bench/goals.py FILE.json...                  # checks what was measured before

Prints one line for each goal: reached, MISSED or not measured. The exit code is 1 if one was missed.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Tuple

KIB, MIB = 1024, 1024 * 1024
CORES = len(os.sched_getaffinity(0))

# One `maniple bench` each. The cost of the checks comes first and many times over: where the pages of a run happen to
# lie moves a small operation by a tenth of a microsecond.
RUNS = [
    "all_reduce --systems native,bare --buffer registered --sizes 4,64K --repeat 21 --no-limit",
    "all_reduce --peers --sizes 4,64,1K",
    "all_reduce --peers --sizes 64K,256K,1M,16M,64M,256M",
    "all_reduce --peers --ranks 4 --sizes 4,64K,1M,16M,64M,256M",
    "all_reduce --peers --ranks 8 --sizes 4,1M",
    "all_reduce --peers --hosts 2 --sizes 4,64K,1M,4M,16M,64M,256M",
    "all_reduce --peers --hosts 2 --link 1gbit --sizes 64M",
    "all_reduce --systems native,openmpi --buffer ordinary --busy 2 --iterations 1500 --sizes 64K,256K,512K,4M",
    f"all --systems native,openmpi --ranks {','.join(str(n) for n in (2, 4, 8) if n <= max(2, CORES))} --sizes 8,64K,1M,16M --repeat 3",
    "ddp --repeat 3",
    *(f"ddp --ranks {n} --models mlp25m --repeat 3" for n in (4, 8) if n <= CORES // 2),
]


@dataclass
class Goal:
    """The worst row of `op` with this many ranks and bytes, compared with another system's row, must be within the bound."""
    text: str
    # time: at most the bound times the other's; speed: at least; extra: at most that much more (us); wire: share of the
    # link.
    relation: str
    bound: float
    beside: str  # a backend; "best": the fastest peer
    ranks: Tuple[int, ...] = (2,)
    low: int = 4
    high: int = 4
    buffer: str = ""  # the worse of both
    hosts: int = 1
    link: str = ""
    busy: int = 0
    op: str = "all_reduce"
    field: str = "median_us"

    @property
    def at_most(self):
        return self.relation in ("time", "extra")


GOALS = [
    Goal("2 ranks, 4 B to 1 KiB: time by Open MPI's", "time", 1, "openmpi", high=KIB),
    Goal("2 ranks, 64 KiB to 256 MiB, registered: speed against Open MPI", "speed", 5, "openmpi", (2,), 64 * KIB, 256 * MIB, "registered"),
    Goal("2 ranks, 64 KiB to 256 MiB, registered: speed against the limit", "speed", 0.7, "limit", (2,), 64 * KIB, 256 * MIB, "registered"),
    Goal("2 ranks, 1 MiB to 256 MiB, ordinary: speed against Open MPI", "speed", 1.8, "openmpi", (2,), MIB, 256 * MIB, "ordinary"),
    Goal("4 ranks, 1 MiB to 256 MiB, registered: speed against Open MPI", "speed", 4, "openmpi", (4,), MIB, 256 * MIB, "registered"),
    Goal("4 and 8 ranks, 4 B: time by Open MPI's", "time", 2, "openmpi", (4, 8)),
    Goal("2 hosts, 4 B to 256 MiB: speed against the best peer", "speed", 1, "best", high=256 * MIB, hosts=2),
    Goal("2 hosts, 16 MiB to 256 MiB: speed against the best peer", "speed", 1.3, "best", (2,), 16 * MIB, 256 * MIB, hosts=2),
    Goal("2 hosts, links of 1 Gbit/s, 64 MiB: share of what the wire carries", "wire", 0.93, "", (2,), 64 * MIB, 64 * MIB, hosts=2, link="1gbit"),
    Goal("2 busy processes, 64 KiB to 4 MiB: speed against Open MPI", "speed", 1, "openmpi", (2,), 64 * KIB, 4 * MIB, busy=2),
    Goal("the same, 99th percentile", "speed", 1, "openmpi", (2,), 64 * KIB, 4 * MIB, busy=2, field="p99_us"),
    Goal("checks, recorder and heartbeat at 64 KiB: time by that without", "time", 1.01, "bare", (2,), 64 * KIB, 64 * KIB, "registered"),
    Goal("checks, recorder and heartbeat at 4 B: us more than without", "extra", 0.06, "bare", buffer="registered"),
]
for operation in ("broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "send"):
    for count in (2, 4, 8):
        GOALS.append(Goal(f"{operation}, {count} ranks, 8 B to 16 MiB: speed against Open MPI", "speed", 1, "openmpi", (count,), 8, 16 * MIB,
                          op=operation))

# Of DDP, by ranks: the step without averaging by the step with it.
EFFICIENCIES = {2: {"mnist_cnn": 0.95, "mlp25m": 0.95, "gpt5m": 0.97, "tiny50": 0.85}, 4: {"mlp25m": 0.95}, 8: {"mlp25m": 0.95}}
MANY = 256  # ranks
MANY_START_S = 1.5

# Bytes a second at 1 Gbit/s: payload of a full segment by the frame that the shaper counts.
WIRE = 1e9 / 8 * 1448 / 1514
PEERS = ("openmpi", "mpich", "gloo")


def rival_of(ours, goal, rows):
    """The row to compare with: of the same buffer where the other system has both kinds."""
    same_file = "file" if goal.beside == "bare" else "op"
    found = [row for row in rows
             if row["backend"] in (PEERS if goal.beside == "best" else (goal.beside,))
             and all(row.get(key) == ours.get(key) for key in ("op", "ranks", "bytes", "hosts", "link", "busy", "rewritten", same_file))
             and (goal.beside not in ("limit", "bare") or row["buffer"] == ours["buffer"])]
    if goal.beside != "best":
        return found[0] if found else None
    return min(found, key=lambda row: row[goal.field], default=None)


def value_of(goal, ours, rival):
    if goal.relation == "wire":
        # all_reduce of two hosts: the buffer once in each direction.
        return ours["bytes"] / WIRE / (ours["median_us"] * 1e-6)
    if goal.relation == "extra":
        return ours[goal.field] - rival[goal.field]
    ratio = ours[goal.field] / rival[goal.field]
    return ratio if goal.relation == "time" else 1 / ratio


def worst(goal, rows):
    found = []
    for row in rows:
        if row["backend"] != "native" or row.get("rewritten") or row["op"] != goal.op or goal.buffer not in ("", row["buffer"]) or row["ranks"] not in goal.ranks:
            continue
        if not goal.low <= row["bytes"] <= goal.high or (row["hosts"], row.get("link", ""), row.get("busy", 0)) != (goal.hosts, goal.link, goal.busy):
            continue
        rival = rival_of(row, goal, rows)
        if rival or goal.relation == "wire":
            found.append((value_of(goal, row, rival), row["bytes"]))
    return (max if goal.at_most else min)(found, default=None)


def check(rows):
    missed = 0

    def line(text, value, bound, at_most, where=""):
        nonlocal missed
        reached = None if value is None else value <= bound if at_most else value >= bound
        missed += reached is False
        state = "not measured" if reached is None else "reached" if reached else "MISSED"
        shown = "" if value is None else f"{value:.2f}{where}"
        print(f"{state:<12}  {text:<68} {shown:>18}  (at {'most' if at_most else 'least'} {bound:g})")

    collectives = [row for row in rows if "median_us" in row and not row.get("error")]
    for goal in GOALS:
        value, size = worst(goal, collectives) or (None, 0)
        line(goal.text, value, goal.bound, goal.at_most, f" at {size} B")
    for ranks, models in EFFICIENCIES.items():
        steps = [row for row in rows if "nosync_ms" in row and row["ranks"] == ranks]
        for model, bound in models.items():
            mine = [row for row in steps if row["model"] == model and row["system"] == "maniple"]
            line(f"DDP, {ranks} ranks, {model}: efficiency", min((row["efficiency"] for row in mine), default=None), bound, False)
        for model in models:
            of = {row["system"]: row["ddp_ms"] for row in steps if row["model"] == model}
            ratio = of["torch"] / of["maniple"] if {"torch", "maniple"} <= set(of) else None
            line(f"DDP, {ranks} ranks, {model}: speed of the whole step against PyTorch's", ratio, 1, False)
    started = {(row["system"], row["ranks"]): row["start_ms"] for row in rows if "start_ms" in row}
    ours, theirs = started.get(("maniple", 2)), started.get(("mpich", 2))
    line("`maniple run -n 2 /bin/true`: time relative to MPICH's mpirun", ours / theirs if ours and theirs else None, 1, True)
    many = started.get(("maniple", MANY))
    line(f"{MANY} ranks that start, say hello and wait for all: seconds", many / 1e3 if many else None, MANY_START_S, True)
    return missed


def start_up(program, file):
    """The launcher and MPICH's in turn, and many ranks: medians."""
    commands = {"maniple": [program, "run", "-n", "2", "/bin/true"], "mpich": ["mpirun.mpich", "-n", "2", "/bin/true"]}
    if shutil.which("mpirun.mpich") is None:
        del commands["mpich"]
    times = {system: [] for system in commands}
    for _ in range(100):
        for system, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True)
            times[system].append((time.perf_counter() - start) * 1e3)
    rows = [{"system": system, "ranks": 2, "start_ms": statistics.median(measured)} for system, measured in times.items()]
    hello = os.path.join(os.path.dirname(program), "examples/comm/01_hello")
    measured = []
    for _ in range(5 if os.path.exists(hello) else 0):
        start = time.perf_counter()
        subprocess.run([program, "run", "-n", str(MANY), hello], check=True, stdout=subprocess.DEVNULL)
        measured.append((time.perf_counter() - start) * 1e3)
    if measured:
        rows.append({"system": "maniple", "ranks": MANY, "start_ms": statistics.median(measured)})
    with open(file, "w", encoding="utf-8") as out:
        json.dump({"rows": rows}, out)
    print("start-up: " + ", ".join(f"{row['system']}, {row['ranks']} ranks {row['start_ms']:.2f} ms" for row in rows))


def measure(folder, program):
    os.makedirs(folder, exist_ok=True)
    files = []
    for number, arguments in enumerate(RUNS):
        files.append(os.path.join(folder, f"{number}.json"))
        subprocess.run([program, "bench", *arguments.split(), "--json", files[-1]], check=False)
    files.append(os.path.join(folder, "start.json"))
    start_up(program, files[-1])
    return [file for file in files if os.path.exists(file)]


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__)
    if arguments[0] == "--measure":
        arguments = measure(arguments[1], arguments[2] if len(arguments) > 2 else "build/bin/maniple")
    rows = []
    for name in arguments:
        with open(name, encoding="utf-8") as file:
            rows += [dict(row, file=name) for row in json.load(file)["rows"]]
    sys.exit(1 if check(rows) else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
