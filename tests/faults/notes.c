/* Notes of what writes replace, until a sync makes them durable: `power.py` reads them.
 *
 * A note is a row of four numbers (offset, length, the file's length before, bytes kept) and what
 * was there. Each file has its own notes: a sync of one says nothing of the other.
 */
#include "faults.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* The length of a note of a cut: all that was behind its offset went. */
#define CUT -1

int64_t size_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_size;
}

/* Open the notes, and the file to read what is there; false if nobody wants notes. */
static int is_open(struct file *one)
{
    if (one->undo >= 0)
        return 1;
    if (!one->notes[0])
        return 0;
    one->undo = open(one->notes, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    /* A writer's descriptor may be for writing only, or for aligned access only. */
    one->reader = open(one->path, O_RDONLY | O_CLOEXEC);
    if (one->undo < 0 || one->reader < 0)
        abort();
    return 1;
}

static int64_t append(struct file *one, int64_t offset, int64_t length, int64_t size, int64_t kept)
{
    int64_t start = size_of(one->undo);
    int64_t *entry = malloc(32 + kept);
    entry[0] = offset;
    entry[1] = length;
    entry[2] = size;
    entry[3] = kept;
    if (kept && pread(one->reader, entry + 4, kept, offset) != kept)
        abort();
    if (write(one->undo, entry, 32 + kept) != 32 + kept)
        abort();
    free(entry);
    return start;
}

/* Note what is about to be replaced, and how long the file was; where the note begins, or -1. */
int64_t note(struct file *one, int64_t offset, int64_t length)
{
    if (!is_open(one))
        return -1;
    int64_t size = size_of(one->reader);
    int64_t kept = offset >= size ? 0 : length < size - offset ? length : size - offset;
    return append(one, offset, length, size, kept);
}

/* Note what is about to be cut off. */
void note_cut(struct file *one, int64_t end)
{
    if (!is_open(one))
        return;
    int64_t size = size_of(one->reader);
    if (end < size)
        append(one, end, CUT, size, size - end);
    else
        append(one, end, 0, size, 0);
}

/* Note that the file is in no folder yet that a power failure spares. */
void note_new(const struct file *one)
{
    int fd = one->is_new[0] ? open(one->is_new, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd >= 0)
        close(fd);
}

void forget(struct file *one, int64_t start)
{
    if (one->undo >= 0 && start >= 0 && ftruncate(one->undo, start))
        abort();
}
