#!/usr/bin/env python3
"""Draws the rows of `maniple bench --json`: for each operation, bandwidth by size and, up to 64 KiB, time by size.

    bench/plot.py out.json [chart.svg]      # the suffix chooses the format: svg, png, pdf

Needs matplotlib (Debian: apt-get install python3-matplotlib).
"""
import json
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SMALL = 64 * 1024
NAMES = {"native": "Maniple", "openmpi": "Open MPI", "mpich": "MPICH", "gloo": "Gloo", "limit": "limit of this machine",
         "maniple-mpi": "Maniple on MPI", "maniple-gloo": "Maniple on Gloo"}


def chart_title(row):
    title = f"{row['op']} of {row['dtype']}, {row['ranks']} ranks"
    title += f", {row['hosts']} hosts" if row.get("hosts", 1) > 1 else ""
    title += f", links of {row['link']}" if row.get("link") else ""
    return title + (f", with {row['busy']} busy processes" if row.get("busy") else "")


def series_label(row):
    words = [NAMES.get(row["backend"], row["backend"]), row["transport"]]
    if row["backend"] in ("native", "bare", "limit"):
        words.append(row["buffer"] + " memory")
    if row.get("algorithm", "auto") not in ("", "auto"):
        words.append(row["algorithm"])
    return ", ".join(words)


def draw(axes, title, rows, field):
    series = defaultdict(list)
    for row in rows:
        series[series_label(row), row["backend"]].append((row["bytes"], row[field]))
    for (label, backend), points in series.items():
        axes.plot(*zip(*sorted(points)), marker="o", markersize=3, label=label, linestyle="--" if backend == "limit" else "-",
                  linewidth=2 if backend == "native" else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_title(title, fontsize=9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7)


def main(source, target):
    with open(source, encoding="utf-8") as file:
        report = json.load(file)
    charts = defaultdict(list)
    for row in report["rows"]:
        if row["op"] != "limit" and row["bytes"] > 0 and not row.get("error"):
            charts[chart_title(row)].append(row)
    if not charts:
        sys.exit(f"{source}: no row has a size to draw")
    figure, grid = pyplot.subplots(len(charts), 2, figsize=(12, 4.5 * len(charts)), squeeze=False)
    for (title, rows), (left, right) in zip(charts.items(), grid):
        large = [row for row in rows if row["bytes"] >= SMALL]
        draw(left, f"{title}: algbw, GB/s", large or rows, "algbw_gbps")
        draw(right, f"{title}: median, us", [row for row in rows if row["bytes"] <= SMALL] or rows, "median_us")
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']} {machine['arch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else sys.argv[1].rsplit(".", 1)[0] + ".svg")
