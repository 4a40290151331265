/* Faults of the disk for the campaign, below Python: a library that is preloaded and stands between every program
   (Python, torch's C++, safetensors' Rust) and libc.

   It does nothing until campaign_arm() is called. From then on it counts the operations on files below `root`; the
   n-th of a class fails with an error, or sends a signal to its own process. `counts` holds one counter per class, so
   that a run without faults tells how many operations there are to choose from.

       cc -shared -fPIC -O1 -o faults.so faults.c
*/
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITES = 1, OPENS = 2, READS = 4, REMOVES = 8, CLASSES = 16 };

static char root[4096];
static int root_length = 0; /* 0: not armed */
static long nth = 0;
static int number = 0, is_signal = 0, sticky = 0, mask = 0;
static long *counts = 0; /* one for every mask, 0 to 15 */

void campaign_arm(const char *place, long at, int what, int by_signal, int for_ever, int classes, long *counters) {
    strncpy(root, place, sizeof root - 1);
    nth = at, number = what, is_signal = by_signal, sticky = for_ever, mask = classes, counts = counters;
    root_length = (int)strlen(root);
}

static int inside(const char *path) {
    if (!path || !root_length) return 0;
    if (path[0] != '/') return strncmp(path, "../", 3) != 0; /* the command runs in the root */
    return strncmp(path, root, root_length) == 0;
}

static int inside_at(int folder, const char *path) {
    char name[64], found[4096];
    if (!path || !root_length) return 0;
    if (path[0] == '/' || folder == AT_FDCWD) return inside(path);
    snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, name, found, sizeof found - 1);
    if (size <= 0) return 0;
    found[size] = 0;
    return found[0] == '/' && strncmp(found, root, root_length) == 0;
}

static int inside_file(int file) { return root_length && file > 2 && inside_at(file, "."); }

/* 1 if the operation is to fail; errno is set then. */
static int step(int kind) {
    int before = errno;
    for (int classes = 1; classes < CLASSES; classes++)
        if (classes & kind) __atomic_add_fetch(&counts[classes], 1, __ATOMIC_SEQ_CST);
    if (!(kind & mask) || !nth) return 0;
    long now = counts[mask];
    if (now != nth && !(sticky && now > nth)) return 0;
    if (is_signal) {
        if (now == nth) kill(number > 0 ? getpid() : getppid(), number > 0 ? number : -number);
        errno = before;
        return 0;
    }
    errno = number;
    return 1;
}

#define REAL(result, name, ...)                                   \
    static result (*real)(__VA_ARGS__) = 0;                       \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int opening(int flags) { return OPENS | (flags & (O_WRONLY | O_RDWR | O_CREAT) ? WRITES : 0); }

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        REAL(int, name, const char *, int, ...);                               \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                          \
        if (inside(path) && step(opening(flags))) return -1;                   \
        return real(path, flags, mode);                                        \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                           \
    int name(int folder, const char *path, int flags, ...) {                   \
        REAL(int, name, int, const char *, int, ...);                          \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                          \
        if (inside_at(folder, path) && step(opening(flags))) return -1;        \
        return real(folder, path, flags, mode);                                \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                            \
    FILE *name(const char *path, const char *mode) {                           \
        REAL(FILE *, name, const char *, const char *);                        \
        if (inside(path) && step(opening(strpbrk(mode, "wa+") ? O_WRONLY : 0))) return NULL; \
        return real(path, mode);                                               \
    }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    return inside(path) && step(OPENS) ? NULL : real(path);
}

#define ON_PATH(name, kind)                                                    \
    int name(const char *path) {                                               \
        REAL(int, name, const char *);                                         \
        return inside(path) && step(kind) ? -1 : real(path);                   \
    }
ON_PATH(unlink, REMOVES)
ON_PATH(rmdir, REMOVES)
ON_PATH(remove, REMOVES)

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    return inside_at(folder, path) && step(REMOVES) ? -1 : real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return inside(path) && step(WRITES) ? -1 : real(path, mode);
}

#define ON_PATHS(name)                                                         \
    int name(const char *from, const char *to) {                               \
        REAL(int, name, const char *, const char *);                           \
        return inside(to) && step(WRITES) ? -1 : real(from, to);               \
    }
ON_PATHS(rename)
ON_PATHS(link)

int symlink(const char *from, const char *to) {
    REAL(int, symlink, const char *, const char *);
    return inside(to) && step(WRITES) ? -1 : real(from, to);
}

int fsync(int file) {
    REAL(int, fsync, int);
    return inside_file(file) && step(WRITES) ? -1 : real(file);
}

ssize_t write(int file, const void *content, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return inside_file(file) && step(WRITES) ? -1 : real(file, content, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return inside_file(file) && step(WRITES) ? -1 : real(file, parts, count);
}

ssize_t pwrite64(int file, const void *content, size_t size, off64_t place) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    return inside_file(file) && step(WRITES) ? -1 : real(file, content, size, place);
}

int ftruncate64(int file, off64_t size) {
    REAL(int, ftruncate64, int, off64_t);
    return inside_file(file) && step(WRITES) ? -1 : real(file, size);
}

ssize_t read(int file, void *content, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    return inside_file(file) && step(READS) ? -1 : real(file, content, size);
}

ssize_t pread64(int file, void *content, size_t size, off64_t place) {
    REAL(ssize_t, pread64, int, void *, size_t, off64_t);
    return inside_file(file) && step(READS) ? -1 : real(file, content, size, place);
}
