/* Gives a server a clock that a test can turn: the time of day, moved by the seconds that stand in a small file.

   Only the time of day is moved, as when somebody sets the clock of the machine. Clocks that count from the start of
   the machine go on as they are. */

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

static const volatile int64_t *moved;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("DJJOBS_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        moved = page;
    close(file);
}

static int64_t offset(void) { return moved ? *moved : 0; }

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *seconds)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds)
        *seconds = now.tv_sec;
    return now.tv_sec;
}

/* The kernel knows nothing of the moved clock: who waits until a time of day has to be told the true one. Times since
   the start of the machine are much smaller numbers. */
static const struct timespec *truly(const struct timespec *until, struct timespec *copy)
{
    if (!until || until->tv_sec < 1000000000)
        return until;
    *copy = *until;
    copy->tv_sec -= offset();
    return copy;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec copy;
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(cond, mutex, truly(until, &copy));
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    struct timespec copy;
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    return real(cond, mutex, clock, truly(until, &copy));
}

int sem_timedwait(sem_t *sem, const struct timespec *until)
{
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec copy;
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    return real(sem, truly(until, &copy));
}
