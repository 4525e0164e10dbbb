"""The command `benches/figures`."""

import argparse
import sys

from . import draw, measure
from .stack import Options

KINDS = {
    "speed": measure.speed,
    "cost": measure.cost,
    "pages": measure.pages,
    "memory": measure.memory,
    "bulk": measure.bulk,
}

parser = argparse.ArgumentParser(prog="benches/figures")
parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)} or draw; all of them if none is named")
parser.add_argument("--quick", action="store_true", help="a little of each, written to target/figures")
parser.add_argument("--rounds", type=int, help="rounds of a second of speed and cost (5)")
parser.add_argument("--userd", help="a binary that is there, instead of a build with the profile dist")
parser.add_argument("--into", help="the directory that the page and the figures are written to, instead of docs")
arguments = parser.parse_args()
kinds = arguments.kinds or [*KINDS, "draw"]
if unknown := set(kinds) - {*KINDS, "draw"}:
    parser.error(f"no kind of figure: {' '.join(unknown)}")

options = Options(arguments)
for kind in kinds:
    if kind == "draw":
        draw.write(options)
    else:
        print(f"== {kind}", file=sys.stderr, flush=True)
        KINDS[kind](options)
