"""The program's entry: light, so that a signal finds it ready before the command line's imports, which take a second.

It is also where the program ends when nobody reads its output any more, as with `| head -1`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any, NoReturn

from jobs.unread import write_nowhere


def main() -> None:
    """The console entry point. Exit status: that of `jobs.cli.main`, or 128 and the number of a signal.

    SIGINT gives 130 and no further word, output that nobody reads any more 141.
    """
    # By handlers, for in a container the first process ignores a signal that has none; there SIGTERM keeps its handler
    # until a command sets its own. They raise nothing: some of what is imported catches all exceptions. What is to be
    # ignored stays so.
    default: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = [number for number, handler in default.items() if signal.getsignal(number) == handler]
    for number in ours:
        signal.signal(number, _end)
    was_read = not _leads_nowhere()
    try:
        from jobs.cli import main as command_line

        for number in ours:
            if number != signal.SIGTERM or os.getpid() != 1:
                signal.signal(number, default[number])
        command_line()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError as error:
        _broken(error, was_read)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer ends by itself for any of them, without a word
            _broken(end.__context__, was_read)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError as error:
            _broken(error, was_read)
        except OSError as error:
            write_nowhere(sys.stdout.fileno())
            sys.exit(f"error: the output can't be written: {error.strerror}")
        raise


def _end(number: int, frame: object) -> NoReturn:
    os._exit(128 + number)


def _broken(error: BrokenPipeError, was_read: bool) -> NoReturn:
    """Ends the program after a broken pipe: without a word if it is stdout or stderr.

    Args:
        was_read: stdout led somewhere at the start.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    if not unread and not (was_read and _leads_nowhere()):  # rich has seen to it already
        sys.exit(f"error: {error} (unexpected: a connection was closed)")
    for descriptor in unread:
        write_nowhere(descriptor)
    sys.exit(128 + signal.SIGPIPE)


def _leads_nowhere() -> bool:
    """Whether what is written to stdout is thrown away."""
    try:
        return os.path.samestat(os.fstat(1), os.stat(os.devnull))
    except OSError:
        return True  # it is closed


if __name__ == "__main__":
    main()
