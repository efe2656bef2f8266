"""Ends a run after its step: on SIGTERM, which machines that are taken away send, on SIGINT (Ctrl-C), and on SIGHUP,
which a terminal sends that is closed."""

import contextlib
import os
import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # not on Windows
NOTICE = b"\nthe run ends after this step, an evaluation under way and a save; a second signal ends it at once\n"


class StopSignal:
    """Notes a signal during the block. A second one ends the process at once, without saving."""

    def __init__(self, dist):
        self.dist, self.number, self.before = dist, 0, {}

    def __enter__(self):
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells ask for that
                self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, kind, *_):
        if kind is not None and self.dist.world > 1:
            return  # a rank has failed: the SIGTERM of torchrun must not end this one before it has told why
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        """The handler. The default action of a second signal reaches a process that waits for other ranks too."""
        self.number = number
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)
        if self.dist.is_main:
            with contextlib.suppress(OSError):  # of a terminal that was closed
                os.write(2, NOTICE)  # print is not safe in a handler

    def came(self):
        """The name of the signal that any rank got so far, or None: the same on every rank, all of which must call."""
        number = self.dist.agree(self.number)
        return signal.Signals(number).name if number else None
