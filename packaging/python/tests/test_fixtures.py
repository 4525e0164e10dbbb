"""The fixtures as a test of somebody's uses them."""

import json
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest

ADA = json.dumps({"name": "Ada", "email": "ada@example.com"}).encode()


def ask(server, path, body=None):
    with urlopen(Request(server.url + path, body)) as answer:
        return answer.status, json.load(answer)


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
