/* Calls, faults, kinds, buffers. Where the real library would crash, this one aborts with a message. */
#define _GNU_SOURCE
#include "fake_activity.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>
#include <unistd.h>

Settings settings = {.version = 130001, .driver = 13000, .devices = 1};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static _Atomic int64_t clock_offset;

int64_t realtime(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec + atomic_load(&clock_offset);
}

void set_clock(int64_t by) { atomic_fetch_add(&clock_offset, by); }

_Noreturn static void misuse(const char *what)
{
    fprintf(stderr, "fake_activity: %s\n", what);
    abort();
}

/* ---- Calls ---- */

enum { FUNCTIONS = 64 };
static struct { char name[48]; long calls, after, slow_ms; int code; } functions[FUNCTIONS];
static int function_count;
static atomic_bool exiting;
static bool subscribed_by_tool, subscribed_by_us, tool_active;
static long touched; /* calls of ours that change the collection of the tool that holds the subscription */

static int find(const char *name)
{
    for (int i = 0; i < function_count; i++)
        if (strcmp(functions[i].name, name) == 0)
            return i;
    snprintf(functions[function_count].name, sizeof functions[0].name, "%s", name);
    functions[function_count].after = -1;
    return function_count++;
}

/* CUPTI has something for each thread that called it, and tidies it up when the thread ends. */
static pthread_key_t of_thread;

static void end_of_thread(void *unused)
{
    (void)unused;
    if (atomic_load(&exiting))
        misuse("a thread that used CUPTI ended after the exit began");
}

static void make_key(void) { pthread_key_create(&of_thread, end_of_thread); }

static void note_thread(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    pthread_setspecific(of_thread, &of_thread);
}

int call(const char *function)
{
    if (strncmp(function, "cu", 2) == 0) { /* ours, not the C library's */
        if (atomic_load(&exiting))
            misuse("a call after the exit began");
        note_thread();
    }
    pthread_mutex_lock(&lock);
    int i = find(function), code = OK;
    long slow_ms = functions[i].slow_ms, number = ++functions[i].calls;
    if (functions[i].after >= 0 && number > functions[i].after)
        code = functions[i].code;
    bool changes = strstr(function, "Enable") || strstr(function, "Disable") || strstr(function, "Register");
    if (subscribed_by_tool && changes)
        touched++;
    pthread_mutex_unlock(&lock);
    if (slow_ms)
        nanosleep(&(struct timespec){.tv_sec = slow_ms / 1000, .tv_nsec = slow_ms % 1000 * 1000000}, NULL);
    return code;
}

void fault(const char *function, int code, long after)
{
    pthread_mutex_lock(&lock);
    int i = find(function);
    functions[i].code = code;
    functions[i].after = functions[i].calls + after;
    pthread_mutex_unlock(&lock);
}

void slow(const char *function, long ms)
{
    pthread_mutex_lock(&lock);
    functions[find(function)].slow_ms = ms;
    pthread_mutex_unlock(&lock);
}

/* The agent's calls of these come here: this library is searched before the C library. */
static void real(const char *name, void *function)
{
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

unsigned long getauxval(unsigned long type)
{
    unsigned long (*getauxval_)(unsigned long);
    if (type == AT_SECURE && settings.secure)
        return 1;
    real("getauxval", &getauxval_);
    return getauxval_(type);
}

int posix_fallocate(int fd, off_t offset, off_t size)
{
    int (*posix_fallocate_)(int, off_t, off_t);
    int code = call(__func__);
    real("posix_fallocate", &posix_fallocate_);
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    if (settings.has_alarms && !sigismember(&blocked, SIGALRM))
        return EINTR;
    return code ? code : posix_fallocate_(fd, offset, size);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    int (*pthread_create_)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int code = call(__func__);
    real("pthread_create", &pthread_create_);
    return code ? code : pthread_create_(thread, attributes, run, argument);
}

void begin_exit(void) { atomic_store(&exiting, true); }

/* ---- Kinds ---- */

static bool enabled[KINDS];
static atomic_long kernels_switched_on;
static bool functions_on[2][API_IDS]; /* runtime, driver */
static _Atomic uint32_t correlation = 1;

bool kind_on(int kind)
{
    pthread_mutex_lock(&lock);
    bool on = enabled[kind];
    pthread_mutex_unlock(&lock);
    return on;
}

bool api_on(int kind, uint32_t id)
{
    pthread_mutex_lock(&lock);
    bool on = enabled[kind] || functions_on[kind == DRIVER][id];
    pthread_mutex_unlock(&lock);
    return on;
}

long kernel_enables(void) { return atomic_load(&kernels_switched_on); }
uint32_t next_correlation(void) { return atomic_fetch_add(&correlation, 1); }
void set_correlation(uint32_t next) { atomic_store(&correlation, next); }

void print_kinds(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < KINDS; i++)
        if (enabled[i])
            printf(" %d", i);
    pthread_mutex_unlock(&lock);
}

int engine_enable(int kind, bool on)
{
    if (kind <= 0 || kind >= KINDS)
        return 21;
    pthread_mutex_lock(&lock);
    kernels_switched_on += on && kind == KERNEL;
    if (!on && (kind == RUNTIME || kind == DRIVER)) /* with all functions, whoever wanted them */
        memset(functions_on[kind == DRIVER], 0, sizeof functions_on[0]);
    enabled[kind] = on;
    pthread_mutex_unlock(&lock);
    return OK;
}

int engine_api(int kind, uint32_t id, bool on)
{
    uint32_t ids = kind == DRIVER ? 846 : 550;
    if (id >= ids)
        return 1;
    pthread_mutex_lock(&lock);
    functions_on[kind == DRIVER][id] = on;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- Buffers ---- */

int engine_next(uint8_t *buffer, size_t valid, uint8_t **record);

typedef struct Buffer Buffer;
struct Buffer { uint8_t *memory; size_t size, used, records; int64_t complete; int lane; bool full; Completed completed; Buffer *next; };
static Buffer *buffers; /* those that we have got, newest first */
static Requested requested;
static Completed completed;
static size_t dropped;
static _Atomic int lanes;
static _Thread_local int own_lane;

int engine_register(Requested request, Completed complete)
{
    if (!request || !complete)
        return 1;
    pthread_mutex_lock(&lock);
    requested = request;
    completed = complete;
    pthread_mutex_unlock(&lock);
    return OK;
}

static Buffer *request(int lane)
{
    uint8_t *memory = NULL;
    size_t size = 0, most = 0;
    if (!requested)
        return NULL;
    requested(&memory, &size, &most);
    if (!memory) {
        if (settings.version < 28)
            misuse("a buffer was refused, on which this version crashes");
        return NULL;
    }
    if ((uintptr_t)memory % 8 || size < 1024)
        misuse("a bad buffer");
    memset(memory, 0, size); /* as CUPTI does */
    for (Buffer *b = buffers; b; b = b->next)
        if (b->memory == memory && settings.version >= 28)
            misuse("the same buffer twice");
    Buffer *b = calloc(1, sizeof *b);
    *b = (Buffer){.memory = memory, .size = size, .lane = lane, .completed = completed, .next = buffers};
    buffers = b;
    return b;
}

/* Of the records that are forced out those whose work still runs have no end. */
static void cut_off(Buffer *b, int64_t now)
{
    for (uint8_t *record = NULL; engine_next(b->memory, b->used, &record) == OK;) {
        uint32_t kind;
        int64_t end;
        memcpy(&kind, record, sizeof kind);
        uint8_t *place = record + (kind == KERNEL || kind == MEMCPY || kind == MEMCPY2 || kind == MEMSET ? 24 : 16);
        memcpy(&end, place, sizeof end);
        if (end > now)
            memset(place, 0, sizeof end);
    }
}

/* Takes those out that may go back. */
static Buffer *take(bool flush, bool forced)
{
    Buffer *taken = NULL;
    int64_t now = realtime();
    for (Buffer **place = &buffers; *place;) {
        Buffer *b = *place;
        bool goes = (b->full || flush) && (forced || b->complete <= now) && !settings.stalled &&
                    (b->records || !settings.keeps_empty);
        if (!goes) {
            place = &b->next;
            continue;
        }
        if (b->complete > now)
            cut_off(b, now);
        *place = b->next;
        b->next = taken;
        taken = b;
    }
    return taken;
}

static void give_back(Buffer *b)
{
    while (b) {
        Buffer *next = b->next;
        Completed now;
        pthread_mutex_lock(&lock);
        now = completed; /* whoever registered last gets them all, as in life */
        pthread_mutex_unlock(&lock);
        now(NULL, 0, b->memory, b->size, b->used);
        free(b);
        b = next;
    }
}

void append(const void *record, size_t size, int64_t end, int lane)
{
    pthread_mutex_lock(&lock);
    if (!own_lane)
        own_lane = 1000 * ++lanes;
    lane += settings.global_buffers ? 0 : own_lane;
    Buffer *b = buffers;
    while (b && (b->lane != lane || b->full))
        b = b->next;
    if (!b)
        b = request(lane);
    if (!b) {
        dropped++;
        pthread_mutex_unlock(&lock);
        return;
    }
    memcpy(b->memory + b->used, record, size);
    b->used += size;
    b->records++;
    b->complete = end > b->complete ? end : b->complete;
    b->full = b->used + 512 > b->size || b->records == settings.records_per_buffer;
    Buffer *back = b->full ? take(false, false) : NULL;
    pthread_mutex_unlock(&lock);
    give_back(back);
}

int engine_flush(uint32_t flag)
{
    pthread_mutex_lock(&lock);
    bool registered = completed != NULL;
    Buffer *back = registered ? take(true, flag & 1) : NULL;
    pthread_mutex_unlock(&lock);
    give_back(back);
    return registered ? OK : 7;
}

size_t record_size(uint32_t kind)
{
    bool new = settings.version >= 130000;
    switch (kind) {
    case KERNEL: return new ? 224 : 208;
    case MEMCPY: return new ? 96 : 88;
    case MEMCPY2: return 96;
    case MEMSET: return 88;
    case SYNC: return new ? 56 : 40;
    case RUNTIME: case DRIVER: return 40;
    default: return 0;
    }
}

int engine_next(uint8_t *buffer, size_t valid, uint8_t **record)
{
    uint8_t *next = buffer;
    uint32_t kind;
    if (*record) {
        memcpy(&kind, *record, sizeof kind);
        next = *record + record_size(kind);
    }
    if (next + sizeof kind > buffer + valid)
        return 12;
    memcpy(&kind, next, sizeof kind);
    if (!record_size(kind))
        return 21;
    *record = next;
    return OK;
}

size_t engine_dropped(void)
{
    pthread_mutex_lock(&lock);
    size_t count = dropped;
    dropped = 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void abandon_buffers(void) { pthread_mutex_init(&lock, NULL); }

/* ---- Subscriptions and the other tool ---- */

int engine_subscribe(void)
{
    if (subscribed_by_tool || subscribed_by_us)
        return 39;
    subscribed_by_us = true;
    return OK;
}

void engine_unsubscribe(void)
{
    if (!subscribed_by_us)
        misuse("a subscription was given back that was never taken");
    subscribed_by_us = false;
}

bool tool_is_subscribed(void)
{
    pthread_mutex_lock(&lock);
    bool yes = subscribed_by_tool;
    pthread_mutex_unlock(&lock);
    return yes;
}

void tool_subscribe(bool yes)
{
    pthread_mutex_lock(&lock);
    if (yes && subscribed_by_us)
        misuse("the only subscription is held");
    subscribed_by_tool = yes;
    pthread_mutex_unlock(&lock);
}

void tool_wants_calls(bool yes) { engine_enable(RUNTIME, yes); }
void tool_wants_waits(void) { engine_enable(SYNC, true); }

static long tool_kernels;
static bool tool_frees; /* whatever it gets, as XLA's profiler does */

static void tool_requested(uint8_t **buffer, size_t *size, size_t *most)
{
    *buffer = aligned_alloc(8, 65536);
    *size = 65536;
    *most = 0;
}

static void tool_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size;
    for (uint8_t *record = NULL; engine_next(buffer, valid, &record) == OK;) {
        uint32_t kind;
        memcpy(&kind, record, sizeof kind);
        tool_kernels += kind == KERNEL;
    }
    if (tool_frees)
        free(buffer);
    /* Else it may be the agent's: kineto only knows its own. */
}

void tool_take_over(bool frees)
{
    tool_frees = frees;
    tool_subscribe(true);
    engine_register(tool_requested, tool_completed);
    engine_enable(KERNEL, true);
    engine_enable(RUNTIME, true);
    tool_active = true;
    tool_kernels = 0;
}

long tool_let_go(void)
{
    if (!kind_on(KERNEL))
        misuse("the tool's kernels were disabled");
    engine_flush(1);
    engine_enable(KERNEL, false);
    engine_enable(RUNTIME, false);
    tool_active = false;
    return tool_kernels;
}

void tool_return_foreign(void)
{
    static uint8_t foreign[1024];
    Completed ours;
    pthread_mutex_lock(&lock);
    ours = completed;
    pthread_mutex_unlock(&lock);
    if (!ours)
        return;
    ours(NULL, 0, foreign, sizeof foreign, sizeof foreign);
    ours(NULL, 0, NULL, 0, 0);
}

/* ---- What cuda.c knows ---- */

static atomic_int contexts[MAX_DEVICES];
static atomic_bool initialised;
static _Thread_local bool in_cuinit;
void cuda_init_goes_on(bool yes) { in_cuinit = yes; }
bool is_in_cuinit(void) { return in_cuinit; }
void cuda_context(int device) { atomic_fetch_add(&contexts[device], 1); }
int cuda_contexts(int device) { return atomic_load(&contexts[device]); }
void cuda_init_done(void) { atomic_store(&initialised, true); }
bool cuda_is_init(void) { return atomic_load(&initialised); }

void print_calls(void)
{
    pthread_mutex_lock(&lock);
    size_t out = 0;
    for (Buffer *b = buffers; b; b = b->next)
        out++;
    for (int i = 0; i < function_count; i++)
        printf(" %s=%ld", functions[i].name, functions[i].calls);
    int on[2] = {0};
    for (int i = 0; i < 2 * API_IDS; i++)
        on[i / API_IDS] += functions_on[i / API_IDS][i % API_IDS];
    printf(" @touched=%ld @buffers=%zu @runtime=%d @driver=%d", touched, out, on[0], on[1]);
    pthread_mutex_unlock(&lock);
}
