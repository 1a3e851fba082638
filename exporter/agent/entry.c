/* The ways in, and the agent's own thread.
 *
 * The driver calls InitializeInjection inside the program's cuInit, when CUDA_INJECTION64_PATH names this library.
 * Whatever goes wrong, the driver hears of success, and the program runs on as if we were not there. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define EXPORTED __attribute__((visibility("default")))
OLDEST_GLIBC(pthread_create);
OLDEST_GLIBC(pthread_sigmask);

static atomic_bool injected, started, stopped, quitting, forked;
static _Atomic uint32_t wakes; /* a futex word: counts, so that no wake is lost */
static atomic_bool sleeping;

static uint64_t now_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

uint64_t monotonic_ns(void) { return now_of(CLOCK_MONOTONIC); }
uint64_t realtime_ns(void) { return now_of(CLOCK_REALTIME); }
bool stop_wanted(void) { return atomic_load(&stopped); }

void wake_agent(void)
{
    int saved = errno;
    atomic_fetch_add(&wakes, 1);
    if (atomic_load(&sleeping))
        syscall(SYS_futex, &wakes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    errno = saved;
}

/* Until a wake that came after `seen` was read, or the time. */
static void sleep_until(uint64_t time, uint32_t seen)
{
    uint64_t now = monotonic_ns();
    if (now >= time)
        return;
    uint64_t rest = time - now;
    struct timespec timeout = {.tv_sec = (time_t)(rest / SECOND), .tv_nsec = (long)(rest % SECOND)};
    atomic_store(&sleeping, true);
    if (atomic_load(&wakes) == seen)
        syscall(SYS_futex, &wakes, FUTEX_WAIT_PRIVATE, seen, &timeout, NULL, 0);
    atomic_store(&sleeping, false);
}

_Noreturn static void *run(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "gpu-hpc-agent");
    for (uint64_t next_beat = 0; !atomic_load(&quitting);) {
        uint32_t seen = atomic_load(&wakes);
        uint64_t next = windows_step(monotonic_ns()), now = monotonic_ns();
        if (now >= next_beat) {
            file_heartbeat();
            next_beat = now + SECOND;
        }
        sleep_until(next < next_beat ? next : next_beat, seen);
    }
    /* The process exits. A thread's end runs whatever CUPTI has for it, which is being torn down: this one has none. */
    for (;;)
        pause();
}

/* In a fork's child there is no thread of ours, and CUDA does not work. */
static void after_fork(void)
{
    atomic_store(&forked, true);
    file_forked();
}

/* Registered after libcuda's handlers, and again after CUPTI's, which may be loaded later: it runs before these. */
static void at_exit(void)
{
    if (atomic_load(&forked))
        return;
    atomic_store(&quitting, true);
    wake_agent();
    cupti_quit();
}

/* CUPTI starts in parts; a handler is registered for ever, so that four must do. */
void exit_before_cupti(void)
{
    static int registered;
    if (registered < 4)
        registered += atexit(at_exit) == 0;
}

/* The stack is as large as any: CUPTI runs on it, and the program's thread-local variables lie in it. */
static bool start_thread(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    bool made = pthread_create(&thread, &attributes, run, NULL) == 0;
    pthread_attr_destroy(&attributes);
    return made;
}

static void begin_unsignalled(bool is_in_cuinit)
{
    options_read();
    /* First: a child that is forked meanwhile must not hold the file. */
    if (pthread_atfork(NULL, NULL, after_fork) != 0) {
        say_once("forks cannot be seen");
        return;
    }
    if (!file_create()) { /* nobody would see what CUPTI costs the program */
        say_once("no file can be made in GPU_HPC_AGENT_DIRECTORY");
        return;
    }
    if (is_in_cuinit)
        kinds_prepare();
    if (atexit(at_exit) != 0 || !start_thread()) {
        if (is_in_cuinit)
            kinds_withdraw();
        say_once("its thread cannot be started");
    }
}

/* No signal of the program's may land on our thread or CUPTI's, which inherit the mask, or interrupt the making of the
 * file. */
static void begin(bool is_in_cuinit)
{
    sigset_t all, before;
    /* A program with more rights than its user (setuid) takes no orders from its user's environment. */
    if (atomic_exchange(&started, true) || atomic_load(&forked) || getauxval(AT_SECURE))
        return;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return;
    begin_unsignalled(is_in_cuinit);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Called by the driver. */
EXPORTED int InitializeInjection(void);
int InitializeInjection(void)
{
    int saved = errno;
    if (!atomic_exchange(&injected, true))
        begin(true);
    errno = saved;
    return 1;
}

/* For programs that load the library themselves. Starts the agent, or goes on after a stop. */
EXPORTED int gpu_hpc_agent_start(void);
int gpu_hpc_agent_start(void)
{
    int saved = errno;
    atomic_store(&stopped, false);
    begin(false);
    wake_agent();
    errno = saved;
    return 0;
}

/* Ends the window and publishes it, soon; waits for nothing. */
EXPORTED int gpu_hpc_agent_stop(void);
int gpu_hpc_agent_stop(void)
{
    atomic_store(&stopped, true);
    wake_agent();
    return 0;
}
