"""Sign up, log in and out, change and reset a password: Flask in front of userd, which keeps the users.

    TRUSTED_PROXIES=127.0.0.1 userd --embedded
    pip install flask && flask --app login run

USERD_URL says where userd is, USERD_TOKEN, USERD_TOKEN_READ and USERD_TOKEN_LOGIN are its API_TOKEN, API_TOKEN_READ and
API_TOKEN_LOGIN; INSECURE=1 is for plain http on your own machine. Sessions and reset tokens are in this process's memory:
put them into a table of yours, keyed by the same hashes, to keep them or to share them.
"""

import hashlib
import json
import os
import secrets
import sys
import time
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from flask import Flask, jsonify, make_response, request

USERD = os.environ.get("USERD_URL", "http://127.0.0.1:3000")
SECURE = os.environ.get("INSECURE") != "1"
DAY, HALF_AN_HOUR = 86400, 1800

app = Flask(__name__)


class Tickets:
    """Secrets that stand for a user for some time: kept hashed, so that who reads them cannot use them."""

    def __init__(self, seconds):
        self.seconds, self.users = seconds, {}

    def issue(self, user):
        now = time.monotonic()
        self.users = {key: found for key, found in self.users.items() if found[1] > now}
        ticket = secrets.token_urlsafe(32)
        self.users[self.key(ticket)] = (user, now + self.seconds)
        return ticket

    def find(self, ticket):
        user, end = self.users.get(self.key(ticket), (None, 0))
        return user if end > time.monotonic() else None

    def take(self, ticket):
        """Finds it for the last time."""
        user = self.find(ticket)
        self.users.pop(self.key(ticket), None)
        return user

    def end_all_of(self, user):
        self.users = {key: found for key, found in self.users.items() if found[0] != user}

    @staticmethod
    def key(ticket):
        return hashlib.sha256((ticket or "").encode()).hexdigest()


sessions, resets = Tickets(DAY), Tickets(HALF_AN_HOUR)


def userd(method, path, body=None):
    """Status and JSON of userd's answer. It counts attempts by the address that this application saw, never by what a client
    says of itself. (Behind a proxy of yours, let werkzeug's ProxyFix set remote_addr first.)"""
    asked = Request(USERD + path, method=method, data=None if body is None else json.dumps(body).encode())
    asked.add_header("X-Forwarded-For", request.remote_addr)
    asked.add_header("Content-Type", "application/json")
    # The token with the least rights.
    right = "_LOGIN" if path == "/users/authenticate" else "_READ" if method == "GET" else ""
    if token := os.environ.get("USERD_TOKEN" + right, os.environ.get("USERD_TOKEN")):
        asked.add_header("Authorization", "Bearer " + token)
    try:
        with urlopen(asked, timeout=15) as answer:
            return answer.status, json.load(answer) if answer.status != 204 else None
    except HTTPError as refused:
        return refused.code, json.load(refused)


def logged_in(user, status=200):
    """A session with a new id: one that was there before the login is of no use afterwards."""
    sessions.take(request.cookies.get("session"))
    answer = make_response(jsonify(user), status)
    answer.set_cookie("session", sessions.issue(user["id"]), max_age=DAY, httponly=True, samesite="Lax", secure=SECURE)
    return answer


def refused(status, body):
    """Too many attempts, taken, invalid: userd's own status and words."""
    return jsonify(body), status


@app.get("/")
def who():
    user = sessions.find(request.cookies.get("session"))
    status, body = userd("GET", f"/users/{user}") if user else (404, None)
    return (jsonify(body), status) if status != 404 else refused(401, {"error": "Not logged in"})


@app.post("/signup")
def signup():
    form = request.form
    status, body = userd("POST", "/users", {name: form.get(name, "") for name in ("name", "email", "password")})
    return logged_in(body, 201) if status == 201 else refused(status, body)


@app.post("/login")
def login():
    form = request.form
    status, body = userd("POST", "/users/authenticate", {name: form.get(name, "") for name in ("email", "password")})
    return logged_in(body) if status == 200 else refused(status, body)


@app.post("/logout")
def logout():
    sessions.take(request.cookies.get("session"))
    answer = make_response("", 204)
    answer.delete_cookie("session", httponly=True, samesite="Lax", secure=SECURE)
    return answer


def set_password(user, password):
    """Ends every session and reset of the user: who knew the old password is out."""
    status, body = userd("PUT", f"/users/{user}", {"password": password})
    if status != 200:
        return refused(status, body)
    sessions.end_all_of(user)
    resets.end_all_of(user)
    return logged_in(body)


@app.post("/password")
def change_password():
    user = sessions.find(request.cookies.get("session"))
    status, body = userd("GET", f"/users/{user}") if user else (404, None)
    if status != 200:
        return refused(401, {"error": "Not logged in"})
    proof = {"email": body["email"], "password": request.form.get("old", "")}
    status, body = userd("POST", "/users/authenticate", proof)
    return set_password(user, request.form.get("new", "")) if status == 200 else refused(status, body)


def send(email, token):
    """Mails the link in your application. Here it is printed."""
    print(f"reset {email} {token}", file=sys.stderr, flush=True)


@app.post("/reset")
def ask_for_reset():
    """The same answer whether there is such a user or not."""
    email = request.form.get("email", "")
    status, found = userd("GET", "/users?email=" + quote(email, safe="")) if email else (400, None)
    if status == 200 and found["data"]:
        send(email, resets.issue(found["data"][0]["id"]))
    return jsonify({"message": "If there is such a user, a mail is on its way"}), 202


@app.post("/reset/<token>")
def reset(token):
    """Once: a second use finds nothing. A password that is refused costs the token as well."""
    user = resets.take(token)
    return set_password(user, request.form.get("password", "")) if user else refused(404, {"error": "Not found"})
