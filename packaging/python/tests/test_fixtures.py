"""The fixtures as tests use them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest_plugins = ["pytester"]

ADA = json.dumps({"name": "Ada", "email": "ada@example.com"}).encode()


def ask(server, path, body=None):
    with urlopen(Request(server.url + path, body)) as answer:
        return answer.status, json.load(answer)


@pytest.fixture(scope="session", autouse=True)
def foreign_environment():
    """What the machine of somebody's sets, conda for one."""
    with pytest.MonkeyPatch.context() as environment:
        foreign = {"HOST": "x86_64-conda-linux-gnu", "PORT": "1", "API_TOKEN": "theirs", "SCHEMA": "strict"}
        for name, value in {**foreign, "DATABASE_URL": "postgres://192.0.2.1/theirs", "LOG_LEVEL": "loud"}.items():
            environment.setenv(name, value)
        yield


class TestEmpty:
    @pytest.fixture
    def userd_users(self):
        return []

    @pytest.mark.parametrize("_", range(2))
    def test_each_test_has_a_fresh_database(self, userd_server, _):
        status, created = ask(userd_server, "/users", ADA)
        assert (status, created["id"]) == (201, "1")
        assert ask(userd_server, "/users/1") == (200, created)


class TestSettings:
    @pytest.fixture
    def userd_settings(self):
        return {"MAX_PER_PAGE": "7"}

    def test_settings(self, userd_server):
        assert ask(userd_server, "/users")[1]["perPage"] == 7


@pytest.fixture(scope="session")
def userd_users():
    return [{"name": "Grace", "email": "grace@example.com", "password": "correct horse"}]


class TestUsers:
    """Each service begins with them, and has a database for its scope."""

    @pytest.mark.parametrize("name", ["userd_server", "userd_module_server", "userd_session_server"])
    def test_the_users_of_the_start(self, request, name):
        server = request.getfixturevalue(name)
        assert ask(server, "/users/1")[1]["name"] == "Grace"
        assert ask(server, "/users")[1]["total"] == 1
        login = json.dumps({"email": "grace@example.com", "password": "correct horse"}).encode()
        assert ask(server, "/users/authenticate", login)[0] == 200

    @pytest.mark.parametrize("expected", ["2", "3"])
    def test_a_module_shares_its_service(self, userd_module_server, userd_session_server, expected):
        address = f"{expected}@example.com"
        body = json.dumps({"name": "Ada", "email": address}).encode()
        assert ask(userd_module_server, "/users", body)[1]["id"] == expected
        assert ask(userd_session_server, "/users/1")[1]["name"] == "Grace"


def test_the_command(userd, userd_server):
    said = subprocess.check_output([userd, "--version"], text=True)
    assert said.startswith("userd ")
    assert subprocess.check_output([sys.executable, "-m", "userd", "--version"], text=True) == said
    # The commit is missing if the build was given none.
    version, *commit, machine = re.findall(r"[\w.-]+", said)[1:]
    with urlopen(userd_server.url + "/metrics") as answer:
        figures = answer.read().decode()
    labels = f'version="{version}",commit="{"".join(commit)}",machine="{machine}"'
    assert f"userd_build_info{{{labels}}} 1\n" in figures


@pytest.mark.parametrize("layout", ["overlay", "--prefix", "--target"])
def test_the_command_is_beside_the_package(tmp_path, layout):
    """The Python that runs is that of another environment, which has a command, too."""
    import userd

    packages = tmp_path / ("" if layout == "--target" else "lib/python3/site-packages")
    shutil.copytree(Path(userd.__file__).parent, packages / "userd")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/userd").write_text("#!/bin/sh\necho beside $1\n")
    (tmp_path / "bin/userd").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    said = subprocess.check_output([sys.executable, "-m", "userd", "test"], text=True, env=environment)
    assert said == "beside test\n"


def test_the_controls_of_the_environment(pytester, userd):
    pytester.makepyfile(
        """
        import os
        from urllib.request import urlopen

        def test_one(userd_server, userd_session_server):
            own = os.environ["USERD_CONTROL"]
            assert len({own, userd_server.control, userd_session_server.control}) == 3
            print("ended", userd_server.url, userd_session_server.url)
            urlopen(userd_server.url + "/users").read()
            userd_server.fail("503", "GET", "/users")
            userd_server.reset()
        """
    )
    # The services have ended before the command that started them.
    shell = """
        "$0" -m pytest -q -s -p no:cacheprovider >said || exit 1
        for url in $(sed -n 's/.*ended //p' said); do
            ! curl -fs --noproxy '*' "$url/livez" || exit 2
        done
    """
    done = subprocess.run([userd, "test", "--", "sh", "-c", shell, sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done


def test_a_failure_is_explained(pytester):
    pytester.makepyfile(
        """
        import pytest
        from urllib.request import Request, urlopen

        @pytest.fixture(scope="session")
        def userd_settings():
            return {"SCHEMA": "strict", "API_TOKEN": "a-secret-of-sixteen"}

        def ask(server, path):
            headers = {"Authorization": "Bearer a-secret-of-sixteen"}
            urlopen(Request(server.url + path, headers=headers)).read()

        def test_passes(userd_session_server):
            ask(userd_session_server, "/users?page=1")

        @pytest.mark.parametrize("name", ["userd_server", "userd_module_server"])
        def test_fails(request, userd_server, userd_module_server, name):
            ask(request.getfixturevalue(name), "/users?page=2")
            assert name == "other"

        @pytest.fixture
        def in_setup(userd_server):
            ask(userd_server, "/users?page=3")
            assert not "set up"

        @pytest.fixture
        def in_teardown(userd_server):
            yield
            ask(userd_server, "/users?page=4")
            assert not "torn down"

        def test_setup(in_setup):
            pass

        def test_teardown(in_teardown):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=2, failed=2, errors=2)
    text = result.stdout.str()
    assert [text.count(f'"target": "/users?page={page}"') for page in (1, 2, 3, 4)] == [0, 2, 1, 1], text
    result.stdout.fnmatch_lines(["*- userd -*", "http://127.0.0.1:*, its last requests:", '*"target": "/users?page=2"*'])
    assert "a-secret-of-sixteen" not in text.replace('"API_TOKEN": "a-secret-of-sixteen"', "").replace("Bearer a-s", "")


def test_functions_that_a_test_has_replaced(pytester):
    """Each failure is explained, and the next test runs."""
    pytester.makepyfile(
        """
        import builtins, datetime, io, json, os, select, socket, subprocess, tempfile, threading, time
        import pytest
        from urllib.request import urlopen

        def ask(server):
            with urlopen(server.url + "/openapi.json") as answer:
                print("asked", answer.headers["X-Request-Id"])

        def fails(*given, **named):
            raise RuntimeError("no such function in a test")

        NAMES = [
            (os, "close"), (os, "fstat"), (os, "getpid"), (os, "open"), (os, "pipe"), (os, "pread"), (os, "read"),
            (os, "waitpid"), (os, "write"), (subprocess, "Popen"), (subprocess, "run"), (time, "sleep"),
            (time, "time_ns"), (builtins, "open"), (builtins, "print"), (io, "open"), (json, "dumps"), (json, "loads"),
            (datetime, "datetime"), (select, "poll"), (socket, "socket"), (tempfile, "TemporaryFile"),
            (threading, "Lock"), (threading, "Thread"),
        ]

        @pytest.mark.parametrize("place, name", NAMES)
        def test_replaced(userd_session_server, monkeypatch, place, name):
            ask(userd_session_server)
            monkeypatch.setattr(place, name, fails)
            userd_session_server.reset()
            assert name == "other"

        def test_all_replaced(userd_session_server, monkeypatch, request):
            ask(userd_session_server)
            for place, name in NAMES:
                # pytest itself needs these.
                if name not in ("close", "open", "write", "datetime", "print"):
                    monkeypatch.setattr(place, name, fails)
            monkeypatch.setattr(os, "environ", {})
            # A service that begins and ends then.
            with pytest.raises(ZeroDivisionError):
                request.getfixturevalue("userd_server").fail("503", "GET", "/users", times=0)
                1 / 0
            assert False, "all"

        def test_passes(userd_server):
            ask(userd_server)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=1, failed=25)
    explained = result.stdout.str()
    assert explained.count(", its last requests:") == 26, explained
    assert "INTERNALERROR" not in explained and "no explanation" not in explained


def test_an_error_of_the_plug_in_is_a_line_of_the_report(pytester):
    pytester.makepyfile(
        """
        from userd import pytest_plugin

        def test_fails(userd_server, monkeypatch):
            monkeypatch.setattr(pytest_plugin.Server, "explain", lambda self: 1 / 0)
            assert False, "as it should"

        def test_passes(userd_server):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*as it should*", "no explanation: ZeroDivisionError('division by zero')"])


def test_faults_that_are_left_fail_their_test(pytester):
    pytester.makepyfile(
        """
        import pytest
        from urllib.request import urlopen

        def test_left(userd_session_server):
            userd_session_server.fail("503", "POST", "/users", times=3)
            assert userd_session_server.faults_left() == 3
            urlopen(userd_session_server.url + "/users").read()

        def test_none(userd_session_server):
            for _ in range(2):
                urlopen(userd_session_server.url + "/users").read()
            with pytest.raises(ValueError, match="a fault is "):
                userd_session_server.fail("nothing", "GET", "/users")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["3 requests of http* were to fail, and have not come"])


def test_a_service_that_does_not_start(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def userd_settings():
            return {"SCHEMA": "none", "API_TOKEN": "a-secret-of-sixteen", "NO_SETTING": "another-secret"}

        def test_nothing(userd_server):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*userd did not start: *NO_SETTING*"])
    assert "secret" not in result.stdout.str()


def test_with_xdist(pytester):
    """A session's service is one for each worker."""
    pytester.makepyfile(
        """
        import json, os, time
        import pytest
        from urllib.request import Request, urlopen

        @pytest.mark.parametrize("n", range(6))
        def test_users(userd_session_server, userd_server, n):
            worker = os.environ["PYTEST_XDIST_WORKER"]
            body = json.dumps({"name": worker, "email": f"{n}@example.com"}).encode()
            urlopen(Request(userd_session_server.url + "/users", body)).read()
            urlopen(Request(userd_server.url + "/users", body)).read()
            users = json.load(urlopen(userd_session_server.url + "/users"))["data"]
            assert {user["name"] for user in users} == {worker}
            assert json.load(urlopen(userd_server.url + "/users"))["total"] == 1
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2")
    result.assert_outcomes(passed=6)


def test_the_manual(pytester):
    result = pytester.runpytest_subprocess("--fixtures", "-q")
    for fixture in ["userd", "userd_settings", "userd_users", "userd_server", "userd_module_server", "userd_session_server"]:
        result.stdout.re_match_lines([rf"{fixture}\b.* -- .*pytest_plugin"])
    assert "no docstring" not in "".join(line for line in result.outlines if "userd" in line)


def test_the_packaged_programs_serve_tests_alone(monkeypatch):
    import userd

    monkeypatch.setattr(userd, "postgres", lambda: "/packaged")
    assert userd.environment({"A": "b"}) == {"A": "b", "POSTGRES_BIN": "/packaged"}
    assert userd.environment({"POSTGRES_BIN": "/mine"}) == {"POSTGRES_BIN": "/mine"}


def test_libraries_that_replace_sockets_files_and_clocks(pytester):
    """Those that are installed: each time a service begins, is controlled and ends with the library in effect."""
    pytester.makepyfile(
        """
        import os, socket
        import pytest

        def use(request):
            server = request.getfixturevalue("userd_server")
            server.reset()
            server.fail("503", "POST", "/users")
            assert server.faults_left() == 1
            server.fail_none()
            assert server.requests("POST", "/users") == []

        def test_pytest_socket(request):
            pytest_socket = pytest.importorskip("pytest_socket")
            pytest_socket.disable_socket()
            try:
                use(request)
            finally:
                pytest_socket.enable_socket()

        def test_httpretty(request):
            httpretty = pytest.importorskip("httpretty")
            with httpretty.enabled(allow_net_connect=False):
                use(request)

        def test_vcrpy(request):
            vcr = pytest.importorskip("vcr")
            with vcr.use_cassette("none.yaml", record_mode="none"):
                use(request)

        def test_responses(request):
            responses = pytest.importorskip("responses")
            with responses.RequestsMock():
                use(request)

        def test_freezegun(request):
            with pytest.importorskip("freezegun").freeze_time("2001-01-01"):
                use(request)

        def test_time_machine(request):
            with pytest.importorskip("time_machine").travel(0, tick=False):
                use(request)

        def test_pyfakefs(request):
            with pytest.importorskip("pyfakefs.fake_filesystem_unittest").Patcher():
                use(request)

        def test_a_proxy(request, monkeypatch):
            for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
                monkeypatch.setenv(name, "http://127.0.0.1:1")
            use(request)

        def test_a_timeout(request):
            socket.setdefaulttimeout(1e-6)
            try:
                use(request)
            finally:
                socket.setdefaulttimeout(None)

        def test_no_environment(request, monkeypatch):
            for name in list(os.environ):
                monkeypatch.delenv(name)
            use(request)
        """
    )
    outcomes = pytester.runpytest_subprocess("-p", "no:cacheprovider").parseoutcomes()
    assert outcomes["passed"] >= 3 and set(outcomes) <= {"passed", "skipped", "warnings"}, outcomes
