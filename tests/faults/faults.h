/* What the parts of the fault library share: the row that steers it, and the files it stands before. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdint.h>

/* The same order as `Faults` in shim.py. */
enum {
    IS_FULL, WRITE_ERRNO, SYNC_ERRNO, SYNC_ERRORS_LEFT, SYNC_DELAY_US, CLOCK_OFFSET_NS,
    KILL_EVENT, KILL_COUNTDOWN, KILLED, NUM_WRITES, NUM_SYNCS, NUM_META_WRITES,
    NUM_PAYLOAD_WRITES, NUM_PAYLOAD_SYNCS, FREE_BYTES, META_ERRNO, NUM_FIELDS
};
enum {
    /* No half-written meta page: it lies within one sector, which LMDB relies on. */
    BEFORE_WRITE = 1, TORN_WRITE, AFTER_WRITE, BEFORE_SYNC, AFTER_SYNC, BEFORE_META, AFTER_META,
    BEFORE_PAYLOAD, TORN_PAYLOAD, AFTER_PAYLOAD, BEFORE_PAYLOAD_SYNC, AFTER_PAYLOAD_SYNC
};

struct file {
    const char *name;
    /* Events and counters of its own. */
    int before, torn, after, before_sync, after_sync, num_writes, num_syncs;
    char path[PATH_MAX];
    /* Where its notes go, and that it is new; empty: nobody wants any. */
    char notes[PATH_MAX], is_new[PATH_MAX];
    int undo, reader;
};

/* Other libraries of the process are not to find these names. */
#pragma GCC visibility push(hidden)

extern volatile int64_t *control;
extern struct file *const data, *const payloads;

void name_files(const char *where, const char *undo);
struct file *file_of(int fd);
struct file *file_at(const char *path);
int is_folder(int fd);
void forget_new(void);

int64_t size_of(int fd);
int64_t note(struct file *one, int64_t offset, int64_t length);
void note_cut(struct file *one, int64_t end);
void note_new(const struct file *one);
void forget(struct file *one, int64_t start);

#pragma GCC visibility pop
