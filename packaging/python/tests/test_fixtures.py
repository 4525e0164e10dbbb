"""The fixtures as a test of somebody's uses them."""

import json
import re
import subprocess
import sys
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
    def userd_seed(self):
        return None

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
def userd_seed(tmp_path_factory):
    file = tmp_path_factory.mktemp("seed") / "users.csv"
    file.write_text("name,email\nGrace,grace@example.com\n")
    return file


class TestSeed:
    """The same file for each of them, and a database for each scope."""

    @pytest.mark.parametrize("name", ["userd_server", "userd_module_server", "userd_session_server"])
    def test_the_users_of_the_file(self, request, name):
        server = request.getfixturevalue(name)
        assert ask(server, "/users/1")[1]["name"] == "Grace"
        assert ask(server, "/users")[1]["total"] == 1

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


def test_a_service_that_ends_badly_fails_its_test(pytester, userd):
    program = pytester.path / "userd"
    program.write_text(f'#!/bin/sh\n"{userd}" "$@" && [ "$1" = --help ] || exit 3\n')
    program.chmod(0o755)
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.fixture(scope="session")
        def userd():
            return {str(program)!r}

        def test_nothing(userd_server):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*userd ended with 3*"])


def test_a_failure_is_explained(pytester):
    pytester.makepyfile(
        """
        import pytest
        from urllib.request import urlopen

        @pytest.fixture(scope="session")
        def userd_settings():
            return {"SCHEMA": "strict", "API_TOKEN": "a-secret-of-sixteen"}

        def ask(server):
            with urlopen(server.url + "/livez") as answer:
                print("asked", answer.headers["X-Request-Id"])
            with urlopen(server.url + "/openapi.json") as answer:
                print("asked", answer.headers["X-Request-Id"])

        def test_passes(userd_session_server):
            ask(userd_session_server)

        @pytest.mark.parametrize("name", ["userd_server", "userd_session_server"])
        def test_fails(request, name):
            server = request.getfixturevalue(name)
            server.fail("503", "DELETE", "/users/1", "10%")
            ask(server)
            assert name == "other"
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    asked = [line.split()[-1] for line in text.splitlines() if "asked" in line and "print" not in line]
    assert len(asked) == 6
    named = [line.split(": ")[1] for line in text.splitlines() if line.startswith("request ids of this test")]
    assert [id for line in named for id in line.split(", ")] == [asked[3], asked[5]], text
    result.stdout.fnmatch_lines(
        [
            "*- userd -*",
            "userd 0.* at http://127.0.0.1:*",
            "PostgreSQL 1*, programs in /*",
            "settings: *SCHEMA=strict, *API_TOKEN=[*][*][*]*",
            "chance seed: [0-9]*",
            "the last 10 requests:",
            '*"target": "/openapi.json"*',
            "the last 50 lines of its log:",
            "*GET /openapi.json 200 *",
        ]
    )
    assert "a-secret-of-sixteen" not in text.replace('"API_TOKEN": "a-secret-of-sixteen"', "")


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
    assert explained.count("the last 50 lines of its log:") == 25, explained
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
            with pytest.raises(ValueError, match="fail nothing .*: error a command is"):
                userd_session_server.fail("nothing", "GET", "/users")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["3 requests of <userd at http*> were to fail, and have not come"])


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
    result.stdout.fnmatch_lines(
        ["*userd did not start*", "*settings: SCHEMA=none, API_TOKEN=[*][*][*], NO_SETTING=[*][*][*]", "*userd: SCHEMA: *"]
    )
    result.stdout.no_fnmatch_line("*a-secret-of-sixteen*")
    result.stdout.no_fnmatch_line("*settings:*another-secret*")


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
    for fixture in ["userd", "userd_settings", "userd_seed", "userd_server", "userd_module_server", "userd_session_server"]:
        result.stdout.re_match_lines([rf"{fixture}\b.* -- .*pytest_plugin"])
    assert "no docstring" not in "".join(line for line in result.outlines if "userd" in line)


def test_kept_data_gets_no_packaged_programs(monkeypatch):
    import userd

    monkeypatch.setattr(userd, "postgres", lambda: "/packaged")
    assert userd.programs(["--embedded", "--ephemeral"], {}) == ["--postgres", "/packaged"]
    assert userd.programs(["--embedded"], {}) == []
    assert userd.programs(["--embedded", "--ephemeral", "--postgres=/mine"], {}) == []
    assert userd.programs(["--embedded", "--ephemeral"], {"POSTGRES_BIN": "/mine"}) == []
