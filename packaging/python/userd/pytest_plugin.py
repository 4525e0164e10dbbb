"""Fixtures for pytest: services on fresh databases, for a test, a module or a session, and the command.

The machine needs PostgreSQL's programs: the extra `postgres` of the wheel brings them, or they are the system's. No
server has to run. A test that fails reports what its service did.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from . import command, postgres, programs

#: Of the log, in a report.
LINES = 50

#: Shown in a report.
REQUESTS = 10

#: CLOCK_REALTIME_COARSE: some milliseconds late, and no test sets it.
COARSE = 5


def _temporary_file(name: str) -> int:
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


#: Functions as they were when pytest started. A test may replace them in their modules and in this one (pyfakefs, freezegun),
#: and then others that are written in Python, such as those of subprocess, fail.
_real = SimpleNamespace(
    close=os.close,
    datetime=datetime,
    dumps=json.dumps,
    environ=os.environ,
    exit_code=os.waitstatus_to_exitcode,
    file=getattr(os, "memfd_create", _temporary_file),
    fspath=os.fspath,
    fstat=os.fstat,
    getpid=os.getpid,
    gettime=time.clock_gettime_ns,
    loads=json.loads,
    open=io.open,
    pipe=os.pipe,
    pread=os.pread,
    randbelow=secrets.randbelow,
    sleep=time.sleep,
    spawn=os.posix_spawnp,
    time_ns=time.time_ns,
    waitpid=os.waitpid,
    write=os.write,
)


def _spawn(arguments: list[str], environment: dict[str, str], descriptors: tuple[int, int, int]) -> int:
    """Starts a program with a standard input, output and error. Returns its process id."""
    actions = [(os.POSIX_SPAWN_DUP2, given, wanted) for wanted, given in enumerate(descriptors)]
    # Python ignores these two.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    return _real.spawn(arguments[0], arguments, environment, file_actions=actions, setsigdef=defaults)


def _wait(process: int, flags: int = 0) -> int | None:
    """Returns the exit code of a process; None while it runs."""
    try:
        ended, status = _real.waitpid(process, flags)
    except ChildProcessError:
        # This process ignores SIGCHLD, or waits for any child: the code is lost.
        return 0
    return _real.exit_code(status) if ended else None


def _output(arguments: list[str], environment: dict[str, str]) -> str:
    """Runs a program. Returns what it writes to its standard output."""
    (stdin, end), (read, stdout), (unread, stderr) = _real.pipe(), _real.pipe(), _real.pipe()
    _real.close(unread)
    _real.close(end)
    try:
        process = _spawn(arguments, environment, (stdin, stdout, stderr))
    finally:
        for descriptor in (stdin, stdout, stderr):
            _real.close(descriptor)
        output = _real.open(read, "rb")
    with output:
        said: bytes = output.read()
    _wait(process)
    return said.decode(errors="replace").strip()


class Server:
    """A running service. `url` is its address, as in `http://127.0.0.1:41234`."""

    def __init__(
        self,
        userd: str,
        environment: dict[str, str],
        settings: dict[str, str],
        seed: str | os.PathLike[str] | None,
    ):
        self._log = _real.file("userd-log")
        environment = {**environment, **settings}
        arguments = ["--embedded", "--ephemeral", "--commands", "--port=0"]
        # A child of this process may hold the other end of standard input after this process has ended.
        arguments += ["--with-parent", f"--with-parent={_real.getpid()}"]
        arguments += programs(arguments, environment)
        if seed is not None:
            arguments += ["--seed", _real.fspath(seed)]
        self._userd, self._environment, self._settings, self._begin = userd, environment, settings, 0
        self._failing = False
        #: Of the choices by chance, once there are some.
        self._seed: int | None = None
        self._code: int | None = None
        # It ends with its standard input, and so with this process, however that ends.
        (stdin, self._input), (read, stdout) = _real.pipe(), _real.pipe()
        self._output = _real.open(read, "rb")
        try:
            self._process = _spawn([userd, *arguments], environment, (stdin, stdout, self._log))
        finally:
            _real.close(stdin)
            _real.close(stdout)
        line = self._line()
        self.url = line.split()[-1] if line.startswith("listening on ") else ""

    def __del__(self) -> None:
        _real.close(self._log)

    def __repr__(self) -> str:
        return f"<userd at {self.url}>"

    def reset(self) -> None:
        """Removes all users, idempotency keys, counts of wrong passwords, faults and requests; a seed is back."""
        self._command("reset")

    def save(self, name: str) -> None:
        """Saves users, passwords, idempotency keys and the next id as the state of a name: 1 to 40 of a-z, 0-9 and _."""
        self._command(f"save {name}")

    def restore(self, name: str) -> None:
        """Brings a saved state back, any number of times; counts of wrong passwords and faults are forgotten."""
        self._command(f"restore {name}")

    def fail(self, fault: str, method: str, path: str, times: int | str = 1) -> None:
        """Has the next requests with this method and path fail: "answer-lost", "refused", "503", "slow SECONDS" or
        "cut BYTES". A test fails that leaves some. With "10%" for times, each fails with this chance until the test ends."""
        if str(times).endswith("%") and self._seed is None:
            self.chance(_real.randbelow(1 << 32))
        self._failing = True
        self._command(f"fail {fault} {method} {path} {times}")

    def fail_none(self) -> None:
        """Forgets the faults that are left, and those by chance."""
        self._command("fail none")

    def chance(self, seed: int) -> None:
        """Has choices by chance begin anew, as they were with this seed before. A test that fails tells its seed."""
        self._command(f"chance {seed}")
        self._seed = seed

    def faults_left(self) -> int:
        """How many requests are yet to fail."""
        return int(self._command("faults"))

    def requests(self, method: str | None = None, path: str | None = None) -> list[dict[str, Any]]:
        """The requests since the start or the last reset, in the order in which they came, as far as 8 MiB hold them: method,
        target, headers (by names in lower case) and body, which is a dict, or the length of a body that is no JSON object.
        Secrets are "***". Of this method and path (without a query) alone, if they are given."""
        count = self._command(" ".join(["requests", *filter(None, (method, path))])).split()[0]
        return [_real.loads(self._line()) for _ in range(int(count))]

    def advance(self, seconds: float) -> None:
        """Lets time pass for idempotency keys and for counts of wrong passwords."""
        self._command(f"advance {seconds}")

    def _line(self) -> str:
        """The next line of its standard output; empty where it has ended."""
        return self._output.readline().decode().strip()

    def _ended(self, flags: int = os.WNOHANG) -> bool:
        if self._code is None:
            self._code = _wait(self._process, flags)
        return self._code is not None

    def _command(self, line: str) -> str:
        try:
            _real.write(self._input, f"{line}\n".encode())
        except BrokenPipeError:
            pass
        said = self._line()
        if said.split(" ")[0] != "ok":
            raise ValueError(f"{line}: {said or 'userd has ended'}")
        return said[3:]

    def _take_faults_left(self) -> int:
        if not self._failing or self._ended():
            return 0
        self._failing = False
        left = self.faults_left()
        self.fail_none()
        return left

    def log(self) -> str:
        """What the service has logged so far."""
        # It writes its lines every 2 ms.
        _real.sleep(0.02)
        size = _real.fstat(self._log).st_size
        return _real.pread(self._log, size, 0).decode(errors="replace")

    def explain(self) -> str:
        """The service and its programs, its settings without secrets, the ids of this test's requests, the end of its log."""

        def said(*arguments: str) -> str:
            return _output([self._userd, *arguments], self._environment)

        log = self.log()
        programs = re.findall(r"PostgreSQL [^\n]*, programs in [^\n]*", log)[:1]
        rows = [row.split() for row in said("config").splitlines()]
        settings = [f"{row[0]}={' '.join(row[1:-1])}" for row in rows if row[-1] == "environment"]
        # A service that refuses its settings has no table of them, only a line in its log.
        if not settings:
            known = set(re.findall(r"^  ([A-Z_]+)", said("--help"), re.MULTILINE))
            settings = [f"{name}={_shown(name, value, known)}" for name, value in self._settings.items()]
        return "\n".join(
            [
                f"{said('--version')} at {self.url or '-'}, {self._userd}",
                *programs,
                f"settings: {', '.join(settings) or 'defaults'}",
                *([f"chance seed: {self._seed}"] if self._seed is not None else []),
                f"request ids of this test: {', '.join(self._request_ids()[-LINES:]) or 'none'}",
                f"the last {REQUESTS} requests:",
                *map(_real.dumps, self._last_requests()),
                f"the last {LINES} lines of its log:",
                *log.splitlines()[-LINES:],
            ]
        )

    def _last_requests(self) -> list[dict[str, Any]]:
        if self._ended():
            return []
        try:
            return self.requests()[-REQUESTS:]
        except (ValueError, OSError):
            # It has just ended.
            return []

    def _request_ids(self) -> list[str]:
        lines = re.findall(r"^(\S+Z) .*request_id=(\S+)", self.log(), re.MULTILINE)
        return [request for at, request in lines if _arrived(at, request) >= self._begin]

    def _begin_test(self) -> None:
        # By the time and not by the place in the log, to which the last test's lines may yet be written.
        now, real = _real.time_ns(), _real.gettime(COARSE)
        # time-machine sets the clock of every function but this one.
        self._begin = (now if abs(now - real) < 1_000_000_000 else real) // 1_000_000

    def _stop(self) -> int:
        _real.close(self._input)
        # To its end, so that it never waits for a reader.
        with self._output:
            self._output.read()
        self._ended(flags=0)
        assert self._code is not None
        return self._code


def _shown(name: str, value: str, known: set[str]) -> str:
    """Returns the value of a setting, unless it may be a secret: the name of one may be misspelt."""
    return value if name in known and not re.search("PASS|TOKEN|URL", name) else "***"


def _arrived(at: str, request: str) -> int:
    """When a request came, in ms: the time in an id of userd's (UUID version 7), else that of its line, a moment later."""
    made = re.match(r"([0-9a-f]{8})-([0-9a-f]{4})-7", request)
    if made:
        return int(made[1] + made[2], 16)
    return int(_real.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() * 1000)


#: Those that run.
_servers: list[Server] = []


@contextmanager
def _serve(
    userd: str, environment: dict[str, str], settings: dict[str, str], seed: str | os.PathLike[str] | None
) -> Generator[Server, None, None]:
    server = Server(userd, environment, settings, seed)
    if not server.url:
        server._stop()
        pytest.fail(f"userd did not start\n{server.explain()}", pytrace=False)
    _servers.append(server)
    try:
        yield server
    finally:
        _servers.remove(server)
        code = server._stop()
    if code != 0:
        pytest.fail(f"userd ended with {code}\n{server.explain()}", pytrace=False)


def pytest_runtest_setup() -> None:
    for server in _servers:
        server._begin_test()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call":
        return
    try:
        _add(report, getattr(item, "funcargs", {}).values())
    except Exception as error:
        # Raised here, it would end the whole run.
        report.sections.append(("userd", f"no explanation: {error!r}"))


def _add(report: pytest.TestReport, used: Collection[object]) -> None:
    """Adds to the report of a test what its services did."""
    for server in _servers:
        left = server._take_faults_left()
        if left and report.passed:
            report.outcome = "failed"
            report.longrepr = f"{left} requests of {server!r} were to fail, and have not come"
    for server in _servers if report.failed else ():
        # A fixture that is asked for by its name is not among the test's.
        if server in used or server._request_ids():
            report.sections.append(("userd", server.explain()))


@pytest.fixture(scope="session")
def userd() -> str:
    """The path of the command `userd`."""
    return command()


@pytest.fixture(scope="session")
def _userd_environment(userd: str) -> dict[str, str]:
    """That of this process without userd's variables, such as HOST, which conda sets; but with POSTGRES_BIN."""
    # Found before a test may have replaced what looks for it.
    postgres()
    environment = dict(_real.environ)
    manual = _output([userd, "--help"], environment)
    ours = re.findall(r"^  ([A-Z_]+) ", manual.partition("Environment variables")[2], re.MULTILINE)
    return {name: value for name, value in environment.items() if name == "POSTGRES_BIN" or name not in ours}


@pytest.fixture(scope="session")
def userd_settings() -> dict[str, str]:
    """Variables for the services, such as {"SCHEMA": "strict"}: override it to set some. POSTGRES_BIN is the only one that
    comes from the environment. Its scope must not be narrower than that of the service."""
    return {}


@pytest.fixture(scope="session")
def userd_seed() -> str | os.PathLike[str] | None:
    """A file of users that the services begin with, JSON lines or CSV as `userd import` reads them: override it to name one.
    Its scope must not be narrower than that of the service."""
    return None


@pytest.fixture
def userd_server(
    userd: str,
    userd_settings: dict[str, str],
    userd_seed: str | os.PathLike[str] | None,
    _userd_environment: dict[str, str],
) -> Generator[Server, None, None]:
    """A service of this test alone, on a free port and a fresh database; both are gone afterwards. `userd_server.url` is its
    address. The test fails where the service did not end well."""
    with _serve(userd, _userd_environment, userd_settings, userd_seed) as server:
        yield server


@pytest.fixture(scope="module")
def userd_module_server(
    userd: str,
    userd_settings: dict[str, str],
    userd_seed: str | os.PathLike[str] | None,
    _userd_environment: dict[str, str],
) -> Generator[Server, None, None]:
    """A service that the tests of a module share, as `userd_server`."""
    with _serve(userd, _userd_environment, userd_settings, userd_seed) as server:
        yield server


@pytest.fixture(scope="session")
def userd_session_server(
    userd: str,
    userd_settings: dict[str, str],
    userd_seed: str | os.PathLike[str] | None,
    _userd_environment: dict[str, str],
) -> Generator[Server, None, None]:
    """A service that all tests share, as `userd_server`; with pytest-xdist, one for each worker."""
    with _serve(userd, _userd_environment, userd_settings, userd_seed) as server:
        yield server
