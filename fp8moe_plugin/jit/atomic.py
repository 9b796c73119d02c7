"""Writing a file whole or not at all."""

import contextlib
import os
import secrets


def write_whole(folder: int, name: str, content: bytes, mode: int) -> None:
    """Put a file into its place by an atomic rename, over whatever is there, and leave nothing behind if that fails.

    Args:
        folder: descriptor of the folder.
        mode: permissions, of which the umask takes its part.
    Raises:
        OSError: it cannot be written.
    """
    staging = f"{name}.{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(staging, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging, dir_fd=folder)
        raise
