"""The encoded table read back on the CPU: what the kernel finds in the words of each row.

    view = TableView(schedule)
    view.rows[5]["dst"], view.rows[5].number("eps"), view.rows[5].subject("weight")

Addresses of weights and pools are numbers that lead back to what they stand for (`subject`), so that validator and
emulator check the words that the kernel reads and not the rows that these were made from.
"""

import struct

from cute_megakernel.encode import Encoder
from cute_megakernel.recording import Pool
from cute_megakernel.schedule import Schedule
from cute_megakernel.table import FIELD, WIDE


class Fields:
    """One row of the table."""

    def __init__(self, words: list[int], subjects: list[tuple]):
        self.words, self._subjects = words, subjects

    def __getitem__(self, name: str) -> int:
        """A field as a signed number; a 64-bit one whole."""
        at = FIELD[name]
        if name in WIDE:
            return (self.words[at] & 0xFFFFFFFF) | (self.words[at + 1] << 32)
        return self.words[at]

    def number(self, name: str) -> float:
        """A float32 field."""
        return struct.unpack("<f", struct.pack("<i", self.words[FIELD[name]]))[0]

    def subject(self, name: str):
        """What the address in a 64-bit field stands for, None where there is none."""
        return self._subjects[self[name]][1]

    def kind(self, name: str) -> str:
        """Which form of the subject is there: an image of a weight, a pool, a list."""
        return self._subjects[self[name]][0]


class TableView:
    """All rows of a schedule, encoded and read back."""

    def __init__(self, schedule: Schedule, taps: bool = False):
        self._subjects: list[tuple] = [("nothing", None)]  # address 0
        encoder = Encoder(schedule, self._address, taps)
        self.rows = [Fields(encoder.words(row), self._subjects) for row in schedule.rows]

    def _address(self, what: str, subject) -> int:
        if isinstance(subject, Pool) and what != "pool":
            return {"pool stride": 1, "pool count": subject.shape[0], "page size": subject.shape[1]}[what]
        if what in ("row bytes", "expert bytes"):  # of a weight that lies together
            kind, weight = subject
            *_, n, c = weight.shape if kind != "absorb" else (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])
            return -(-c // 32) * 64 * (1 if what == "row bytes" else -(-n // 8) * 8)
        if what == "int64":
            subject = [self._subjects[address][1] for address in subject]
        self._subjects.append((what, subject))
        return len(self._subjects) - 1
