/* The files of one store that the faults are of, and which of them a call is about. */
#include "faults.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[PATH_MAX];
static struct file files[] = {
    {"data.mdb", BEFORE_WRITE, TORN_WRITE, AFTER_WRITE, BEFORE_SYNC, AFTER_SYNC,
     NUM_WRITES, NUM_SYNCS, "", "", "", -1, -1},
    {"payloads.bin", BEFORE_PAYLOAD, TORN_PAYLOAD, AFTER_PAYLOAD, BEFORE_PAYLOAD_SYNC,
     AFTER_PAYLOAD_SYNC, NUM_PAYLOAD_WRITES, NUM_PAYLOAD_SYNCS, "", "", "", -1, -1},
};
struct file *const data = &files[0], *const payloads = &files[1];
#define END (files + sizeof files / sizeof *files)

static void join(char *path, const char *where, const char *name, const char *ending)
{
    if (snprintf(path, PATH_MAX, "%s/%s%s", where, name, ending) >= PATH_MAX)
        abort();
}

/* From now on calls about these files are known.
 *
 * Args: the store's folder, by the name that the system has for it, and the one for notes, or NULL.
 */
void name_files(const char *where, const char *undo)
{
    join(folder, where, "", "");
    folder[strlen(where)] = 0;
    for (struct file *one = files; one < END; one++) {
        join(one->path, where, one->name, "");
        if (undo) {
            join(one->notes, undo, one->name, "");
            join(one->is_new, undo, one->name, ".new");
        }
    }
}

static int path_of(int fd, char *path)
{
    char link[32];
    int failed = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = folder[0] ? readlink(link, path, PATH_MAX - 1) : -1;
    errno = failed;
    path[length < 0 ? 0 : length] = 0;
    return length >= 0;
}

/* Which of the files it is, or NULL. */
struct file *file_of(int fd)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return NULL;
    for (struct file *one = files; one < END; one++)
        if (!strcmp(path, one->path))
            return one;
    return NULL;
}

/* The same of a path, whether or not there is anything. */
struct file *file_at(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char where[PATH_MAX], found[PATH_MAX];
    for (struct file *one = files; folder[0] && one < END; one++) {
        if (strcmp(name, one->name) || strlen(path) >= sizeof where)
            continue;
        snprintf(where, sizeof where, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
        int failed = errno;
        int is_ours = realpath(where, found) && !strcmp(found, folder);
        errno = failed;
        return is_ours ? one : NULL;
    }
    return NULL;
}

int is_folder(int fd)
{
    char path[PATH_MAX];
    return path_of(fd, path) && !strcmp(path, folder);
}

/* A folder that is on disk has its files. */
void forget_new(void)
{
    for (struct file *one = files; one < END; one++)
        if (one->is_new[0])
            unlink(one->is_new);
}
