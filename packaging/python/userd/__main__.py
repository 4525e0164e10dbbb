"""python -m userd"""

import os
import sys

from . import command, programs

path = command()
os.execv(path, [path, *sys.argv[1:], *programs(sys.argv[1:], dict(os.environ))])
