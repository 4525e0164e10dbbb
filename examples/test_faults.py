"""States, requests, failures and time on command: pytest test_faults.py, where userd is installed."""
import json
import pytest
from time import monotonic
from urllib.request import Request, urlopen

def create(server, name, **fields):
    user = {"name": name, "email": f"{name}@example.com"}
    return json.load(urlopen(Request(server.url + "/users", json.dumps(user).encode(), fields)))

def test_reset(userd_server):
    create(userd_server, "ada")
    userd_server.reset()
    assert create(userd_server, "ada")["id"] == "1"

def test_save_and_restore(userd_server):
    create(userd_server, "ada")
    userd_server.save("one_user")
    create(userd_server, "grace")
    userd_server.restore("one_user")
    assert create(userd_server, "alan")["id"] == "2"

def test_requests(userd_server):
    create(userd_server, "ada", Authorization="Bearer secret")
    [request] = userd_server.requests("POST", "/users")
    assert request["headers"]["authorization"] == "***" and request["body"]["name"] == "ada"

def test_slow(userd_server):
    userd_server.fail("slow", "POST", "/users", seconds=0.1)
    start = monotonic()
    create(userd_server, "ada")
    assert monotonic() - start >= 0.1

def test_several_users_by_id(userd_server):
    for name in ["ada", "grace", "alan"]:
        create(userd_server, name)
    found = json.load(urlopen(userd_server.url + "/users?id=3&id=1&id=9"))["data"]
    assert [user["name"] for user in found] == ["ada", "alan"]

def test_fail(userd_server):
    userd_server.fail("answer-lost", "POST", "/users")
    with pytest.raises(ConnectionError):
        create(userd_server, "ada", **{"Idempotency-Key": "a-key"})
    assert create(userd_server, "ada", **{"Idempotency-Key": "a-key"})["id"] == "1"

def test_advance(userd_server):
    create(userd_server, "ada", **{"Idempotency-Key": "a-key"})
    userd_server.advance(24 * 3600)
    assert create(userd_server, "grace", **{"Idempotency-Key": "a-key"})["id"] == "2"
