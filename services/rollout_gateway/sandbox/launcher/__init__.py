"""The program between the gateway and the code: a process that shuts the code in, watches it and
tells what came of it.

Runs as `python -I -S` with the standard library alone, so it imports nothing of the gateway. Four
processes at most:

    launcher    outside; reads the request, drains the output, keeps the wall clock, kills
      broker    only with namespaces: enters them, so that its child is process 1 there
        guard   makes the private file system, waits for the code, reports how it ended
          code  gives up ids, capabilities, files and system calls, then becomes a fresh interpreter
"""
