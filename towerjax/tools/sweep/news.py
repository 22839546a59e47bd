"""What does a person see of a sweep? How many are done, and how long the rest takes."""

import time

from towerjax.loop.progress import Display, format_seconds


class News:
    """Tells of each result of a sweep as it begins and ends."""

    def __init__(self, display: Display, total: int, done: int, what: str) -> None:
        self._display, self._total, self._before = display, total, done
        self._done, self._start_s, self._what = done, time.monotonic(), what
        if done:
            display.note(f"{done} of {total} {what}s were done before")

    def starts(self, text: str) -> None:
        """One begins."""
        here = self._done - self._before
        number = min(self._done + 1, self._total)
        words = [f"{self._what} {number}/{self._total}  {text}"]
        if 0 < here and self._done < self._total:
            each_s = (time.monotonic() - self._start_s) / here
            left_s = each_s * (self._total - self._done)
            words.append(f"{format_seconds(left_s)} left")
        self._display.show(self._done, self._total, "  ".join(words))

    def ends(self, note: str = "") -> None:
        """One is done."""
        self._done += 1
        if note:
            self._display.note(note)
        if self._done == self._total:
            self.starts("done")

    def close(self) -> None:
        """Leave the screen in order."""
        self._display.close()
