"""The fixtures as a test of somebody's uses them."""

import json
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


@pytest.mark.parametrize("_", range(2))
def test_each_test_has_a_fresh_database(userd_server, _):
    status, created = ask(userd_server, "/users", ADA)
    assert (status, created["id"]) == (201, "1")
    assert ask(userd_server, "/users/1") == (200, created)


class TestSettings:
    @pytest.fixture
    def userd_settings(self):
        return {"MAX_PER_PAGE": "7"}

    def test_settings(self, userd_server):
        assert ask(userd_server, "/users")[1]["perPage"] == 7


def test_the_command(userd):
    assert subprocess.check_output([userd, "--version"], text=True).startswith("userd ")
    subprocess.check_call([sys.executable, "-m", "userd", "--version"])


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
