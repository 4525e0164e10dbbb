"""Measures each kind of figure, and writes its rows."""

import contextlib
import http.client
import itertools
import os
import re
import resource
import statistics
import threading
import time

from . import attacks
from .stack import ROOT, USERS, Postgres, Service, peers, processor_time, said, stolen

SEEDED = 100_000
MAX_STOLEN = 0.02
UNITS = {"us": 1, "ms": 1e3, "s": 1e6}
COLUMNS = "work connections cores round server requests_a_second p50_us p99_us service_us database_us switches".split()
seeds = itertools.count(int(time.time()))


def wrk(service, work, connections, seconds, first):
    """Requests a second, and the median and the 99th percentile of the latency in microseconds."""
    script = ROOT / "benches/bench/load.lua"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), f"http://127.0.0.1:{service.port}"]
    env = os.environ | {"WORK": work, "FIRST": str(first), "SEED": str(next(seeds))}
    output = said(*command, env=env)
    if failed := re.search(r"Non-2xx.*|Socket errors:.*", output):
        raise SystemExit(f"{service.name}, {work}, {connections} connections: {failed[0]}")
    count = int(re.search(r"(\d+) requests in", output)[1])
    latency = [re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s)\s*$", output, re.M) for percent in (50, 99)]
    return count, [float(found[1]) * UNITS[found[2]] for found in latency]


def turn(postgres, service, work, connections, seconds):
    """One server's turn in a round. If the host took time away meanwhile, the turn is taken again, three times at most."""
    for _ in range(3):
        first = 0
        if work == "delete":
            fresh = f"insert into users (name, email) select 'D', gen_random_uuid() || '@example.com' from generate_series(1, {seconds * 60000}) returning id"
            first = postgres.sql(service.database, f"with fresh as ({fresh}) select min(id) from fresh")
        before = stolen(), processor_time(service.process.pid), processor_time(postgres.process.pid, children_alone=True)
        count, latency = wrk(service, work, connections, seconds, first)
        after = stolen(), processor_time(service.process.pid), processor_time(postgres.process.pid, children_alone=True)
        if (after[0][0] - before[0][0]) <= MAX_STOLEN * (after[0][1] - before[0][1]):
            break

    def grown(kind, value):
        return sum(thread[value] - before[kind].get(name, (0, 0))[value] for name, thread in after[kind].items()) / count

    values = count / seconds, *latency, grown(1, 0), grown(2, 0)
    return [f"{value:.1f}" for value in values] + [f"{grown(1, 1):.2f}"]


def requests(options, row, works, connections, cores):
    """Writes a row for each round, server, kind of work and number of connections; the servers take turns."""
    everything = os.sched_getaffinity(0)
    commands = {"userd": [options.userd()]} | peers()
    os.sched_setaffinity(0, sorted(everything)[:cores])
    try:
        with contextlib.ExitStack() as stack:
            postgres = Postgres(stack)
            services = [Service(stack, postgres, name, command, SEEDED) for name, command in commands.items()]
            seconds = 1
            for work, count, round in itertools.product(works, connections, range(1, options.rounds + 1)):
                for service in services:
                    row(work, count, cores, round, service.name, *turn(postgres, service, work, count, seconds))
    finally:
        os.sched_setaffinity(0, everything)


def speed(options):
    works = ["get", "post"] if options.quick else ["get", "email", "list", "post", "put", "delete", "mixed"]
    with options.table("speed", *COLUMNS) as row:
        requests(options, row, works, [1, 8] if options.quick else [1, 8, 32, 128], os.cpu_count())


def cost(options):
    works = ["get"] if options.quick else ["get", "post", "put"]
    with options.table("cost", *COLUMNS) as row:
        requests(options, row, works, [1, 8] if options.quick else [1, 8, 32], 1)


def pages(options):
    """Milliseconds of pages of 15, read one after the other by one client, and of counting the table."""
    counts = [10**3, 10**4] if options.quick else [10**3, 10**4, 10**5, 10**6]
    with options.table("pages", "users", "what", "ms") as row, contextlib.ExitStack() as stack:
        postgres = Postgres(stack)
        service = Service(stack, postgres, "userd", [options.userd()], 0)
        client = http.client.HTTPConnection("127.0.0.1", service.port)

        def milliseconds(page):
            start = time.perf_counter()
            client.request("GET", f"/users?page={page}")
            answer = client.getresponse()
            body = answer.read()
            assert answer.status == 200 and b'"data":[{' in body, body
            return (time.perf_counter() - start) * 1000

        for before, users in itertools.pairwise([0, *counts]):
            postgres.sql("userd", USERS.format(before + 1, users), "vacuum analyze")
            last = -(-users // 15)
            for what, page in ("first page", 1), ("middle page", last // 2), ("last page", last):
                times = [milliseconds(page) for _ in range(300)][20:]
                row(users, what, f"{statistics.median(times):.3f}")
            timing = postgres.sql("userd", "\\timing on", *["select count(*) from users"] * 12)
            times = [float(found) for found in re.findall(r"^Time: ([\d.]+)", timing, re.M)][2:]
            row(users, "only select count(*)", f"{statistics.median(times):.3f}")


def memory(options):
    """Resident memory, five times a second, while kinds of load follow one another."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    seconds = 2 if options.quick else 8
    with options.table("memory", "seconds", "mib", "load") as row, contextlib.ExitStack() as stack:
        postgres = Postgres(stack)
        service = Service(stack, postgres, "userd", [options.userd()], 0)
        postgres.sql("userd", attacks.LARGEST)
        begin = time.time()

        def sample(load, seconds):
            end = time.time() + seconds
            while time.time() < end:
                row(f"{time.time() - begin:.1f}", f"{service.rss():.1f}", load)
                time.sleep(0.2)

        sample("nothing", 2)
        for load, attack in attacks.ATTACKS.items():
            clients = attacks.Clients(service.port)
            runner = threading.Thread(target=attack, args=(clients,), daemon=True)
            runner.start()
            sample(load, seconds)
            clients.stop.set()
            runner.join()
            clients.close()
            sample("nothing", seconds / 2)
        client = http.client.HTTPConnection("127.0.0.1", service.port)
        client.request("GET", "/users/1")
        assert client.getresponse().status == 200


def bulk(options):
    """Imports and exports beside psql's \\copy, by the benchmark of that name; its rows are those of its first table."""
    env = os.environ | ({"USERS": "20000"} if options.quick else {})
    output = said("cargo", "bench", "--quiet", "--locked", "--bench", "bulk", cwd=ROOT, env=env)
    options.profile, profile = "bench", options.profile
    with options.table("bulk", "work", "seconds", "users_a_second", "times_psql", "mib", "processor_s") as row:
        for line in output.split("\n\n")[1].splitlines()[2:]:
            row(*(cell.strip() for cell in line.strip("|").split("|")))
    options.profile = profile
