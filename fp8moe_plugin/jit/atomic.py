"""Creation of folders, and atomic writes of files, with any umask."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

OWNER = stat.S_IRUSR | stat.S_IWUSR


def write_whole(folder: int, name: str, content: bytes, mode: int, least: int = OWNER) -> None:
    """Create or replace a file by an atomic rename. If that fails, no temporary file remains.

    Args:
        folder: a descriptor of the folder.
        mode: permissions, to which the umask applies.
        least: permissions that the file has with any umask.
    Raises:
        OSError: the file cannot be written.
    """
    staging = f"{name}.{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(staging, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            allow(handle, least)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging, dir_fd=folder)
        raise


def write_file(path: Path, content: bytes, mode: int, least: int = OWNER) -> None:
    """Call `write_whole` for a path, whose folder need not be readable. Raises `OSError`."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_whole(folder, path.name, content, mode, least)
    finally:
        os.close(folder)


def write_output(path: Path, content: bytes) -> None:
    """Write a file that a user named: through a link, atomically, unless it is a pipe or device. Raises `OSError`."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_file(Path(os.path.realpath(path)), content, 0o666)


def make_folder(path: Path, mode: int) -> None:
    """Create a folder and its parents if they do not exist.

    Args:
        mode: permissions; parents get 0o777. The umask applies, but the owner always has full access.
    Raises:
        OSError: a folder cannot be created.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent, 0o777)
    try:
        path.mkdir(mode)
    except FileExistsError:  # another process was faster, or it is not a folder
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    allow(path, stat.S_IRWXU)


def allow(made: int | Path, permissions: int) -> None:
    """Restore permissions on a new file or folder if the umask removed them. Raises `OSError`."""
    mode = stat.S_IMODE(os.stat(made).st_mode)  # noqa: PTH116  (Path.stat does not take a descriptor)
    if permissions & ~mode:
        os.chmod(made, mode | permissions)  # noqa: PTH101
