"""Fixtures for pytest: the command, and a service on a fresh database for each test.

The machine needs PostgreSQL's programs (on Debian: apt-get install postgresql); no server has to run.
"""

import os
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


@pytest.fixture
def userd_settings():
    """Environment variables for `userd_server`, such as {"SCHEMA": "strict"}: override it to set some."""
    return {}


@pytest.fixture
def userd_server(userd, userd_settings):
    """A service of this test alone, on a free port and a fresh database; both are gone afterwards."""
    # It ends with its standard input, and so with this process, however that ends.
    arguments = [userd, "--embedded", "--ephemeral", "--port=0", "--with-parent"]
    settings = {"LOG_LEVEL": "warn", **os.environ, **userd_settings}
    with subprocess.Popen(
        arguments, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            pytest.fail("userd did not start; its standard error says why", pytrace=False)
        yield Server(line.split()[-1])
        process.communicate()
