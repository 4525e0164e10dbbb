"""What is measured: userd and its peers, each with a database of its own on one PostgreSQL, and the load.

Everything listens on 127.0.0.1 and ends with the program.
"""

import contextlib
import csv
import functools
import glob
import os
import pathlib
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERS = ROOT / "benches/peers"
TARGET = ROOT / "target/figures"

TABLE = """
create table users (
    id bigint generated always as identity primary key,
    name text not null,
    email text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
create unique index on users (lower(email))"""
USERS = "insert into users (name, email) select 'User ' || n, 'user' || n || '@example.com' from generate_series({}, {}) n"


class Options:
    """What the command line says, and where the data go."""

    def __init__(self, arguments):
        self.quick = arguments.quick
        self.rounds = arguments.rounds or (1 if self.quick else 5)
        self.binary = arguments.userd
        self.docs = pathlib.Path(arguments.into) if arguments.into else TARGET / "docs" if self.quick else ROOT / "docs"
        (self.docs / "figures").mkdir(parents=True, exist_ok=True)
        self.profile = "unknown" if self.binary else "dist"

    def userd(self):
        """The path of the service, built if it is not given."""
        if self.binary:
            return self.binary
        run(["cargo", "build", "--quiet", "--locked", "--profile", "dist"], cwd=ROOT)
        self.binary = str(ROOT / "target/dist/userd")
        return self.binary

    @contextlib.contextmanager
    def table(self, name, *columns):
        """A CSV file whose first lines say what the figures depend on; nothing that names the machine."""
        commit = said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
        memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) / 2**20
        with open(self.docs / f"figures/{name}.csv", "w", newline="") as file:
            file.write(f"# userd {commit}, profile {self.profile}; {os.cpu_count()} cores of a virtual machine, ")
            file.write(f"{memory:.0f} GiB of memory\n# Linux {platform.release().split('-')[0]}, ")
            file.write(f"PostgreSQL {said('psql', '--version').split()[2]}, {' '.join(said('rustc', '--version').split()[:2])}\n")
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(columns)

            def row(*values):
                rows.writerow(values)
                file.flush()

            yield row


def run(command, **options):
    return subprocess.run(command, check=True, **options)


def said(*command, **options):
    return run(command, stdout=subprocess.PIPE, text=True, **options).stdout.strip()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port, process):
    for _ in range(300):
        if process.poll() is not None:
            sys.exit(f"{process.args[0]} ended with {process.returncode}")
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.1)
    sys.exit(f"{process.args[0]} does not listen on {port}")


@contextlib.contextmanager
def ended(process, signal_number=signal.SIGTERM):
    """Ends the process. By default not with SIGINT, because programs ignore it if a shell started the benchmark with `&`."""
    try:
        yield process
    finally:
        process.send_signal(signal_number)
        process.wait(30)


class Postgres:
    """A PostgreSQL of its own with the default settings but for its memory."""

    def __init__(self, stack):
        self.port = free_port()
        directory = tempfile.mkdtemp(prefix="userd-figures-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        account = {}
        if os.getuid() == 0:
            postgres = pwd.getpwnam("postgres")
            os.chown(directory, postgres.pw_uid, postgres.pw_gid)
            account = {"user": postgres.pw_uid, "group": postgres.pw_gid, "extra_groups": []}
        programs = max(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[-2]))
        quiet = {"cwd": directory, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **account}
        run([f"{programs}/initdb", "-D", f"{directory}/data", "-U", "postgres", "-A", "trust"], **quiet)
        settings = ["listen_addresses=127.0.0.1", "shared_buffers=512MB", "max_connections=200"]
        command = [f"{programs}/postgres", "-D", f"{directory}/data", "-p", str(self.port), "-k", directory]
        self.process = subprocess.Popen(command + [part for setting in settings for part in ("-c", setting)], **quiet)
        # SIGINT is a fast shutdown of PostgreSQL.
        stack.enter_context(ended(self.process, signal.SIGINT))
        wait_for(self.port, self.process)
        while subprocess.run(["pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            time.sleep(0.1)

    def url(self, database):
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def sql(self, database, *statements):
        commands = [part for statement in statements for part in ("-c", statement)]
        return said("psql", "-X", "-qAt", "-v", "ON_ERROR_STOP=1", self.url(database), *commands)


class Service:
    """userd or a peer, with a database of its own that has so many users."""

    def __init__(self, stack, postgres, name, command, users, variables=None):
        self.name, self.database, self.port = name, name.replace("-", "_").lower(), free_port()
        postgres.sql("postgres", f"create database {self.database}")
        is_peer = name != "userd"
        if is_peer:
            postgres.sql(self.database, TABLE)
        env = os.environ | {"DATABASE_URL": postgres.url(self.database), "PORT": str(self.port), "HOST": "127.0.0.1"}
        env |= {"NODE_ENV": "production"} | (variables or {})
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [part.format(port=self.port, url=postgres.url(self.database)) for part in command]
        self.process = stack.enter_context(ended(subprocess.Popen(command, env=env, **quiet)))
        wait_for(self.port, self.process)
        if users:
            postgres.sql(self.database, USERS.format(1, users), "vacuum analyze")

    def rss(self):
        """MiB that are resident."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@functools.cache
def peers():
    """The commands of the peers, which are built first."""
    built = TARGET / "peers"
    manifest = ["--manifest-path", str(PEERS / "Cargo.toml"), "--target-dir", str(built)]
    run(["cargo", "build", "--quiet", "--locked", "--release", *manifest])
    venv = TARGET / "flask"
    run([sys.executable, "-m", "venv", str(venv)])
    requirements = str(PEERS / "flask/requirements.txt")
    run([f"{venv}/bin/pip", "install", "--quiet", "--require-hashes", "-r", requirements])
    express = TARGET / "express"
    shutil.copytree(PEERS / "express", express, dirs_exist_ok=True)
    run(["npm", "ci", "--silent", "--prefix", str(express)])
    gunicorn = ["--workers", "2", "--threads", "8", "--chdir", str(PEERS / "flask"), "--bind", "127.0.0.1:{port}"]
    return {
        "pooled": [f"{built}/release/peers", "pool", "{port}", "{url}"],
        "shared-nothing": [f"{built}/release/peers", "own", "{port}", "{url}"],
        "Express": ["node", f"{express}/app.mjs"],
        "Flask": [f"{venv}/bin/gunicorn", *gunicorn, "app:app"],
    }


def processor_time(pid, children_alone=False):
    """Microseconds of processor time, and voluntary context switches, of a process and its children by thread."""
    found = {}
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            if not children_alone:
                switches = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (thread / "status").read_text(), re.M)
                found[thread.name] = (int((thread / "schedstat").read_text().split()[0]) / 1000, int(switches[1]))
            for child in (thread / "children").read_text().split():
                found |= processor_time(child)
    return found


def stolen():
    """Share of the processors' time that the host has given to other machines, as two counters."""
    counters = [int(value) for value in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return counters[7], sum(counters)
