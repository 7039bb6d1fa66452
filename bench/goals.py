#!/usr/bin/env python3
"""What the project wants of its own speed (the table in docs/benchmarks.md), checked against results of `maniple bench --json`.

    bench/goals.py --measure FOLDER [MANIPLE]    # runs the measurements as root, about five minutes, and checks them
    bench/goals.py FILE.json...                  # checks what was measured before

Prints one line for each goal: reached, MISSED or not measured. The exit code is 1 if one was missed.
"""
import json
import os
import subprocess
import sys

KIB, MIB = 1024, 1024 * 1024

# One `maniple bench` each. The cost of the checks comes first and many times over: where the pages of a run happen to lie moves a small
# operation by a tenth of a microsecond.
RUNS = [
    "all_reduce --systems native,bare --buffer registered --sizes 4,64K --repeat 21 --no-limit",
    "all_reduce --peers --sizes 4,64,1K",
    "all_reduce --peers --sizes 64K,256K,1M,16M,64M,256M",
    "all_reduce --peers --ranks 4 --sizes 4,64K,1M,16M,64M,256M",
    "all_reduce --peers --ranks 8 --sizes 4,1M",
    "all_reduce --peers --hosts 2 --sizes 4,1M,4M,16M,64M",
    "all_reduce --peers --hosts 2 --link 1gbit --sizes 64M",
    "ddp --no-torch --repeat 3",
]

# text, relation, bound, compared with, our buffer ("": the worse of both), ranks, bytes from, to, hosts, link
GOALS = [
    ("2 ranks, 4 B to 1 KiB: time by Open MPI's", "time", 1.5, "openmpi", "", (2,), 4, KIB, 1, ""),
    ("2 ranks, 64 KiB to 256 MiB, registered: speed against Open MPI", "speed", 5, "openmpi", "registered", (2,), 64 * KIB, 256 * MIB, 1, ""),
    ("2 ranks, 64 KiB to 256 MiB, registered: speed against the limit", "speed", 0.7, "limit", "registered", (2,), 64 * KIB, 256 * MIB, 1, ""),
    ("2 ranks, 1 MiB to 256 MiB, ordinary: speed against Open MPI", "speed", 1.8, "openmpi", "ordinary", (2,), MIB, 256 * MIB, 1, ""),
    ("4 ranks, 1 MiB to 256 MiB, registered: speed against Open MPI", "speed", 4, "openmpi", "registered", (4,), MIB, 256 * MIB, 1, ""),
    ("4 and 8 ranks, 4 B: time by Open MPI's", "time", 2, "openmpi", "", (4, 8), 4, 4, 1, ""),
    ("2 hosts, 1 MiB to 64 MiB: speed against Open MPI over TCP", "speed", 1, "openmpi", "", (2,), MIB, 64 * MIB, 2, ""),
    ("2 hosts, 1 MiB to 64 MiB: speed against Gloo", "speed", 1.3, "gloo", "", (2,), MIB, 64 * MIB, 2, ""),
    ("2 hosts, links of 1 Gbit/s, 64 MiB: share of what the wire carries", "wire", 0.93, "", "", (2,), 64 * MIB, 64 * MIB, 2, "1gbit"),
    ("checks, recorder and heartbeat at 64 KiB: time by that without", "time", 1.01, "bare", "registered", (2,), 64 * KIB, 64 * KIB, 1, ""),
    ("checks, recorder and heartbeat at 4 B: us more than without", "extra", 0.06, "bare", "registered", (2,), 4, 4, 1, ""),
]
EFFICIENCIES = {"mnist_cnn": 0.95, "mlp25m": 0.95, "gpt5m": 0.97, "tiny50": 0.85}  # DDP with 2 ranks: step without averaging / with it

WIRE = 1e9 / 8 * 1448 / 1514  # bytes a second at 1 Gbit/s: payload of a full segment by the frame that the shaper counts


def rival_of(ours, backend, rows):
    """The row to compare with: of the same buffer where the other system has both kinds."""
    for row in rows:
        same = all(row.get(key) == ours.get(key) for key in ("op", "ranks", "bytes", "hosts", "link", "file" if backend == "bare" else "op"))
        if row["backend"] == backend and same and (backend not in ("limit", "bare") or row["buffer"] == ours["buffer"]):
            return row
    return None


def value_of(relation, ours, rival):
    if relation == "wire":
        return ours["bytes"] / WIRE / (ours["median_us"] * 1e-6)  # all_reduce of two hosts: the buffer once in each direction
    if relation == "extra":
        return ours["median_us"] - rival["median_us"]
    ratio = ours["median_us"] / rival["median_us"]
    return ratio if relation == "time" else 1 / ratio


def worst(goal, rows):
    _, relation, _, backend, buffer, ranks, low, high, hosts, link = goal
    found = []
    for row in rows:
        ours = row["backend"] == "native" and row["op"] == "all_reduce" and buffer in ("", row["buffer"]) and row["ranks"] in ranks
        if not ours or not low <= row["bytes"] <= high or row["hosts"] != hosts or row.get("link", "") != link:
            continue
        rival = rival_of(row, backend, rows)
        if rival or relation == "wire":
            found.append((value_of(relation, row, rival), row["bytes"]))
    return (max if relation in ("time", "extra") else min)(found, default=None)


def check(rows):
    missed = 0

    def line(text, reached, value, bound, at_most):
        nonlocal missed
        missed += reached is False
        state = "not measured" if reached is None else "reached" if reached else "MISSED"
        print(f"{state:<12}  {text:<68} {value:>18}  (at {'most' if at_most else 'least'} {bound:g})")

    collectives = [row for row in rows if "median_us" in row and not row.get("error")]
    for goal in GOALS:
        at_most, found = goal[1] in ("time", "extra"), worst(goal, collectives)
        reached = None if found is None else found[0] <= goal[2] if at_most else found[0] >= goal[2]
        line(goal[0], reached, "" if found is None else f"{found[0]:.2f} at {found[1]} B", goal[2], at_most)
    for model, bound in EFFICIENCIES.items():
        measured = [row["efficiency"] for row in rows if row.get("model") == model and row["system"] == "maniple" and row["ranks"] == 2]
        line(f"DDP, 2 ranks, {model}: efficiency", min(measured) >= bound if measured else None, f"{min(measured):.2f}" if measured else "",
             bound, False)
    return missed


def measure(folder, program):
    os.makedirs(folder, exist_ok=True)
    files = []
    for number, arguments in enumerate(RUNS):
        files.append(os.path.join(folder, f"{number}.json"))
        subprocess.run([program, "bench", *arguments.split(), "--json", files[-1]], check=False)
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
