"""A library for LD_PRELOAD that makes the files below one folder slow, or broken, as another process says.

A process that has it reads and writes these files at the rate, and with the errors, that `SlowFiles` holds in memory
that both have mapped. Files elsewhere are as they are.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile int32_t *control;  /* bytes per ms (0: no limit), errno of reads, errno of writes */
static char folder[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("QUIRE_TEST_CONTROL"), *below = getenv("QUIRE_TEST_FOLDER");
    int fd = path ? open(path, O_RDONLY) : -1;
    if (fd < 0 || !below || !realpath(below, folder)) return;
    void *memory = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) control = memory;
    close(fd);
}

static int is_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!control) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && !strncmp(path, folder, strlen(folder));
}

static ssize_t ended(int fd, ssize_t result, int is_write) {
    if (result > 0 && is_below(fd) && control[0] > 0) usleep((useconds_t)(1000.0 * result / control[0]));
    return result;
}

static int broken(int fd, int is_write) {
    if (!is_below(fd) || !control[1 + is_write]) return 0;
    errno = control[1 + is_write];
    return 1;
}

#define WRAP(name, is_write, args, call) \
    ssize_t name args { \
        static ssize_t (*real) args; \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name); \
        return broken(fd, is_write) ? -1 : ended(fd, real call, is_write); \
    }
#define VECTOR(name, is_write) \
    WRAP(name, is_write, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
#define VECTOR2(name, is_write) \
    WRAP(name, is_write, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
WRAP(pread, 0, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
WRAP(pread64, 0, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
WRAP(pwrite, 1, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
WRAP(pwrite64, 1, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
VECTOR(preadv, 0)
VECTOR(preadv64, 0)
VECTOR2(preadv2, 0)
VECTOR2(preadv64v2, 0)
VECTOR(pwritev, 1)
VECTOR(pwritev64, 1)
VECTOR2(pwritev2, 1)
VECTOR2(pwritev64v2, 1)
"""


class SlowFiles:
    """The rate and the errors of the files below ``folder``, for processes with `env`."""

    def __init__(self, work: Path, folder: Path) -> None:
        """``work``: a folder for the library. Raises `RuntimeError` where there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise RuntimeError("no C compiler")
        source, library, control = (work / f"slow_files{end}" for end in (".c", ".so", ".control"))
        source.write_text(SOURCE)
        subprocess.run(
            [compiler, "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
        )
        control.write_bytes(bytes(4096))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)
        self.env = {
            "LD_PRELOAD": str(library),
            "QUIRE_TEST_CONTROL": str(control),
            "QUIRE_TEST_FOLDER": str(folder),
        }

    def set(self, bytes_per_s: float = 0, read_errno: int = 0, write_errno: int = 0) -> None:
        """From now on; 0: no limit, no error."""
        self._memory[:12] = struct.pack("<iii", int(bytes_per_s / 1000), read_errno, write_errno)
