"""The error of a schedule that would not compute its step."""

from cute_megakernel.rows import Row


class ScheduleError(ValueError):
    """A schedule that loses, repeats or misorders work, or does not fit the machine; names the row."""


def expect(condition: bool, where: str, message: str) -> None:
    if not condition:
        raise ScheduleError(f"{where}: {message}")


def label(number: int, row: Row) -> str:
    return f"row {number} ({row.name}, {row.code.name})"
