"""Fixtures for pytest: the command, and a service on a fresh database for each test.

The machine needs PostgreSQL's programs (on Debian: apt-get install postgresql); no server has to run.
"""

import os
import re
import subprocess

import pytest

from . import command


class Server:
    """A running service. `url` is its address, as in `http://127.0.0.1:41234`."""

    def __init__(self, url):
        self.url = url

    def __repr__(self):
        return f"<userd at {self.url}>"


@pytest.fixture(scope="session")
def userd():
    """The path of the command."""
    return command()


@pytest.fixture(scope="session")
def _environment(userd):
    """That of this process without userd's variables: conda sets HOST, and others come from whoever runs the tests."""
    manual = subprocess.run([userd, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    ours = re.findall(r"^  ([A-Z_]+) ", manual.partition("Environment variables")[2], re.MULTILINE)
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture
def userd_settings():
    """Variables for `userd_server`, such as {"SCHEMA": "strict"}: override it to set some. It gets none of userd's from
    the environment."""
    return {}


@pytest.fixture
def userd_server(userd, userd_settings, _environment):
    """A service of this test alone, on a free port and a fresh database; both are gone afterwards. The test fails where
    it did not end well."""
    # It ends with its standard input, and so with this process, however that ends.
    arguments = [userd, "--embedded", "--ephemeral", "--port=0", "--with-parent"]
    settings = {**_environment, "LOG_LEVEL": "warn", **userd_settings}
    with subprocess.Popen(
        arguments, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            pytest.fail("userd did not start; its standard error says why", pytrace=False)
        yield Server(line.split()[-1])
        process.communicate()
    if process.returncode != 0:
        pytest.fail(f"userd ended with {process.returncode}; its standard error says why", pytrace=False)
