/* Preloaded into a process, shifts its wall clock by what a file says: 8 bytes, ns. CLOCK_MONOTONIC stays. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shared;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY | O_CLOEXEC);
    void *found = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) abort();
    shared = found;
    close(file);
}

static void shift(struct timespec *at, int64_t by) {
    int64_t nanos = at->tv_nsec + by % 1000000000;
    int64_t carry = nanos < 0 ? -1 : nanos / 1000000000;
    at->tv_sec += by / 1000000000 + carry;
    at->tv_nsec = nanos - carry * 1000000000;
}

static int64_t offset(void) { return shared ? *shared : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) shift(now, offset());
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}

/* Deadlines of the wall clock, which are far beyond any that CLOCK_MONOTONIC has. */
static struct timespec real_deadline(const struct timespec *until) {
    struct timespec at = *until;
    if (at.tv_sec > 1000000000) shift(&at, -offset());
    return at;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = real_deadline(until);
    return next(cond, mutex, &at);
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec at = real_deadline(until);
    return next(sem, &at);
}
