"""python -m userd"""

import os
import sys

from . import command

path = command()
os.execv(path, [path, *sys.argv[1:]])
