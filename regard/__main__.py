"""The command `regard`, also as `python -m regard`. It handles Ctrl-C before anything large is imported."""

import os
import signal
import sys
import threading
from typing import Any


def main() -> int:
    """Return the exit code: see regard.cli.app."""
    main_thread = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # neither ignored nor a host's
    if main_thread and default_handler:
        signal.signal(signal.SIGINT, _stop)
    from regard.cli import main as run

    code = run()
    if main_thread and default_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; torch takes a moment to unload
    return code


def _stop(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt; but until torch is imported, exit at once: nothing can be lost yet, and a library in the
    middle of its import could swallow the exception."""
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        signal.default_int_handler(number, frame)
    os.write(2, b"regard: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
