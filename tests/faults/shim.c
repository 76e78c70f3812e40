/* Faults of a disk and of a clock, for tests: loaded into a process with LD_PRELOAD.
 *
 * It stands between a process and one file, named by FAULTS_FILE. What it does is said by a row of
 * 64-bit numbers in a file that all sides map, FAULTS_CONTROL: it can change at any moment. With
 * FAULTS_UNDO set, what a write replaces is noted there first, until a sync makes it durable: from
 * these notes `power.py` makes what a disk could hold after the power failed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The same order as `Faults` in shim.py. */
enum {
    IS_FULL, WRITE_ERRNO, SYNC_ERRNO, SYNC_ERRORS_LEFT, SYNC_DELAY_US, CLOCK_OFFSET_NS,
    KILL_EVENT, KILL_COUNTDOWN, KILLED, NUM_WRITES, NUM_SYNCS, NUM_META_WRITES, NUM_FIELDS
};
enum {
    /* No half-written meta page: it lies within one sector, which LMDB relies on. */
    BEFORE_WRITE = 1, TORN_WRITE, AFTER_WRITE, BEFORE_SYNC, AFTER_SYNC, BEFORE_META, AFTER_META
};

static volatile int64_t nothing[NUM_FIELDS];
static volatile int64_t *control = nothing;
static char file[PATH_MAX];
static int undo = -1, reader = -1;

static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);
static int (*real_open)(const char *, int, ...);
static int (*real_fallocate)(int, off_t, off_t);
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_gettimeofday)(struct timeval *, void *);

__attribute__((constructor)) static void start(void)
{
    real_pwrite = dlsym(RTLD_NEXT, "pwrite");
    real_writev = dlsym(RTLD_NEXT, "writev");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_open = dlsym(RTLD_NEXT, "open");
    real_fallocate = dlsym(RTLD_NEXT, "posix_fallocate");
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_gettimeofday = dlsym(RTLD_NEXT, "gettimeofday");
    const char *path = getenv("FAULTS_CONTROL"), *data = getenv("FAULTS_FILE");
    int fd = path ? real_open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0 || !data || strlen(data) >= sizeof file)
        return;
    void *mapped = mmap(NULL, NUM_FIELDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return;
    control = mapped;
    strcpy(file, data);
}

static int is_ours(int fd)
{
    char link[32], target[PATH_MAX];
    if (!file[0])
        return 0;
    int failed = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    errno = failed;
    if (length < 0)
        return 0;
    target[length] = 0;
    return strcmp(target, file) == 0;
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

static int64_t size_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_size;
}

/* Note what is about to be replaced, and how long the file was; where the note begins, or -1. */
static int64_t note(int fd, int64_t offset, int64_t length)
{
    if (undo < 0) {
        const char *path = getenv("FAULTS_UNDO");
        if (!path)
            return -1;
        undo = real_open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        /* The descriptor for meta pages is for writing only. */
        reader = real_open(file, O_RDONLY | O_CLOEXEC);
        if (undo < 0 || reader < 0)
            abort();
    }
    int64_t start = size_of(undo), size = size_of(fd);
    int64_t kept = offset >= size ? 0 : length < size - offset ? length : size - offset;
    int64_t *entry = malloc(32 + kept);
    entry[0] = offset;
    entry[1] = length;
    entry[2] = size;
    entry[3] = kept;
    if (kept && pread(reader, entry + 4, kept, offset) != kept)
        abort();
    struct iovec whole = {entry, 32 + kept};
    if (real_writev(undo, &whole, 1) != 32 + kept)
        abort();
    free(entry);
    return start;
}

static void forget(int64_t start)
{
    if (undo >= 0 && start >= 0 && ftruncate(undo, start))
        abort();
}

static int refuse(int fd, int64_t end)
{
    if (control[WRITE_ERRNO])
        errno = control[WRITE_ERRNO];
    else if (control[IS_FULL] && end > size_of(fd))
        errno = ENOSPC;
    else
        return 0;
    return 1;
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
    /* A read-only disk refuses already who opens a file for writing. */
    if (control[WRITE_ERRNO] == EROFS && (flags & O_ACCMODE) != O_RDONLY && !strcmp(path, file)) {
        errno = EROFS;
        return -1;
    }
    return real_open(path, flags, mode);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    if (!is_ours(fd))
        return real_pwrite(fd, data, length, offset);
    if (refuse(fd, offset + length))
        return -1;
    int64_t start = note(fd, offset, length);
    int is_meta = is_synchronous(fd);
    control[is_meta ? NUM_META_WRITES : NUM_WRITES]++;
    die_if_due(is_meta ? BEFORE_META : BEFORE_WRITE);
    if (!is_meta && is_due(TORN_WRITE)) {
        if (real_pwrite(fd, data, length / 2, offset) < 0)
            abort();
        die();
    }
    if (is_meta && sync_fails())
        return -1;
    ssize_t count = real_pwrite(fd, data, length, offset);
    if (is_meta && count >= 0)
        forget(start);
    die_if_due(is_meta ? AFTER_META : AFTER_WRITE);
    return count;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset)
{
    return pwrite(fd, data, length, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    if (!is_ours(fd))
        return real_writev(fd, parts, count);
    int64_t length = 0, offset = lseek(fd, 0, SEEK_CUR);
    for (int i = 0; i < count; i++)
        length += parts[i].iov_len;
    if (refuse(fd, offset + length))
        return -1;
    note(fd, offset, length);
    control[NUM_WRITES]++;
    die_if_due(BEFORE_WRITE);
    if (is_due(TORN_WRITE)) {
        if (real_writev(fd, parts, (count + 1) / 2) < 0)
            abort();
        die();
    }
    ssize_t written = real_writev(fd, parts, count);
    die_if_due(AFTER_WRITE);
    return written;
}

static int sync_file(int fd, int (*real)(int))
{
    if (!is_ours(fd))
        return real(fd);
    control[NUM_SYNCS]++;
    die_if_due(BEFORE_SYNC);
    if (sync_fails())
        return -1;
    int result = real(fd);
    if (result == 0)
        forget(0);
    die_if_due(AFTER_SYNC);
    return result;
}

int fdatasync(int fd)
{
    return sync_file(fd, real_fdatasync);
}

int fsync(int fd)
{
    return sync_file(fd, real_fsync);
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    if (is_ours(fd)) {
        if (control[WRITE_ERRNO])
            return control[WRITE_ERRNO];
        if (control[IS_FULL] && offset + length > size_of(fd))
            return ENOSPC;
        note(fd, 0, 0);
    }
    return real_fallocate(fd, offset, length);
}

int posix_fallocate64(int fd, off_t offset, off_t length)
{
    return posix_fallocate(fd, offset, length);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = real_clock_gettime(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && control[CLOCK_OFFSET_NS]) {
        int64_t sum = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + control[CLOCK_OFFSET_NS];
        now->tv_sec = sum / 1000000000;
        now->tv_nsec = sum % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int result = real_gettimeofday(now, zone);
    if (result == 0)
        now->tv_sec += control[CLOCK_OFFSET_NS] / 1000000000;
    return result;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}
