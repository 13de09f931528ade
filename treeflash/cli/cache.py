"""`treeflash cache`: what is kept on this machine because it takes long to make."""

import shutil
from pathlib import Path

import click
from rich.filesize import decimal

from treeflash.cli.suggestions import Group
from treeflash.errors import InputError, nearest
from treeflash.files import cache_folder


@click.group(cls=Group)
def cache() -> None:
    """List or clear what is kept to be used again: converted models, and what passes of models cost."""


@cache.command("list")
def list_entries() -> None:
    """List what is kept, with sizes, and where."""
    folder = cache_folder()
    for entry in _entries(folder):
        click.echo(f"{entry.name}  {decimal(_size(entry))}")
    click.echo(f"in {folder}" if folder.is_dir() else f"nothing is kept: there is no {folder} yet")


@cache.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(names: tuple[str, ...], yes: bool) -> None:
    """Delete NAMEs, or everything that is kept. It is made again when it is needed."""
    folder = cache_folder()
    entries = {entry.name: entry for entry in _entries(folder)}
    for name in names:
        if name not in entries:
            raise InputError(f"{folder} keeps nothing called {name!r}{nearest(name, entries)}")
    chosen = [entries[name] for name in dict.fromkeys(names)] if names else list(entries.values())
    if not chosen:
        click.echo(f"nothing is kept in {folder}")
        return
    said = f"{', '.join(entry.name for entry in chosen)} ({decimal(sum(map(_size, chosen)))}) from {folder}"
    if not yes:
        click.confirm(f"Delete {said}?", abort=True)
    for entry in chosen:
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        except OSError as error:
            raise InputError(f"{entry}: cannot be deleted ({error.strerror})") from None
    click.echo(f"deleted {said}")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(entry: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = entry.rglob("*") if entry.is_dir() else [entry]
    return sum(file.stat().st_size for file in files if file.is_file())
