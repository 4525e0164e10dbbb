"""python -m userd"""

import os
import sys

from . import command, environment

given = dict(os.environ)
os.execve(command(), ["userd", *sys.argv[1:]], environment(given) if sys.argv[1:2] == ["test"] else given)
