"""A client of openapi-python-client as it comes, driven through every operation on users: each answer is compared, and what
a change did is read back. The addresses of three services are the arguments."""

import sys
from http import HTTPStatus

from userd_client import Client
from userd_client.api.users import (
    authenticate,
    create_user,
    delete_user,
    find_user,
    list_users,
    patch_user,
    update_user,
)
from userd_client.models import Authenticate, Problem, Unprocessable, User, UserChanges, UserList, UserPatch, UserToCreate


def main(url: str, parser: str, full: str) -> None:
    client = Client(base_url=url)
    ada = UserToCreate(name="Ada Lovelace", email="ada@example.com", password="correct horse")

    user = create_user.sync(client=client, body=ada)
    assert isinstance(user, User) and user.name == "Ada Lovelace"
    assert find_user.sync(user.id, client=client) == user

    taken = create_user.sync_detailed(client=client, body=ada)
    assert taken.status_code == HTTPStatus.CONFLICT
    assert isinstance(taken.parsed, Problem) and taken.parsed.error == "Already exists"
    none = UserToCreate(name="Ada", email="none")
    invalid = create_user.sync_detailed(client=client, body=none)
    assert invalid.status_code == HTTPStatus.BAD_REQUEST
    assert isinstance(invalid.parsed, Problem) and invalid.parsed.errors and invalid.parsed.errors[0].path == "/email"
    refused = create_user.sync_detailed(client=Client(base_url=parser), body=none)
    assert refused.status_code == HTTPStatus.UNPROCESSABLE_ENTITY
    assert isinstance(refused.parsed, Unprocessable)
    assert refused.parsed.errors and refused.parsed.errors[0].path == "/email"

    put = update_user.sync_detailed(user.id, client=client, body=UserChanges(name="Ada King"))
    assert isinstance(put.parsed, User) and put.parsed.name == "Ada King"
    tag = put.headers["ETag"]
    patch = UserPatch(email="countess@example.com")
    patched = patch_user.sync(user.id, client=client, body=patch, if_match=tag)
    assert isinstance(patched, User) and patched.email == "countess@example.com"
    changed = patch_user.sync_detailed(user.id, client=client, body=UserPatch(email="other@example.com"), if_match=tag)
    assert changed.status_code == HTTPStatus.PRECONDITION_FAILED
    assert isinstance(changed.parsed, Problem) and changed.parsed.error == "Precondition failed"
    again = find_user.sync(user.id, client=client)
    assert isinstance(again, User) and again.email == "countess@example.com"

    page = list_users.sync(client=client)
    assert isinstance(page, UserList) and (page.total, len(page.data)) == (1, 1)
    walk = list_users.sync(client=client, after=0)
    assert isinstance(walk, UserList) and [found.id for found in walk.data] == [user.id] and not walk.total
    found = list_users.sync(client=client, email="countess@example.com")
    assert isinstance(found, UserList) and [one.id for one in found.data] == [user.id]
    some = list_users.sync(client=client, id=[user.id])
    assert isinstance(some, UserList) and [one.id for one in some.data] == [user.id]
    assert list_users.sync_detailed(client=client, per_page=100_000).status_code == HTTPStatus.BAD_REQUEST

    proof = Authenticate(email="countess@example.com", password="correct horse")
    assert authenticate.sync(client=client, body=proof) == again
    wrong = Authenticate(email="countess@example.com", password="battery staple")
    login = authenticate.sync_detailed(client=client, body=wrong)
    assert isinstance(login.parsed, Problem) and login.parsed.error == "Invalid credentials"
    for _ in range(20):
        login = authenticate.sync_detailed(client=client, body=wrong)
    assert login.status_code == HTTPStatus.TOO_MANY_REQUESTS
    assert isinstance(login.parsed, Problem) and login.parsed.error == "Too many attempts"

    unavailable = list_users.sync_detailed(client=Client(base_url=full))
    assert unavailable.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert isinstance(unavailable.parsed, Problem) and unavailable.parsed.error == "Service unavailable"

    assert delete_user.sync_detailed(user.id, client=client).status_code == HTTPStatus.NO_CONTENT
    gone = find_user.sync_detailed(user.id, client=client)
    assert gone.status_code == HTTPStatus.NOT_FOUND
    assert isinstance(gone.parsed, Problem) and gone.parsed.error == "Not found"
    print("Python: every operation on users")


main(*sys.argv[1:])
