/* Faults of a disk and of a clock, for tests: loaded into a process with LD_PRELOAD.
 *
 * It stands between a process and the files of one store, in FAULTS_FOLDER. What it does is said by
 * a row of 64-bit numbers in a file that all sides map, FAULTS_CONTROL: it can change at any moment.
 * With FAULTS_UNDO set, a folder, what a write replaces is noted there first, until a sync makes it
 * durable: from these notes `power.py` makes what a disk could hold after the power failed.
 */
#include "faults.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Direct access is to whole blocks. */
#define BLOCK_BYTES 4096

static volatile int64_t nothing[NUM_FIELDS];
volatile int64_t *control = nothing;
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);
static int (*real_open)(const char *, int, ...);
static int (*real_truncate)(const char *, off_t);
static int (*real_ftruncate)(int, off_t);
static int (*real_fallocate)(int, off_t, off_t);

__attribute__((constructor)) static void start(void)
{
    real_pwritev = dlsym(RTLD_NEXT, "pwritev");
    real_writev = dlsym(RTLD_NEXT, "writev");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_open = dlsym(RTLD_NEXT, "open");
    real_truncate = dlsym(RTLD_NEXT, "truncate");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate");
    real_fallocate = dlsym(RTLD_NEXT, "posix_fallocate");
    const char *path = getenv("FAULTS_CONTROL"), *where = getenv("FAULTS_FOLDER");
    int fd = path ? real_open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0 || !where)
        return;
    void *mapped = mmap(NULL, NUM_FIELDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return;
    control = mapped;
    name_files(where, getenv("FAULTS_UNDO"));
}

/* A write through this descriptor is durable when it returns: LMDB's meta pages. */
static int is_synchronous(int fd)
{
    return (fcntl(fd, F_GETFL) & O_DSYNC) != 0;
}

static void die(void)
{
    control[KILLED] = control[KILL_EVENT];
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Whether this event is the one to die at. */
static int is_due(int event)
{
    return control[KILL_EVENT] == event && --control[KILL_COUNTDOWN] <= 0;
}

static void die_if_due(int event)
{
    if (is_due(event))
        die();
}

/* Whether the disk has no room for this; what it has becomes less. */
static int is_too_much(int64_t num_bytes)
{
    if (!control[IS_FULL] || num_bytes <= 0)
        return 0;
    if (num_bytes > control[FREE_BYTES])
        return 1;
    control[FREE_BYTES] -= num_bytes;
    return 0;
}

static int refuse(int fd, int64_t end)
{
    if (control[WRITE_ERRNO])
        errno = control[WRITE_ERRNO];
    else if (is_too_much(end - size_of(fd)))
        errno = ENOSPC;
    else
        return 0;
    return 1;
}

/* What a disk takes of a write that it fills up in the middle of; all of it elsewhere.
 *
 * Not for LMDB: to its caller that looks like an I/O error.
 */
static size_t length_taken(const struct file *one, int fd, size_t length, off_t offset)
{
    int64_t room = size_of(fd) + control[FREE_BYTES] - offset;
    if (one == data || !control[IS_FULL] || room >= (int64_t)length || room < BLOCK_BYTES)
        return length;
    return room / BLOCK_BYTES * BLOCK_BYTES;
}

static int sync_fails(void)
{
    if (control[SYNC_DELAY_US])
        usleep(control[SYNC_DELAY_US]);
    if (!control[SYNC_ERRNO])
        return 0;
    errno = control[SYNC_ERRNO];
    if (control[SYNC_ERRORS_LEFT] && --control[SYNC_ERRORS_LEFT] == 0)
        control[SYNC_ERRNO] = 0;
    return 1;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    struct file *one = (flags & O_ACCMODE) == O_RDONLY ? NULL : file_at(path);
    /* A read-only disk refuses already who opens a file for writing. */
    if (one && control[WRITE_ERRNO] == EROFS) {
        errno = EROFS;
        return -1;
    }
    if (one && flags & O_CREAT && access(path, F_OK))
        note_new(one);
    if (!real_open) /* Other libraries begin before this one. */
        real_open = dlsym(RTLD_NEXT, "open");
    return real_open(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return open(path, flags, mode);
}

/* The first bytes of parts, into `first`: how many parts these are. */
static int cut_parts(struct iovec *first, const struct iovec *parts, int count, size_t length)
{
    int used = 0;
    for (; used < count && length > 0; used++) {
        first[used] = parts[used];
        if (first[used].iov_len > length)
            first[used].iov_len = length;
        length -= first[used].iov_len;
    }
    return used;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    struct file *one = file_of(fd);
    if (!one || count <= 0 || count > IOV_MAX)
        return real_pwritev(fd, parts, count, offset);
    struct iovec first[count];
    size_t length = 0;
    for (int i = 0; i < count; i++)
        length += parts[i].iov_len;
    length = length_taken(one, fd, length, offset);
    if (refuse(fd, offset + length))
        return -1;
    int64_t start = note(one, offset, length);
    int is_meta = one == data && is_synchronous(fd);
    control[is_meta ? NUM_META_WRITES : one->num_writes]++;
    die_if_due(is_meta ? BEFORE_META : one->before);
    if (!is_meta && is_due(one->torn)) {
        size_t half = one == payloads ? length / 2 / BLOCK_BYTES * BLOCK_BYTES : length / 2;
        if (real_pwritev(fd, first, cut_parts(first, parts, count, half), offset) < 0)
            abort();
        die();
    }
    if (is_meta && sync_fails())
        return -1;
    ssize_t written = real_pwritev(fd, first, cut_parts(first, parts, count, length), offset);
    if (is_meta && written >= 0)
        forget(one, start);
    die_if_due(is_meta ? AFTER_META : one->after);
    if (is_meta && control[META_ERRNO]) {
        errno = control[META_ERRNO];
        return -1;
    }
    return written;
}

ssize_t pwrite(int fd, const void *from, size_t length, off_t offset)
{
    struct iovec part = {(void *)from, length};
    return pwritev(fd, &part, 1, offset);
}

ssize_t pwrite64(int fd, const void *from, size_t length, off_t offset)
{
    return pwrite(fd, from, length, offset);
}

/* Under these names Python asks for it, without flags. */
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    if (flags)
        abort();
    return pwritev(fd, parts, count, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    return pwritev2(fd, parts, count, offset, flags);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset)
{
    return pwritev(fd, parts, count, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    struct file *one = file_of(fd);
    if (!one)
        return real_writev(fd, parts, count);
    int64_t length = 0, offset = lseek(fd, 0, SEEK_CUR);
    for (int i = 0; i < count; i++)
        length += parts[i].iov_len;
    if (refuse(fd, offset + length))
        return -1;
    note(one, offset, length);
    control[one->num_writes]++;
    die_if_due(one->before);
    if (is_due(one->torn)) {
        if (real_writev(fd, parts, (count + 1) / 2) < 0)
            abort();
        die();
    }
    ssize_t written = real_writev(fd, parts, count);
    die_if_due(one->after);
    return written;
}

static int sync_file(int fd, int (*real)(int))
{
    struct file *one = file_of(fd);
    if (!one)
        return real(fd);
    control[one->num_syncs]++;
    die_if_due(one->before_sync);
    if (sync_fails())
        return -1;
    int result = real(fd);
    if (result == 0)
        forget(one, 0);
    die_if_due(one->after_sync);
    return result;
}

int fdatasync(int fd)
{
    return sync_file(fd, real_fdatasync);
}

int fsync(int fd)
{
    int result = sync_file(fd, real_fsync);
    if (result == 0 && is_folder(fd))
        forget_new();
    return result;
}

/* Cut a file to a length; a disk that is full has that room again. */
static int cut(struct file *one, int64_t size, off_t end)
{
    if (control[WRITE_ERRNO]) {
        errno = control[WRITE_ERRNO];
        return -1;
    }
    note_cut(one, end);
    if (control[IS_FULL] && size > end)
        control[FREE_BYTES] += size - end;
    return 0;
}

int truncate(const char *path, off_t end)
{
    struct file *one = file_at(path);
    struct stat found;
    if (one && !stat(path, &found) && cut(one, found.st_size, end))
        return -1;
    return real_truncate(path, end);
}

int truncate64(const char *path, off_t end)
{
    return truncate(path, end);
}

int ftruncate(int fd, off_t end)
{
    struct file *one = file_of(fd);
    if (one && cut(one, size_of(fd), end))
        return -1;
    return real_ftruncate(fd, end);
}

int ftruncate64(int fd, off_t end)
{
    return ftruncate(fd, end);
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    struct file *one = file_of(fd);
    if (one) {
        int failed = errno, refused = refuse(fd, offset + length) ? errno : 0;
        errno = failed;
        if (refused)
            return refused;
        note(one, 0, 0);
    }
    return real_fallocate(fd, offset, length);
}

int posix_fallocate64(int fd, off_t offset, off_t length)
{
    return posix_fallocate(fd, offset, length);
}
