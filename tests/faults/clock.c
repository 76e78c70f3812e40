/* A wall clock that is off. */
#include "faults.h"
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_gettimeofday)(struct timeval *, void *);

__attribute__((constructor)) static void start(void)
{
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_gettimeofday = dlsym(RTLD_NEXT, "gettimeofday");
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
