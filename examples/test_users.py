"""A test with Python's standard library: python3 test_users.py. USERD names the program."""

import json
import os
import subprocess
import unittest
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class Users(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # A database of its own; the service ends when this process does, however it does.
        command = [os.environ.get("USERD", "userd"), "--embedded", "--ephemeral", "--port=0", "--with-parent"]
        # A child of this process may keep the pipe open.
        command.append(f"--with-parent={os.getpid()}")
        # No variable of the environment that it might take for a setting: HOST, for one, which conda sets.
        settings = {"PATH": os.environ["PATH"], "LOG_LEVEL": "warn"}
        cls.userd = subprocess.Popen(
            command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = cls.userd.stdout.readline()
        assert line.startswith("listening on "), "userd says why on its standard error"
        cls.url = line.split()[-1]

    @classmethod
    def tearDownClass(cls):
        cls.userd.communicate()
        assert cls.userd.returncode == 0

    def ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, method=method)) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def test_a_life(self):
        ada = {"name": "Ada Lovelace", "email": "ada@example.com"}
        status, created = self.ask("POST", "/users", ada)
        self.assertEqual((status, created["name"]), (201, "Ada Lovelace"))
        self.assertEqual(self.ask("POST", "/users", ada), (409, {"error": "Already exists"}))
        path = "/users/" + created["id"]
        self.assertEqual(self.ask("PUT", path, {"name": "Ada King"})[1]["name"], "Ada King")
        self.assertEqual(self.ask("DELETE", path), (204, None))
        self.assertEqual(self.ask("GET", path), (404, {"error": "Not found"}))

    def test_a_page(self):
        for number in range(3):
            self.ask("POST", "/users", {"name": "Someone", "email": f"{number}@example.com"})
        status, page = self.ask("GET", "/users?perPage=2")
        self.assertEqual((status, len(page["data"]), page["hasMorePages"]), (200, 2, True))


if __name__ == "__main__":
    unittest.main()
