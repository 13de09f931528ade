"""Names that become names of files."""

import os
import unicodedata
from collections.abc import Iterable

# Bytes. A file system takes 255; what is added for a partial or a report has to fit too.
_LONGEST = 100
_FORBIDDEN = set('/\\:*?"<>|' if os.name == "nt" else "/\\:")
# Windows opens devices under these names, whatever their ending.
_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{number}" for port in ("com", "lpt") for number in range(10)),
}


def wrong_name(name: str) -> str | None:
    """What is wrong with a name that is to be the name of a file or folder.

    Args:
        name: The name.

    Returns:
        A clause for a message; None when nothing is.
    """
    found = f"found {name!r}"
    if not name:
        return "expected a name, found none"
    wrong = sorted({sign for sign in name if sign in _FORBIDDEN or not sign.isprintable()})
    if wrong:
        return f"expected a name without {' '.join(map(repr, wrong))}, {found}"
    if name[0] in ". " or name[-1] in ". ":
        return f"expected a name that neither begins nor ends with a dot or a space, {found}"
    if name.partition(".")[0].casefold() in _DEVICES:
        return f"expected another name, because Windows reserves it, {found}"
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > _LONGEST:
        return f"expected a name of at most {_LONGEST} bytes, found {size} in {name[:20]!r}..."
    return None


def wrong_names(names: Iterable[str]) -> list[str]:
    """What is wrong with names that are to be those of files in one folder.

    Args:
        names: The names, each once.

    Returns:
        A clause for each that is wrong.
    """
    faults, seen = [], dict[str, str]()
    for name in names:
        fault = wrong_name(name)
        if fault is not None:
            faults.append(fault)
            continue
        # Some file systems tell neither case nor ways to write an accent apart.
        alike = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if alike != name:
            faults.append(f"expected names that differ in more than case, found {alike!r} and {name!r}")
    return faults
