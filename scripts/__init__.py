"""Entry points, run as ``python -m scripts.NAME`` from the checkout."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The interpreter is about to import a command of ours, and nothing of ours has run yet.
    from scripts._interrupt import end_quietly_while_importing

    end_quietly_while_importing()
