"""A disk that fails when told to: a small library, loaded before libc, that refuses writes to ``.kvc`` files.

Full and read-only file systems cannot be mounted without being root. So the calls below the program fail as the kernel would
let them fail, and everything above is the real code.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from subjects.errors import CarpoolError

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The errno that the control file holds; 0 while the disk is well. */
static int told(void) {
    const char *path = getenv("CARPOOL_SICK_DISK");
    char text[16] = {0};
    int saved = errno, number = 0, fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        if (read(fd, text, sizeof text - 1) > 0) number = atoi(text);
        close(fd);
    }
    errno = saved;
    return number;
}

static int ours(const char *path) {
    size_t length = strlen(path);
    return length > 4 && strcmp(path + length - 4, ".kvc") == 0;
}

static int fails(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (!ours(path)) return 0;
    int number = told();
    if (number) errno = number;
    return number;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) { return fails(fd) ? -1 : NEXT(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return fails(fd) ? -1 : NEXT(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails(fd) ? -1 : NEXT(pwrite64)(fd, data, size, at);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    return fails(fd) ? -1 : NEXT(pwritev)(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    return fails(fd) ? -1 : NEXT(pwritev64)(fd, parts, count, at);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    return fails(fd) ? -1 : NEXT(pwritev2)(fd, parts, count, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    return fails(fd) ? -1 : NEXT(pwritev64v2)(fd, parts, count, at, flags);
}

static int refuses(const char *path, int flags) {
    int number = (flags & O_CREAT) && ours(path) ? told() : 0;
    if (number) errno = number;
    return number;
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refuses(path, flags) ? -1 : NEXT(open64)(path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refuses(path, flags) ? -1 : NEXT(openat64)(directory, path, flags, mode);
}
"""


class SickDisk:
    """Give :attr:`environment` to the processes that shall suffer."""

    FULL = errno.ENOSPC
    READ_ONLY = errno.EROFS

    def __init__(self, directory: Path) -> None:
        self._library = directory / "sick-disk.so"
        self._control = directory / "sick-disk.errno"

    @property
    def environment(self) -> dict[str, str]:
        """For the processes' start."""
        return {"LD_PRELOAD": str(self._library), "CARPOOL_SICK_DISK": str(self._control)}

    async def build(self) -> None:
        """Compiles it.

        Raises:
            CarpoolError: there is no C compiler, or it refused.
        """
        source = self._library.with_suffix(".c")
        source.write_text(_SOURCE)
        arguments = ("-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl")
        try:
            process = await asyncio.create_subprocess_exec("cc", *arguments, stderr=asyncio.subprocess.PIPE)
        except FileNotFoundError:
            raise CarpoolError("the proof needs a C compiler named cc: install gcc or clang") from None
        _, errors = await process.communicate()
        if process.returncode != 0:
            raise CarpoolError(f"the sick disk was not compiled: {errors.decode(errors='replace')[-400:]}")

    def fail(self, number: int) -> None:
        """Writes to ``.kvc`` files fail with this errno from now on; 0: the disk is well."""
        self._control.write_text(str(number))
