"""Plot create latency and memory against the number of worlds alive, from what create.py --curve found.

python bench/plot.py create.json create.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import GIB, require

# By data and kind: {"seconds": […], "memory_at": […], "memory": […]}.
Curves = dict[str, dict[str, dict[str, list[Any]]]]
COLORS = {"fresh process": "tab:red", "template": "tab:orange", "group template": "tab:blue"}
LINES = ("-", "--", ":")


def draw(curves: Curves, file: Path) -> None:
    """Two panels that share their axis: latency above, on a logarithmic scale, memory below."""
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for line, (label, kinds) in zip(LINES, curves.items(), strict=False):
        for name, curve in kinds.items():
            style = {"color": COLORS.get(name), "linestyle": line, "label": f"{name}, {label}"}
            numbers = range(1, len(curve["seconds"]) + 1)
            above.plot(numbers, [1e3 * value for value in curve["seconds"]], **style)
            below.plot(curve["memory_at"], [value / GIB for value in curve["memory"]], marker=".", **style)
    above.set_yscale("log")
    above.set_ylabel("create, ms")
    below.set_ylabel("memory of all worlds, GiB (PSS)")
    below.set_xlabel("worlds alive")
    for panel in (above, below):
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path, metavar="CREATE.json")
    options.add_argument("file", type=Path, metavar="FILE.png")
    args = options.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))["results"]
    curves = {label: entry["curve"] for label, entry in results.items() if "curve" in entry}
    if not curves:
        raise SystemExit(f"{args.results} has no curve: run create.py with --curve N")
    draw(curves, args.file)


if __name__ == "__main__":
    main()
