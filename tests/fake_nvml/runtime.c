/* The frame of every call: clock, scenario (re)loading, handles, faults, call counts. */
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nvml.h"

enum { PRE = 1, MIG = 2, GPM = 4 };
#define FN(name, flags) {#name, (flags)},
static const struct { const char *name; int flags; } FUNCTION[FUNCTIONS] = {
#include "functions.def"
};
#undef FN

/* ---- Clock ---- */

static _Atomic int64_t origin_ns; /* the first init; 0 before it */
static _Atomic int users;         /* inits minus shutdowns */
static _Atomic unsigned generation;

static int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

double seconds_now(void)
{
    int64_t origin = atomic_load(&origin_ns);
    return origin ? (double)(monotonic_ns() - origin) / 1e9 : 0;
}

static void sleep_ns(int64_t ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += until.tv_nsec;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

/* ---- Counts, shared with the test through the file FAKE_NVML_CALLS ---- */

typedef struct { char name[56]; _Atomic int64_t total, device[MAX_DEVICES]; } Record;
static const char *const STAT_NAMES[STATS] = {
    "@reloads",      "@scenario_errors", "@freed_sample_uses", "@stale_handles",
    "@live_samples", "@hangs",           "@max_inside",        "@gpm_max_inside",
    "@gpm_together", "@fields_together"};
enum { RECORDS = (int)FUNCTIONS + (int)STATS };
static Record own_records[RECORDS];
static Record *records = own_records;
static pthread_once_t records_once = PTHREAD_ONCE_INIT;

static void records_open(void)
{
    const char *path = getenv("FAKE_NVML_CALLS");
    int fd = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0 && ftruncate(fd, sizeof own_records) == 0) {
        void *map = mmap(NULL, sizeof own_records, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED)
            records = map;
    }
    if (fd >= 0)
        close(fd);
    if (path && *path && records == own_records)
        fprintf(stderr, "fake_nvml: cannot map %s\n", path);
    for (int i = 0; i < RECORDS; i++)
        snprintf(records[i].name, sizeof records[i].name, "%s",
                 i < (int)FUNCTIONS ? FUNCTION[i].name : STAT_NAMES[i - (int)FUNCTIONS]);
}

static Record *record(int index)
{
    pthread_once(&records_once, records_open);
    return &records[index];
}

void stat_add(Stat stat, int device, int64_t amount)
{
    Record *r = record((int)FUNCTIONS + (int)stat);
    atomic_fetch_add(&r->total, amount);
    if (device >= 0)
        atomic_fetch_add(&r->device[device], amount);
}

static void raise_to(_Atomic int64_t *peak, int64_t value)
{
    int64_t old = atomic_load(peak);
    while (old < value && !atomic_compare_exchange_weak(peak, &old, value))
        ;
}

static void stat_peak(Stat stat, int device, int64_t value)
{
    Record *r = record((int)FUNCTIONS + (int)stat);
    raise_to(&r->total, value);
    raise_to(&r->device[device], value);
}

/* ---- The scenario ---- */

static _Atomic(Scenario *) current; /* replaced ones stay: readers may hold them */
static _Atomic int64_t checked_ns;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static struct stat loaded;
static bool broken;

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void load(const char *path)
{
    struct stat file;
    if (stat(path, &file) != 0 || same_file(&file, &loaded))
        return;
    loaded = file;
    char error[512];
    Scenario *next = scenario_parse(path, error, sizeof error);
    broken = !next;
    if (broken) {
        fprintf(stderr, "fake_nvml: %s\n", error);
        stat_add(STAT_scenario_errors, -1, 1);
        return;
    }
    Scenario *old = atomic_load(&current);
    if (old) {
        /* Published before it holds, so that no call sees the old one after that time. */
        scenario_carry(old, next, atomic_load(&origin_ns) ? seconds_now() + 0.005 : 0);
        stat_add(STAT_reloads, -1, 1);
    }
    atomic_store(&current, next);
}

const Scenario *scenario_now(void)
{
    const char *path = getenv("FAKE_NVML_SCENARIO");
    int64_t now = monotonic_ns(), last = atomic_load(&checked_ns);
    if (!path || (atomic_load(&current) && now - last < 20000000))
        return atomic_load(&current);
    pthread_mutex_lock(&loading);
    load(path);
    atomic_store(&checked_ns, monotonic_ns());
    pthread_mutex_unlock(&loading);
    return atomic_load(&current);
}

int index_of_device(const Scenario *s, int device)
{
    for (int i = 0; i < s->order_count; i++)
        if (s->order[i] == device)
            return i;
    return -1;
}

const Entity *entity_of_index(const Scenario *s, unsigned index)
{
    unsigned count = (unsigned)s->order_count;
    if (s->count.ret == OK && s->count.v < count)
        count = (unsigned)s->count.v;
    return index < count ? s->devices[s->order[index]] : NULL;
}

const Entity *mig_find(const Scenario *s, int device, int gi, int ci)
{
    for (int m = 0; m < s->mig_count[device]; m++)
        if (s->migs[device][m]->gi == gi && (ci < 0 || s->migs[device][m]->ci == ci))
            return s->migs[device][m];
    return NULL;
}

bool mig_on(const Entity *device, const Scenario *s, double t)
{
    Value mode = value_at(device, K_mig_mode, t);
    return mode.ret == RET_AUTO ? s->mig_count[device->device] > 0 : mode.ret == OK && mode.v != 0;
}

/* ---- Handles: stable within one init, new after the next ---- */

static Handle *handles[4096];
static int handle_count;
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;

const Handle *handle_of(const Entity *e)
{
    Handle want = {atomic_load(&generation), e->device, e->gi, e->ci};
    Handle *found = NULL;
    pthread_mutex_lock(&handles_lock);
    for (int i = 0; i < handle_count && !found; i++)
        if (memcmp(handles[i], &want, sizeof want) == 0)
            found = handles[i];
    if (!found && handle_count < 4096 && (found = malloc(sizeof *found)))
        *(handles[handle_count++] = found) = want;
    pthread_mutex_unlock(&handles_lock);
    return found;
}

static bool handle_known(const Handle *handle)
{
    bool known = false;
    pthread_mutex_lock(&handles_lock);
    for (int i = 0; i < handle_count && !known; i++)
        known = handles[i] == handle;
    pthread_mutex_unlock(&handles_lock);
    return known;
}

/* ---- Faults ---- */

static bool still_hangs(const Fault *fault)
{
    const Scenario *s = scenario_now();
    for (int i = 0; i < s->fault_count; i++)
        if (s->faults[i].seen == fault->seen)
            return span_holds(&s->faults[i].span, seconds_now());
    return false;
}

/* Threads in functions that the real library does not survive from two, whatever their devices. */
static _Atomic int gpm_anywhere, fields_anywhere;

static void come(Function fn)
{
    if (FUNCTION[fn].flags & GPM && atomic_fetch_add(&gpm_anywhere, 1) > 0)
        stat_add(STAT_gpm_together, -1, 1);
    if (fn == FN_nvmlDeviceGetFieldValues && atomic_fetch_add(&fields_anywhere, 1) > 0)
        stat_add(STAT_fields_together, -1, 1);
}

static void go(Function fn)
{
    if (FUNCTION[fn].flags & GPM)
        atomic_fetch_sub(&gpm_anywhere, 1);
    if (fn == FN_nvmlDeviceGetFieldValues)
        atomic_fetch_sub(&fields_anywhere, 1);
}

/* As in the driver's uninterruptible sleep: no signal ends it; only the scenario does. A thread that hangs here is not
 * in the library's own code. */
static void hang(const Fault *fault, int device, Function fn)
{
    go(fn);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    stat_add(STAT_hangs, device, 1);
    while (still_hangs(fault))
        sleep_ns(20000000);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    come(fn);
}

static bool due(const Fault *f, const Call *c)
{
    if (!target_matches(&f->target, c->entity) || !span_holds(&f->span, c->t) ||
        fnmatch(f->function, FUNCTION[c->fn].name, 0) != 0)
        return false;
    uint64_t seen = atomic_fetch_add(f->seen, 1);
    return seen >= f->after && seen - f->after < f->times;
}

static int apply_faults(const Call *c)
{
    for (int i = 0; i < c->scenario->fault_count; i++) {
        const Fault *f = &c->scenario->faults[i];
        if (!due(f, c))
            continue;
        switch (f->action) {
        case ACT_LATENCY: sleep_ns((int64_t)(f->latency * 1e9)); break;
        case ACT_HANG: hang(f, c->entity ? c->entity->device : -1, c->fn); break;
        case ACT_CRASH: abort();
        default: return f->code; /* the first due code wins; 0 exempts from later lines */
        }
    }
    return OK;
}

/* ---- Calls ---- */

static _Atomic int inside[MAX_DEVICES], gpm_inside[MAX_DEVICES];

int call_open(Call *c, Function fn)
{
    *c = (Call){.fn = fn, .entered = -1};
    atomic_fetch_add(&record(fn)->total, 1);
    scenario_now();
    c->t = seconds_now();
    c->scenario = scenario_at(atomic_load(&current), c->t);
    if (!c->scenario)
        return broken ? UNKNOWN : DRIVER_NOT_LOADED;
    return atomic_load(&users) > 0 || (FUNCTION[fn].flags & PRE) ? OK : UNINITIALIZED;
}

int call_enter(Call *c, const Entity *entity)
{
    c->entity = entity;
    if (entity) {
        int d = c->entered = entity->device;
        atomic_fetch_add(&record(c->fn)->device[d], 1);
        stat_peak(STAT_max_inside, d, atomic_fetch_add(&inside[d], 1) + 1);
        if (FUNCTION[c->fn].flags & GPM)
            stat_peak(STAT_gpm_max_inside, d, atomic_fetch_add(&gpm_inside[d], 1) + 1);
        come(c->fn);
    }
    int rc = apply_faults(c);
    if (rc == OK && entity && entity->gi >= 0 && !(FUNCTION[c->fn].flags & MIG))
        rc = NOT_SUPPORTED;
    return rc;
}

const Entity *entity_of_handle(const Call *c, const Handle *handle, int *rc)
{
    if (!handle || !handle_known(handle)) {
        *rc = INVALID_ARGUMENT;
        return NULL;
    }
    if (handle->generation != atomic_load(&generation))
        stat_add(STAT_stale_handles, handle->device, 1);
    const Entity *e = c->scenario->devices[handle->device];
    if (e && handle->gi >= 0)
        e = mig_find(c->scenario, handle->device, handle->gi, handle->ci);
    if (e && index_of_device(c->scenario, handle->device) >= 0)
        return e;
    *rc = handle->gi >= 0 ? NOT_FOUND : GPU_IS_LOST;
    return NULL;
}

int call_device(Call *c, Function fn, const Handle *handle)
{
    int rc = call_open(c, fn);
    const Entity *e = rc == OK ? entity_of_handle(c, handle, &rc) : NULL;
    return e ? call_enter(c, e) : rc;
}

int call_close(Call *c, int ret)
{
    if (c->entered >= 0) {
        atomic_fetch_sub(&inside[c->entered], 1);
        if (FUNCTION[c->fn].flags & GPM)
            atomic_fetch_sub(&gpm_inside[c->entered], 1);
        go(c->fn);
    }
    return ret;
}

/* The device file that a driver holds while it is open; the real ones need a GPU. */
static _Atomic int device_file = -1;

static void hold_device_file(void)
{
    const char *path = getenv("FAKE_NVML_DEVICE_FILE");
    if (path)
        atomic_store(&device_file, open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
}

static void let_device_file_go(void)
{
    int file = atomic_exchange(&device_file, -1);
    if (file >= 0)
        close(file);
}

static int init(Function fn)
{
    Call c;
    int rc = call_open(&c, fn);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK) {
        int64_t unset = 0;
        atomic_compare_exchange_strong(&origin_ns, &unset, monotonic_ns());
        if (atomic_fetch_add(&users, 1) == 0)
            hold_device_file();
    }
    return call_close(&c, rc);
}

int nvmlInit(void) { return init(FN_nvmlInit); }
int nvmlInit_v2(void) { return init(FN_nvmlInit_v2); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return init(FN_nvmlInitWithFlags); }

int nvmlShutdown(void)
{
    Call c;
    int rc = call_open(&c, FN_nvmlShutdown);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK && atomic_fetch_sub(&users, 1) == 1) {
        atomic_fetch_add(&generation, 1);
        let_device_file_go();
    }
    return call_close(&c, rc);
}

const char *nvmlErrorString(int code)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "Operating System Error", "Driver/library version mismatch", "In Use", "Insufficient Memory",
        "No Data", "ECC Not Supported on vGPU", "Insufficient Resources", "Frequency Not Supported",
        "Argument Version Mismatch", "Deprecated", "Not Ready", "GPU Not Found", "Invalid State"};
    Call c;
    call_open(&c, FN_nvmlErrorString);
    if (code >= 0 && code < (int)(sizeof texts / sizeof *texts))
        return texts[code];
    return "Unknown Error";
}

/* Tells the Python side about a scenario before a process reads it. */
int fake_nvml_check(const char *path, char *error, size_t size)
{
    return scenario_parse(path, error, size) ? 0 : 1;
}
