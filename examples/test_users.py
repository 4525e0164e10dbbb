"""A test with Python's standard library: userd test -- python3 test_users.py"""

import json
import os
import unittest
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

# A proxy of the environment cannot reach this machine's ports.
DIRECT = build_opener(ProxyHandler({}))


def ask(method, url, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        with DIRECT.open(Request(url, data, method=method)) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


class Users(unittest.TestCase):
    def setUp(self):
        # A service of this test alone; settings and users may be in the object.
        status, service = ask("POST", os.environ["USERD_CONTROL"] + "/services", {"settings": {}, "users": []})
        self.assertEqual(status, 201, service)
        self.users = service["url"] + "/users"
        self.addCleanup(ask, "DELETE", service["control"])

    def test_a_life(self):
        ada = {"name": "Ada Lovelace", "email": "ada@example.com"}
        status, created = ask("POST", self.users, ada)
        self.assertEqual((status, created["name"]), (201, "Ada Lovelace"))
        self.assertEqual(ask("POST", self.users, ada), (409, {"error": "Already exists"}))
        url = f"{self.users}/{created['id']}"
        self.assertEqual(ask("PUT", url, {"name": "Ada King"})[1]["name"], "Ada King")
        self.assertEqual(ask("DELETE", url), (204, None))
        self.assertEqual(ask("GET", url), (404, {"error": "Not found"}))

    def test_a_page(self):
        for number in range(3):
            ask("POST", self.users, {"name": "Someone", "email": f"{number}@example.com"})
        status, page = ask("GET", self.users + "?perPage=2")
        self.assertEqual((status, len(page["data"]), page["hasMorePages"]), (200, 2, True))


if __name__ == "__main__":
    unittest.main()
