"""Loads that try to make userd hold memory."""

import socket
import threading

# Control characters are six bytes of JSON each: no user is larger.
LARGEST = """insert into users (name, email)
select rpad(n::text, 1000, chr(1)), rpad(n::text, 254, chr(1)) from generate_series(1, 1000) n"""


def request(line, headers="", body=""):
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{line} HTTP/1.1\r\nHost: localhost\r\n{length}{headers}\r\n{body}".encode()


PAGE = request("GET /users?perPage=1000")


class Clients:
    """Connections that are open until the end of a load."""

    def __init__(self, port):
        self.port, self.sockets, self.stop = port, [], threading.Event()

    def send(self, data):
        try:
            client = socket.create_connection(("127.0.0.1", self.port), 5)
            self.sockets.append(client)
            client.sendall(data)
            return client
        except OSError:
            return None

    def read(self, client):
        try:
            client.settimeout(20)
            while not self.stop.is_set() and client.recv(1 << 20):
                pass
        except OSError:
            pass

    def close(self):
        for client in self.sockets:
            client.close()


def heads(clients):
    for _ in range(1000):
        clients.send(b"GET /users HTTP/1.1\r\nHost: ")


def bodies(clients):
    unfinished = request("POST /users", "Content-Length: 60000\r\n") + b" " * 59_000
    for _ in range(900):
        clients.send(unfinished)


def readers(clients):
    one_page = request("GET /users?perPage=1000", "Connection: close\r\n")

    def read():
        while not clients.stop.is_set():
            if client := clients.send(one_page):
                clients.read(client)

    for _ in range(32):
        threading.Thread(target=read, daemon=True).start()


def unread(clients):
    for _ in range(300):
        clients.send(PAGE * 4)


def passwords(clients):
    for n in range(256):
        user = f'{{"name":"N","email":"n{n}@example.com","password":"correct horse"}}'
        if client := clients.send(request("POST /users", body=user)):
            threading.Thread(target=clients.read, args=(client,), daemon=True).start()


ATTACKS = {
    "1000 heads that never end": heads,
    "900 bodies that never end": bodies,
    "32 clients read pages of 1000 of the largest users": readers,
    "300 clients ask for such pages and read none": unread,
    "256 creates with a password": passwords,
}
