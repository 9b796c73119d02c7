"""Making folders, and writing a file whole or not at all, whatever the umask."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path


def write_whole(folder: int, name: str, content: bytes, mode: int) -> None:
    """Put a file into its place by an atomic rename, over whatever is there, and leave nothing behind if that fails.

    Args:
        folder: descriptor of the folder.
        mode: permissions. The umask takes its part, but the owner can always read and write the file.
    Raises:
        OSError: it cannot be written.
    """
    staging = f"{name}.{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(staging, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            allow_owner(handle, stat.S_IRUSR | stat.S_IWUSR)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging, dir_fd=folder)
        raise


def write_file(path: Path, content: bytes, mode: int) -> None:
    """`write_whole` for a path. Its folder need not be readable. Raises `OSError`."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_whole(folder, path.name, content, mode)
    finally:
        os.close(folder)


def make_folder(path: Path, mode: int) -> None:
    """Make a folder, and its parents, unless it is there.

    Args:
        mode: permissions; those of parents are 0o777. The umask takes its part, but not the owner's.
    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent, 0o777)
    try:
        path.mkdir(mode)
    except FileExistsError:  # made meanwhile, or no folder
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    allow_owner(path, stat.S_IRWXU)


def allow_owner(made: int | Path, permissions: int) -> None:
    """Give back what the umask has taken from the owner of a file or folder that was just made. Raises `OSError`."""
    mode = stat.S_IMODE(os.stat(made).st_mode)  # noqa: PTH116  (Path's takes no descriptor)
    if permissions & ~mode:
        os.chmod(made, mode | permissions)  # noqa: PTH101
