"""Tries both applications, with a userd of their own: check.py USERD NODE (Flask is that of this Python)."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from urllib.parse import urlencode

HERE = os.path.dirname(os.path.abspath(__file__))
OLD, NEW, NEWEST, WRONG = "correct horse", "battery staple", "purple elephant", "no such thing"
RIGHTS = ("TOKEN", "TOKEN_READ", "TOKEN_LOGIN")
VICTIM, ATTACKER, OTHER = "127.0.0.3", "127.0.0.2", "127.0.0.4"


class Browser:
    """One client, at an address of its own, with its cookie."""

    def __init__(self, port, address):
        self.port, self.address, self.cookie, self.flags = port, address, None, ""

    def ask(self, method, path, _fields=None, **form):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20, source_address=(self.address, 0))
        fields = {"Content-Type": "application/x-www-form-urlencoded", **(_fields or {})}
        if self.cookie:
            fields["Cookie"] = "session=" + self.cookie
        connection.request(method, path, urlencode(form) if form else None, fields)
        answer = connection.getresponse()
        text = answer.read()
        found = re.match(r"session=([^;]*);(.*)", answer.getheader("Set-Cookie") or "")
        if found:
            self.cookie, self.flags = found[1].strip('"'), found[2]
        connection.close()
        return answer.status, json.loads(text) if text else None


def check(port, userd_port, mails):
    ada = {"name": "Ada", "email": "ada@example.com"}
    victim, attacker = Browser(port, VICTIM), Browser(port, ATTACKER)
    assert victim.ask("GET", "/")[0] == 401
    status, user = victim.ask("POST", "/signup", **ada, password=OLD)
    assert (status, user["email"]) == (201, ada["email"])
    for flag in ("HttpOnly", "SameSite=Lax", "Secure"):
        assert flag in victim.flags, victim.flags
    assert victim.ask("GET", "/") == (200, user)
    assert attacker.ask("POST", "/signup", **ada, password=OLD)[0] == 409
    assert attacker.ask("POST", "/signup", name="x", email="x@example.com", password="short")[0] == 400

    # A login is a new session, and ends the one that was there; a logout ends it.
    before = victim.cookie
    assert victim.ask("POST", "/login", email="ADA@example.com", password=OLD) == (200, user)
    assert victim.cookie != before
    stale = Browser(port, VICTIM)
    stale.cookie = before
    assert stale.ask("GET", "/")[0] == 401
    stale.cookie = victim.cookie
    assert victim.ask("POST", "/logout")[0] == 204 and victim.ask("GET", "/")[0] == 401
    assert stale.ask("GET", "/")[0] == 401

    # Whoever guesses is stopped, and nobody else is, whatever they say of themselves.
    guesses = [attacker.ask("POST", "/login", **{"email": ada["email"], "password": WRONG})[0] for _ in range(11)]
    assert guesses == [401] * 10 + [429], guesses
    for hidden in (OTHER, "198.51.100.9"):
        fields = {"X-Forwarded-For": hidden}
        assert attacker.ask("POST", "/login", fields, email=ada["email"], password=WRONG)[0] == 429
    assert victim.ask("POST", "/login", email=ada["email"], password=OLD) == (200, user)
    assert Browser(port, OTHER).ask("POST", "/login", email=ada["email"], password=WRONG)[0] == 401

    # A change needs the old password, and ends the other sessions.
    second = Browser(port, OTHER)
    assert second.ask("POST", "/login", email=ada["email"], password=OLD)[0] == 200
    assert victim.ask("POST", "/password", old=WRONG, new=NEW)[0] == 401
    assert victim.ask("POST", "/password", old=OLD, new="short")[0] == 422
    assert second.ask("GET", "/")[0] == 200
    assert victim.ask("POST", "/password", old=OLD, new=NEW)[0] == 200
    assert victim.ask("GET", "/")[0] == 200 and second.ask("GET", "/")[0] == 401
    assert second.ask("POST", "/password", old=NEW, new=OLD)[0] == 401
    assert second.ask("POST", "/login", email=ada["email"], password=NEW)[0] == 200

    # A reset: nothing tells whether there is such a user; each token works once, and ends all sessions.
    known = second.ask("POST", "/reset", email=ada["email"])
    assert known == second.ask("POST", "/reset", email="nobody@example.com") and known[0] == 202
    sent = mails(1)
    assert second.ask("POST", "/reset", email=ada["email"])[0] == 202
    first, last = mails(2)
    assert sent == [first] and first[0] == last[0] == ada["email"]
    attacker.cookie = None
    assert attacker.ask("POST", "/reset/" + "x" * 43, password=WRONG)[0] == 404
    fresh = Browser(port, VICTIM)
    assert fresh.ask("POST", "/reset/" + last[1], password=NEWEST)[0] == 200
    assert fresh.ask("GET", "/")[0] == 200
    for token in (first[1], last[1]):
        assert second.ask("POST", "/reset/" + token, password=OLD)[0] == 404
    assert second.ask("GET", "/")[0] == 401 and victim.ask("GET", "/")[0] == 401
    assert victim.ask("POST", "/login", email=ada["email"], password=NEW)[0] == 401
    assert victim.ask("POST", "/login", email=ada["email"], password=NEWEST)[0] == 200

    # A user who is deleted is out.
    connection = http.client.HTTPConnection("127.0.0.1", userd_port, timeout=20)
    connection.request("DELETE", "/users/" + user["id"], headers={"Authorization": "Bearer a-secret-TOKEN"})
    assert connection.getresponse().status == 204
    assert victim.ask("GET", "/")[0] == 401


def main(userd, node):
    keep = ("PATH", "POSTGRES_BIN")
    base = {name: os.environ[name] for name in keep if name in os.environ}
    for name, command in (
        ("Flask", [sys.executable, "-m", "flask", "--app", os.path.join(HERE, "login.py"), "run", "--port"]),
        ("Node", [node, os.path.join(HERE, "login.mjs")]),
    ):
        with tempfile.TemporaryFile("w+") as log, socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            free.close()
            given = {"TRUSTED_PROXIES": "127.0.0.1", "LOG_LEVEL": "info"} | {f"API_{name}": f"a-secret-{name}" for name in RIGHTS}
            service_log = tempfile.TemporaryFile("w+")
            service = subprocess.Popen(
                [userd, "test", *(f"--set={name}={value}" for name, value in given.items())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=service_log, text=True,
            )
            url = service.stdout.readline().strip().partition("=")[2]
            application = subprocess.Popen(
                command + ([str(port)] if name == "Flask" else []),
                env={**base, "USERD_URL": url, "PORT": str(port)} | {f"USERD_{name}": f"a-secret-{name}" for name in RIGHTS},
                stdout=log, stderr=log,
            )

            def said():
                log.seek(0)
                return log.read()

            def mails(count):
                for _ in range(100):
                    found = re.findall(r"^reset (\S+) (\S+)$", said(), re.M)
                    if len(found) >= count:
                        return found
                    time.sleep(0.05)
                raise AssertionError("no mail")

            try:
                for _ in range(200):
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        time.sleep(0.05)
                check(port, int(url.rsplit(":", 1)[1]), mails)
                text = said()
                assert not any(secret in text for secret in (OLD, NEW, NEWEST, WRONG)), text
                print(f"{name}: all as it should be")
            except BaseException:
                print(said(), file=sys.stderr)
                raise
            finally:
                application.terminate()
                application.wait()
                service.stdin.close()
                assert service.wait() == 0
            # Each request has carried the token with the least rights.
            service_log.seek(0)
            seen = set(re.findall(r"(\w+) /users(/authenticate)?\S* \d{3} .* token=(\w*) ", service_log.read()))
            change = {(method, "", "full") for method in ("POST", "PUT", "DELETE")}
            assert seen == change | {("GET", "", "read"), ("POST", "/authenticate", "login")}, seen


main(*sys.argv[1:])
