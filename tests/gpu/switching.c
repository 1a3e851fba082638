/* A thread that switches kinds of records on and off beside the program's own; switching.py has the ways. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cupti.h"

enum { SIZE = 1 << 20, KINDS = 8, ROUNDS_A_LOOK = 20, ON_US = 700, OFF_US = 300, LOOK_US = 60000 };

struct way {
    int32_t for_life[KINDS], switched[KINDS]; /* in this order on, off in the reverse; 0 ends them */
    int32_t functions;                        /* 1: those of the runtime whose calls the agent wants are switched, too */
    int32_t probes;                           /* 1: nothing is switched, but the subscription taken and given back */
    double seconds;
};
/* How often kernels and calls were there, kernels alone, calls alone, nothing; and how many calls had the id of the one
 * before: they came twice, or their thread gives all the same. */
struct seen {
    int64_t rounds, both, kernels, calls, nothing, repeated;
};

static struct way way;
static struct seen seen;
static atomic_bool over;
static atomic_long kernels, calls, repeated;

uint64_t realtime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_us(long us) { nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL); }

static void requested(uint8_t **buffer, size_t *size, size_t *most_records)
{
    *buffer = aligned_alloc(8, SIZE);
    *size = SIZE;
    *most_records = 0;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size;
    uint8_t *record = NULL;
    uint32_t kind, id, last = 0;
    while (valid && cupti_next_record(buffer, valid, &record) == CUPTI_OK) {
        memcpy(&kind, record, sizeof kind);
        kernels += kind == KIND_CONCURRENT_KERNEL;
        if (kind != KIND_RUNTIME)
            continue;
        memcpy(&id, record + API_CORRELATION, sizeof id);
        calls++;
        repeated += id == last;
        last = id;
    }
    free(buffer);
}

static bool has(const int32_t *kinds, int kind)
{
    for (int i = 0; i < KINDS; i++)
        if (kinds[i] == kind)
            return true;
    return false;
}

static void switch_on(void)
{
    if (way.functions)
        cupti_switch_calls(KIND_RUNTIME, true, true);
    for (int i = 0; i < KINDS && way.switched[i]; i++)
        cupti_enable(way.switched[i]);
}

static void switch_off(void)
{
    for (int i = KINDS; i-- > 0;)
        if (way.switched[i])
            cupti_disable(way.switched[i]);
    if (way.functions)
        cupti_switch_calls(KIND_RUNTIME, true, false);
}

static void look(void)
{
    bool has_kernels = has(way.switched, KIND_CONCURRENT_KERNEL) || has(way.for_life, KIND_CONCURRENT_KERNEL);
    cupti_flush(false);
    sleep_us(2000);
    long before_kernels = kernels, before_calls = calls;
    switch_on();
    if (!has_kernels)
        cupti_enable(KIND_CONCURRENT_KERNEL); /* which does no harm */
    sleep_us(LOOK_US);
    if (!has_kernels)
        cupti_disable(KIND_CONCURRENT_KERNEL);
    switch_off();
    sleep_us(3000);
    cupti_flush(true);
    bool with_kernels = kernels > before_kernels, with_calls = calls > before_calls;
    *(with_kernels ? with_calls ? &seen.both : &seen.kernels : with_calls ? &seen.calls : &seen.nothing) += 1;
}

static void *run(void *unused)
{
    (void)unused;
    uint64_t end = realtime_ns() + (uint64_t)(way.seconds * 1e9);
    while (realtime_ns() < end) {
        for (int i = 0; i < ROUNDS_A_LOOK; i++, seen.rounds++) {
            if (way.probes) {
                (void)cupti_probe();
            } else {
                switch_on();
                sleep_us(ON_US);
                switch_off();
            }
            sleep_us(OFF_US);
        }
        look();
    }
    over = true;
    return NULL;
}

/* Finds the CUPTI that the program has loaded, and begins; 0, or why not. */
int begin(const struct way *wanted)
{
    pthread_t thread;
    enum agent_reason reason = cuda_load();
    reason = reason ? reason : cupti_load("", true);
    if (reason)
        return (int)reason;
    way = *wanted;
    int error = cupti_register(requested, completed);
    for (int i = 0; i < KINDS && way.for_life[i]; i++)
        cupti_enable(way.for_life[i]);
    return error ? error : pthread_create(&thread, NULL, run, NULL);
}

bool is_over(void) { return over; }
struct seen what_was_seen(void)
{
    seen.repeated = repeated;
    return seen;
}
