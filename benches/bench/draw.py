"""Writes the tables of docs/performance.md and the sentence in README.md, between their marks, and draws the figures,
all from the CSV files in docs/figures."""

import csv
import math
import re
import statistics
import textwrap
from html import escape

from .stack import ROOT

SERVERS = ("userd", "pooled", "shared-nothing", "Express", "Flask")
WORK = {
    "get": "`GET /users/:id`",
    "email": "`GET /users?email=`",
    "list": "`GET /users`, random pages",
    "post": "`POST /users`",
    "put": "`PUT /users/:id`",
    "delete": "`DELETE /users/:id`",
    "mixed": "60 % reads, 20 % creates, 20 % changes",
}
STYLE = """
  svg { --ink: #1f2328; --soft: #59636e; --grid: #d8dee4; --paper: #ffffff; --a: #0550ae; --b: #b35900; --c: #1a7f37; --d: #8250df; --e: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --paper: #0d1117; --a: #58a6ff; --b: #f0a04b; --c: #56d364; --d: #d2a8ff; --e: #ff7b72 }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--ink) }
  .soft { fill: var(--soft); font-size: 11px }
  .title { font-weight: 600 }
  .grid { stroke: var(--grid) }
  .a, .b, .c, .d, .e { fill: none; stroke-width: 2; stroke-linejoin: round }
  .a { stroke: var(--a); stroke-width: 3 } .b { stroke: var(--b); stroke-dasharray: 7 3 }
  .c { stroke: var(--c); stroke-dasharray: 2 3 } .d { stroke: var(--d); stroke-dasharray: 9 3 2 3 } .e { stroke: var(--e); stroke-dasharray: 1 2 }
"""


def rows(directory, name):
    """The rows, and what the comments say of the run."""
    lines = (directory / f"{name}.csv").read_text().splitlines()
    notes = [line[2:] for line in lines if line.startswith("#")]
    return list(csv.DictReader(line for line in lines if not line.startswith("#"))), "; ".join(notes)


class Requests:
    """Medians of the rounds by kind of work, connections and server."""

    def __init__(self, data):
        self.rounds = {}
        for row in data:
            point = row["work"], int(row["connections"]), row["server"]
            self.rounds.setdefault(point, []).append(row)
        self.works = [work for work in WORK if any(point[0] == work for point in self.rounds)]
        self.connections = sorted({point[1] for point in self.rounds})

    def median(self, column, work, connections, server):
        return statistics.median(float(row[column]) for row in self.rounds[work, connections, server])

    def cost(self, *point):
        """Microseconds of processor time a request: of the service, and of PostgreSQL."""
        return self.median("service_us", *point), self.median("database_us", *point)


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def svg(width, height, title, description, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title description">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="description">{escape(description)}</desc>\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def text(x, y, content, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{anchor}>{escape(content)}</text>'


def line(points, kind):
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def legend(x, y, names):
    body = []
    for kind, name in zip("abcde", names):
        body += [line([(x, y - 4), (x + 30, y - 4)], kind), text(x + 36, y, name)]
        x += 60 + 7 * len(name)
    return body


def round_up(value):
    """The next number of 1, 2, 5 and a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def speed(found):
    """The plots of requests a second."""
    body = legend(60, 24, SERVERS)
    for at, work in enumerate(found.works):
        left, top, width, height = 60 + at % 2 * 390, 70 + at // 2 * 210, 310, 130
        rate = lambda server, count: found.median("requests_a_second", work, count, server)
        most = round_up(max(rate(server, count) for server in SERVERS for count in found.connections))
        body.append(text(left, top - 14, WORK[work].replace("`", ""), "title"))
        for share in (0, 0.5, 1):
            y = top + height * (1 - share)
            body.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
            body.append(text(left - 6, y + 4, number(most * share), "soft", "end"))
        place = {count: left + 20 + (width - 40) * n / (len(found.connections) - 1) for n, count in enumerate(found.connections)}
        for count in found.connections:
            body.append(text(place[count], top + height + 16, str(count), "soft", "middle"))
        for kind, server in reversed(list(zip("abcde", SERVERS))):
            got = [(place[count], top + height * (1 - rate(server, count) / most)) for count in found.connections]
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--{kind})"/>' for x, y in got]
            body.append(line(got, kind))
        body.append(text(left + width / 2, top + height + 32, "connections", "soft", "middle"))
    height = 70 + (len(found.works) + 1) // 2 * 210
    description = "Requests a second by connections, a plot for each kind of work; the table in docs/performance.md has the numbers."
    return svg(800, height, "Requests a second by connections: userd and its peers", description, body)


def pages(data):
    """The plot of the time of a page."""
    whats = list(dict.fromkeys(row["what"] for row in data))
    users = sorted({int(row["users"]) for row in data})
    ms = {(int(row["users"]), row["what"]): float(row["ms"]) for row in data}
    low, high = math.floor(math.log10(min(ms.values()))), math.ceil(math.log10(max(ms.values())))
    left, top, width, height = 60, 50, 700, 220
    body = legend(left, 24, whats)
    x = lambda count: left + 30 + (width - 60) * (math.log10(count / users[0]) / math.log10(users[-1] / users[0]))
    y = lambda value: top + height * (1 - (math.log10(value) - low) / (high - low))
    for power in range(low, high + 1):
        body.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y(10**power):.1f}" y2="{y(10**power):.1f}"/>')
        body.append(text(left - 6, y(10**power) + 4, f"{10**power:g} ms", "soft", "end"))
    for count in users:
        body.append(text(x(count), top + height + 18, f"{count:,}", "soft", "middle"))
    for kind, what in reversed(list(zip("abcd", whats))):
        body.append(line([(x(count), y(ms[count, what])) for count in users], kind))
    body.append(text(left + width / 2, top + height + 36, "users", "soft", "middle"))
    description = "Milliseconds by the number of users, both on a logarithmic scale; pages.csv has the numbers."
    return svg(800, 320, "Time of a page of 15 by the number of users", description, body)


def memory(data):
    """The plot of the resident memory."""
    samples = [(float(row["seconds"]), float(row["mib"]), row["load"]) for row in data]
    loads = [load for load in dict.fromkeys(load for *_, load in samples) if load != "nothing"]
    left, top, width, height = 60, 30, 700, 240
    end, most = samples[-1][0], round_up(max(mib for _, mib, _ in samples))
    x, y = lambda s: left + width * s / end, lambda mib: top + height * (1 - mib / most)
    body = []
    for at, load in enumerate(loads):
        times = [s for s, _, found in samples if found == load]
        body.append(
            f'<rect x="{x(times[0]):.1f}" y="{top}" width="{x(times[-1]) - x(times[0]):.1f}" height="{height}" '
            f'fill="var(--grid)" fill-opacity="0.4"/>'
        )
        body.append(text((x(times[0]) + x(times[-1])) / 2, top - 8, str(at + 1), "title", "middle"))
        body.append(text(left, top + height + 56 + 18 * at, f"{at + 1}  {load}"))
    for share in (0, 0.5, 1):
        body.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y(most * share):.1f}" y2="{y(most * share):.1f}"/>')
        body.append(text(left - 6, y(most * share) + 4, f"{most * share:g} MiB", "soft", "end"))
    for second in range(0, int(end) + 1, 10):
        body.append(text(x(second), top + height + 16, f"{second} s", "soft", "middle"))
    body.append(line([(x(s), y(mib)) for s, mib, _ in samples], "a"))
    description = "Resident memory of userd by time; memory.csv has the numbers."
    return svg(800, 350 + 18 * len(loads), "Memory of userd while clients attack it", description, body)


def speed_table(found):
    """Requests a second of userd, and the ratio to each peer."""
    columns = [f"{count} connections" if count > 1 else "1 connection" for count in found.connections]
    table = [f"| requests a second; ratio to {', '.join(SERVERS[1:])} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for work in found.works:
        cells = []
        for count in found.connections:
            rates = [found.median("requests_a_second", work, count, server) for server in SERVERS]
            cells.append(f"{rates[0]:,.0f}: {' / '.join(ratio(rates[0] / rate) for rate in rates[1:])}")
        table.append(f"| {WORK[work]} | {' | '.join(cells)} |")
    return table


def ratio_table(found, one_core):
    """Processor time of a request of userd, as a multiple of the pooled peer's."""
    columns = [f"{count}" for count in found.connections] + [f"one core: {count}" for count in one_core.connections]
    table = [f"| connections | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for work in one_core.works:
        cells = [
            f"{sum(all.cost(work, count, 'userd')) / sum(all.cost(work, count, 'pooled')):.2f}"
            for all in (found, one_core)
            for count in all.connections
        ]
        table.append(f"| {WORK[work]} | {' | '.join(cells)} |")
    return table


def quick(found):
    """The sentence of README.md: what one client sees first."""
    least, most = found.connections[0], found.connections[-1]
    time = lambda work: f"{found.median('p50_us', work, least, 'userd') / 1000:.2f} ms"
    rate = lambda work, count: f"{found.median('requests_a_second', work, count, 'userd'):,.0f}"
    text = f"with one connection a `GET` takes {time('get')} and a `POST` {time('post')}; two cores serve"
    for count in found.connections[1:]:
        units = ("reads", "creates a second") if count == found.connections[1] else ("", "")
        served = " or ".join(f"{rate(work, count)} {unit}".strip() for work, unit in zip(("get", "post"), units))
        text += f"{' and' if count == most else ''} {served} with {count} connections{'.' if count == most else ','}"
    return text


def bulk_table(data):
    """Imports and exports beside psql."""
    table = ["| work | s | × psql | MiB at most | processor time |", "|---|---|---|---|---|"]
    for row in data:
        table.append(f"| {row['work']} | {row['seconds']} | {row['times_psql']} | {row['mib']} | {row['processor_s']} s |")
    return table


def replace(page, name, lines, indent=""):
    """Puts the lines between the marks of that name."""
    marked = re.compile(f"(<!-- {name}: benches/figures writes this -->).*?(<!-- end -->)", re.S)
    assert marked.search(page), f"no mark of {name}"
    return marked.sub(lambda found: f"{found[1]}\n{indent}{lines}\n{indent}{found[2]}", page)


def links(names):
    return ", ".join(f"[{name}.csv](figures/{name}.csv)" for name in names)


def runs(notes):
    """The machine and the versions of each run, with the data that came of it."""
    names = {}
    for name, note in notes.items():
        names.setdefault(note, []).append(name)
    lines = (textwrap.wrap(f"{links(data)}: {note}.", 118, break_on_hyphens=False) for note, data in names.items())
    return "\n".join("- " + "\n  ".join(line) for line in lines)


def write(options):
    """Writes the pages and the figures."""
    figures = options.docs / "figures"
    page, readme = (ROOT / "docs/performance.md").read_text(), (ROOT / "README.md").read_text()
    data = {name: rows(figures, name) for name in ("speed", "cost", "pages", "memory", "bulk")}
    found, one_core = Requests(data["speed"][0]), Requests(data["cost"][0])
    tables = {
        "ratio": (ratio_table(found, one_core), ["speed", "cost"]),
        "speed": (speed_table(found), ["speed"]),
        "bulk": (bulk_table(data["bulk"][0]), ["bulk"]),
    }
    pictures = {"speed": speed(found), "pages": pages(data["pages"][0]), "memory": memory(data["memory"][0])}
    for name, (table, sources) in tables.items():
        page = replace(page, name, "\n".join(table) + f"\n\nData: {links(sources)}.")
    page = replace(page, "runs", runs({name: note for name, (_, note) in data.items()}))
    for name, picture in pictures.items():
        (figures / f"{name}.svg").write_text(picture)
    sentence = "\n  ".join(textwrap.wrap(quick(found), 116, break_on_hyphens=False))
    readme = replace(readme, "quick", sentence, "  ")
    (options.docs / "performance.md").write_text(page)
    readme_at = ROOT / "README.md" if options.docs == ROOT / "docs" else options.docs / "README.md"
    readme_at.write_text(readme)
