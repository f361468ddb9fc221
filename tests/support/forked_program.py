"""``forked_program.py MODULE ARGUMENTS``: runs ``python -m MODULE ARGUMENTS`` in a process of the fork server. With the
name of a file ``*.py`` in place of the module, it runs ``python -P FILE``.

The fork server does not pass on the id and the exit status of the process, so the files ``trainer`` and ``status`` of
the current directory get them.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.remove(os.path.dirname(sys.argv[0]))  # the folder of this file has modules of tests
    Path("trainer").write_text(str(os.getpid()))
    file, status = Path("status").absolute(), 1
    sys.argv = sys.argv[1:]
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        file.write_text(str(status))
