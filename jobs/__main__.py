"""The program's entry, which handles signals during the command line's imports (they take a second).

It also ends the program if nobody reads its output any more, as with `| head -1`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any, NoReturn

from conf.files import OWNER_ALONE
from jobs.unread import redirect_to_null


def main() -> None:
    """The console entry point. Exit status: that of `jobs.cli.main`, or 128 plus the number of a signal.

    After SIGINT that is 130, after a closed output pipe 141; neither prints anything.
    """
    os.umask(OWNER_ALONE)  # before anything is written; Spark's JVM and Python workers have it from here
    # Handlers are set because the first process in a container ignores signals without one; there SIGTERM keeps its
    # handler until a command sets its own. They don't raise, since some imported modules catch all exceptions. Signals
    # that are ignored stay ignored.
    default: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = [number for number, handler in default.items() if signal.getsignal(number) == handler]
    for number in ours:
        signal.signal(number, _end)
    was_read = not _is_discarded()
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
        if isinstance(end.__context__, BrokenPipeError):  # typer turns any of them into SystemExit
            _broken(end.__context__, was_read)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError as error:
            _broken(error, was_read)
        except OSError as error:
            redirect_to_null(sys.stdout.fileno())
            sys.exit(f"error: the output can't be written: {error.strerror}")
        raise


def _end(number: int, frame: object) -> NoReturn:
    os._exit(128 + number)


def _broken(error: BrokenPipeError, was_read: bool) -> NoReturn:
    """Ends the program after a broken pipe, silently if that is stdout or stderr.

    Args:
        error: the error.
        was_read: whether stdout was something else than the null device at the start.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    if not unread and not (was_read and _is_discarded()):  # rich redirects a broken stdout to the null device
        sys.exit(f"error: {error} (unexpected: a connection was closed)")
    for descriptor in unread:
        redirect_to_null(descriptor)
    sys.exit(128 + signal.SIGPIPE)


def _is_discarded() -> bool:
    """Whether stdout is closed or the null device."""
    try:
        return os.path.samestat(os.fstat(1), os.stat(os.devnull))
    except OSError:
        return True  # it is closed


if __name__ == "__main__":
    main()
