"""Text that comes from outside."""

from collections.abc import Iterable
from pathlib import Path

from treeflash.errors import InputError


def read_text(path: Path) -> str:
    """Reads a file of text.

    Args:
        path: The file.

    Returns:
        Its text, without a byte-order mark.

    Raises:
        InputError: When it cannot be read or is not UTF-8; the message names the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return decoded(data, path)


def decoded(data: bytes, place: object) -> str:
    """Decodes text.

    Args:
        data: UTF-8.
        place: Where it is from, for messages.

    Returns:
        The text, without a byte-order mark.

    Raises:
        InputError: When it is not UTF-8; the message names the line.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: {not_utf8(data.splitlines(keepends=True), error)}") from None


def not_utf8(lines: Iterable[bytes], error: UnicodeDecodeError) -> str:
    """Says which line is not UTF-8.

    Args:
        lines: All lines that were decoded.
        error: What decoding them raised.

    Returns:
        A clause for a message.
    """
    for number, line in enumerate(lines, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as found:
            byte = line[found.start]
            return f"line {number} is not UTF-8 (byte 0x{byte:02x} at column {found.start + 1})"
    return f"not UTF-8 ({error.reason})"
