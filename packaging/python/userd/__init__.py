"""The command `userd`, a user-management HTTP service over PostgreSQL, and pytest's fixtures for it."""

import os
import sysconfig


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
