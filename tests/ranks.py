"""Runs a script on several ranks of this machine, as torchrun does, but imports what they need once, for all of them.

python tests/ranks.py RANKS SCRIPT [arguments of the script]
No rank is ended by this script: it waits for all of them, and its exit code is that of the first that failed.
"""

import os
import runpy
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import grpo.train_grpo  # noqa: F401 the ranks need it


def main(ranks, script, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(int(ranks)):
        process = os.fork()
        if process == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
        started.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
