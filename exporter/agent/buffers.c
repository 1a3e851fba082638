/* The memory that CUPTI fills with records.
 *
 * Large buffers; when CUPTI has them all (it gives each thread its own), small ones; when it has those too, none. CUPTI's
 * callbacks run on the program's threads: they set bits, and our own thread does the rest.
 * Buffers that are not ours (another tool registered its callbacks, and ours were called with its buffers) are left
 * alone. Not every tool does that: XLA's profiler frees what it gets, or takes it for one of its own, of 32 KiB. So each
 * is from the heap, and what a tool may have got is replaced.
 * After a fork the child's callbacks still work, on its own copy, and nobody empties it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"

enum {
    LARGE = 64, LARGE_SIZE = 1 << 20, /* 5,000 kernels each; at 1 M records/s 0.3 s of delay */
    SMALL = 1024, SMALL_SIZE = 4096,
    WORD = 64, BUFFERS = LARGE + SMALL, WORDS = BUFFERS / WORD,
};
static_assert(LARGE % WORD == 0 && SMALL % WORD == 0, "bits fill their words");

static _Atomic(uint8_t *) memory[BUFFERS]; /* the large ones are touched when used */
static _Alignas(8) uint8_t last_resort[SMALL_SIZE];
static _Atomic uint64_t available[WORDS]; /* bit set: here */
static _Atomic uint64_t returned[WORDS];  /* bit set: given back, and not yet emptied. Neither: CUPTI has it */
static _Atomic uint32_t epochs[BUFFERS];  /* when it was handed out */
static size_t filled[BUFFERS];            /* bytes; written before the bit of `returned` is */
static _Atomic uint32_t epoch = 1;
static uint32_t forgotten;                /* buffers of this epoch and before are lost to another tool */
static atomic_bool may_refuse, exhausted, pressed;

static size_t size_of(int index) { return index < LARGE ? LARGE_SIZE : SMALL_SIZE; }

bool buffers_create(void)
{
    for (int i = 0; i < BUFFERS; i++) {
        uint8_t *made = malloc(size_of(i));
        if (!made)
            return false;
        atomic_store(&memory[i], made);
    }
    for (int word = 0; word < WORDS; word++)
        atomic_store(&available[word], UINT64_MAX);
    return true;
}

void buffers_set_version(uint32_t version) { atomic_store(&may_refuse, version >= CUPTI_12_9); }

static int index_of(const uint8_t *buffer)
{
    for (int i = 0; buffer && i < BUFFERS; i++)
        if (atomic_load(&memory[i]) == buffer)
            return i;
    return -1;
}

/* Takes the first that is there, so that few of their pages are ever touched. -1: none. */
static int take(void)
{
    for (int word = 0; word < WORDS; word++) {
        uint64_t bits = atomic_load(&available[word]);
        while (bits) {
            int bit = __builtin_ctzll(bits);
            if (atomic_compare_exchange_weak(&available[word], &bits, bits & ~(UINT64_C(1) << bit)))
                return word * WORD + bit;
        }
    }
    return -1;
}

void buffers_requested(uint8_t **buffer, size_t *size, size_t *most_records)
{
    *most_records = 0; /* as many as fit */
    int index = take();
    if (index >= 0) {
        atomic_store(&epochs[index], atomic_load(&epoch));
        *buffer = atomic_load(&memory[index]);
        *size = size_of(index);
        if (index >= LARGE / 2 && !atomic_exchange(&pressed, true))
            wake_agent();
        return;
    }
    if (atomic_load(&may_refuse)) {
        *buffer = NULL;
        *size = 0;
        return;
    }
    /* Older versions crash on a refusal. What is written to this memory, be it by several threads, nobody reads; tracing
     * ends, at once or with the next window (windows.c). */
    atomic_store(&exhausted, true);
    *buffer = last_resort;
    *size = sizeof last_resort;
    wake_agent();
}

void buffers_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size;
    int index = index_of(buffer);
    if (index < 0)
        return;
    uint64_t bit = UINT64_C(1) << (index % WORD);
    if ((atomic_load(&available[index / WORD]) | atomic_load(&returned[index / WORD])) & bit)
        return; /* CUPTI did not have it */
    size_t most = size_of(index);
    filled[index] = valid < most ? valid : most;
    atomic_fetch_or(&returned[index / WORD], bit);
    wake_agent();
}

void buffers_drain(bool keep)
{
    for (int word = 0; word < WORDS; word++) {
        uint64_t bits = atomic_load(&returned[word]);
        for (uint64_t rest = bits; rest; rest &= rest - 1) {
            int index = word * WORD + __builtin_ctzll(rest);
            uint8_t *buffer = atomic_load(&memory[index]);
            bool ours = atomic_load(&epochs[index]) > forgotten;
            if (filled[index])
                records_take(buffer, filled[index], keep && ours);
        }
        /* First no longer returned, then here: in between it counts as with CUPTI, which delays but loses nothing. */
        atomic_fetch_and(&returned[word], ~bits);
        atomic_fetch_or(&available[word], bits);
    }
}

uint32_t buffers_new_epoch(void) { return atomic_fetch_add(&epoch, 1); }

static bool is_out(int index)
{
    uint64_t bit = UINT64_C(1) << (index % WORD);
    return !((atomic_load(&available[index / WORD]) | atomic_load(&returned[index / WORD])) & bit);
}

bool buffers_are_back(uint32_t last)
{
    for (int index = 0; index < BUFFERS; index++) {
        uint32_t handed = atomic_load(&epochs[index]);
        if (handed > forgotten && handed <= last && is_out(index))
            return false;
    }
    return true;
}

/* What CUPTI still has of them is the other tool's now, perhaps freed, or in use again. */
void buffers_forget(uint32_t last)
{
    forgotten = last;
    for (int index = 0; index < BUFFERS; index++) {
        uint8_t *fresh = is_out(index) && atomic_load(&epochs[index]) <= last ? malloc(size_of(index)) : NULL;
        if (!fresh)
            continue;
        atomic_store(&memory[index], fresh);
        atomic_fetch_or(&available[index / WORD], UINT64_C(1) << (index % WORD));
    }
}

uint32_t buffers_out(void)
{
    uint32_t out = 0;
    for (int word = 0; word < WORDS; word++) {
        uint64_t here = atomic_load(&available[word]) | atomic_load(&returned[word]);
        out += (uint32_t)__builtin_popcountll(~here);
    }
    return out;
}

bool buffers_pressed(void) { return atomic_load(&pressed); }

bool buffers_scarce(void) { return buffers_out() > BUFFERS / 4 * 3; }

void buffers_relieved(void) { atomic_store(&pressed, false); }

bool buffers_exhausted(void) { return atomic_load(&exhausted); }
