"""Files that are whole or not there: written under another name, synced to disk, then renamed."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from typing import TextIO

WRITING = ".writing"
REPLACED = ".replaced"
CHUNK_BYTES = 2**24


def replace_folder(folder: str) -> None:
    """Give `folder` + ".writing" its name, durably; an older folder of the name goes once the new one is in place."""
    sync_tree(folder + WRITING)
    shutil.rmtree(folder + REPLACED, ignore_errors=True)
    if os.path.exists(folder):
        os.rename(folder, folder + REPLACED)
    os.rename(folder + WRITING, folder)
    sync_to_disk(os.path.dirname(os.path.abspath(folder)))
    shutil.rmtree(folder + REPLACED, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A file to write text to, which takes the place of `path` once it is whole and on disk: an error, a full disk or a
    kill before that leaves the older one as it was."""
    with open(path + WRITING, "w", encoding="utf-8") as file:
        yield file
    sync_to_disk(path + WRITING)
    os.replace(path + WRITING, path)


def files_below(folder: str) -> list[str]:
    """Paths of all files, relative to `folder`, sorted."""
    return sorted(os.path.relpath(os.path.join(base, name), folder)
                  for base, _, names in os.walk(folder) for name in names)


def sync_tree(folder: str) -> None:
    """Everything in `folder` is on disk: files, and the names in each folder."""
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_to_disk(os.path.join(base, name))
        sync_to_disk(base)


def sync_to_disk(path: str) -> None:
    """The file's bytes, or the folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: str) -> str:
    """Checksum of a file's bytes, as sha256sum prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
