"""Reset, failures and time on command: pytest test_faults.py, where userd is installed."""
import json
import pytest
from urllib.request import Request, urlopen

def create(server, name, **fields):
    user = {"name": name, "email": f"{name}@example.com"}
    return json.load(urlopen(Request(server.url + "/users", json.dumps(user).encode(), fields)))

def test_reset(userd_server):
    create(userd_server, "ada")
    userd_server.reset()
    assert create(userd_server, "ada")["id"] == "1"

def test_fail(userd_server):
    userd_server.fail("answer-lost", "POST", "/users")
    with pytest.raises(ConnectionError):
        create(userd_server, "ada", **{"Idempotency-Key": "a-key"})
    assert create(userd_server, "ada", **{"Idempotency-Key": "a-key"})["id"] == "1"

def test_advance(userd_server):
    create(userd_server, "ada", **{"Idempotency-Key": "a-key"})
    userd_server.advance(24 * 3600)
    assert create(userd_server, "grace", **{"Idempotency-Key": "a-key"})["id"] == "2"
