/* The frame of every call: clock, scenario (re)loading, faults, call counts; what CUDA can see. */
#include <ctype.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_cupti.h"

enum { DRIVER = 1, CUDA = 2, PROFILER = 4 };
#define FN(name, flags) {#name, (flags)},
static const struct { const char *name; int flags; } FUNCTION[FUNCTIONS] = {
#include "functions.def"
};
#undef FN

/* ---- Clock ---- */

static _Atomic int64_t origin_ns; /* the first cuptiPmSamplingStart; 0 before it */

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

double seconds_at(int64_t monotonic)
{
    int64_t origin = atomic_load(&origin_ns);
    return origin && monotonic > origin ? (double)(monotonic - origin) / 1e9 : 0;
}

void clock_start(int64_t monotonic)
{
    int64_t unset = 0;
    atomic_compare_exchange_strong(&origin_ns, &unset, monotonic);
}

static double seconds_now(void) { return seconds_at(monotonic_ns()); }

void sleep_ns(int64_t ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += until.tv_nsec;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

/* ---- Counts, shared with the test through the file FAKE_CUPTI_CALLS ---- */

typedef struct { char name[56]; _Atomic int64_t total, device[MAX_DEVICES]; } Record;
static const char *const STAT_NAMES[STATS] = {
    "@reloads", "@scenario_errors", "@dead_object_uses", "@live_samplers", "@live_hosts",
    "@windows", "@lost_windows",    "@hangs",            "@max_inside"};
enum { RECORDS = (int)FUNCTIONS + (int)STATS };
static Record own_records[RECORDS];
static Record *records = own_records;
static pthread_once_t records_once = PTHREAD_ONCE_INIT;

static void records_open(void)
{
    const char *path = getenv("FAKE_CUPTI_CALLS");
    int fd = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0 && ftruncate(fd, sizeof own_records) == 0) {
        void *map = mmap(NULL, sizeof own_records, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED)
            records = map;
    }
    if (fd >= 0)
        close(fd);
    if (path && *path && records == own_records)
        fprintf(stderr, "fake_cupti: cannot map %s\n", path);
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
    if (!next) {
        fprintf(stderr, "fake_cupti: %s\n", error);
        stat_add(STAT_scenario_errors, NO_DEVICE, 1);
        return;
    }
    Scenario *old = atomic_load(&current);
    if (old) {
        /* Published before it holds, so that no call sees the old one after that time. */
        scenario_carry(old, next, atomic_load(&origin_ns) ? seconds_now() + 0.005 : 0);
        stat_add(STAT_reloads, NO_DEVICE, 1);
    }
    atomic_store(&current, next);
}

/* The newest scenario, read again if the file changed. */
static const Scenario *scenario_now(void)
{
    const char *path = getenv("FAKE_CUPTI_SCENARIO");
    int64_t now = monotonic_ns(), last = atomic_load(&checked_ns);
    if (!path || (atomic_load(&current) && now - last < 20000000))
        return atomic_load(&current);
    pthread_mutex_lock(&loading);
    load(path);
    atomic_store(&checked_ns, monotonic_ns());
    pthread_mutex_unlock(&loading);
    return atomic_load(&current);
}

/* Tells the Python side about a scenario before a process reads it. */
int fake_cupti_check(const char *path, char *error, size_t size)
{
    return scenario_parse(path, error, size) ? 0 : 1;
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

/* As in the driver's uninterruptible sleep: no signal ends it but SIGKILL; only the scenario does. */
static void hang(const Fault *fault, int device)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    stat_add(STAT_hangs, device, 1);
    while (still_hangs(fault))
        sleep_ns(20000000);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static bool due(const Fault *f, const Call *c)
{
    if ((f->device != ANY_DEVICE && f->device != c->entered) || !span_holds(&f->span, c->t) ||
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
        case ACT_HANG: hang(f, c->entered); break;
        case ACT_CRASH: raise(SIGSEGV); abort();
        case ACT_EXIT: _exit(f->code);
        case ACT_KILLED: raise(SIGKILL); break;
        default: return f->code; /* the first due code wins; 0 exempts from later lines */
        }
    }
    return OK;
}

/* ---- What CUDA sees ---- */

static int visible[MAX_DEVICES]; /* ids by ordinal, fixed by the first cuInit as in real life */
static int visible_count;
static _Atomic bool cuda_ready;
static _Atomic int profilers;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

/* The device that an entry of CUDA_VISIBLE_DEVICES means: its place or the beginning of its UUID. */
static int named_device(const Scenario *s, const char *entry)
{
    if (isdigit((unsigned char)*entry)) {
        long place = strtol(entry, NULL, 10);
        return place < s->device_count ? s->order[place] : NO_DEVICE;
    }
    for (int i = 0; i < s->device_count && strncmp(entry, "GPU-", 4) == 0; i++)
        if (strncasecmp(entry, s->devices[s->order[i]]->uuid, strlen(entry)) == 0)
            return s->order[i];
    return NO_DEVICE;
}

static bool is_visible(int id)
{
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == id)
            return true;
    return false;
}

/* As CUDA: the first entry that names no device hides it and all that follow. */
static void read_visible(const Scenario *s, const char *list)
{
    char entries[4096], *rest = entries;
    snprintf(entries, sizeof entries, "%s", list);
    for (char *entry; (entry = strtok_r(rest, ", ", &rest));) {
        int id = named_device(s, entry);
        if (id == NO_DEVICE || is_visible(id))
            return;
        visible[visible_count++] = id;
    }
}

/* Puts the visible devices in the scenario's order. */
static void sort_visible(const Scenario *s)
{
    int sorted[MAX_DEVICES], count = 0;
    for (int i = 0; i < s->device_count; i++)
        if (is_visible(s->order[i]))
            sorted[count++] = s->order[i];
    memcpy(visible, sorted, sizeof *sorted * (size_t)count);
}

int cuda_start(const Scenario *s)
{
    pthread_mutex_lock(&starting);
    if (!atomic_load(&cuda_ready)) {
        const char *list = getenv("CUDA_VISIBLE_DEVICES"), *order = getenv("CUDA_DEVICE_ORDER");
        visible_count = 0;
        if (list) {
            read_visible(s, list);
        } else {
            visible_count = s->device_count;
            memcpy(visible, s->order, sizeof s->order);
        }
        if (order && strcmp(order, "PCI_BUS_ID") == 0)
            sort_visible(s);
        atomic_store(&cuda_ready, visible_count > 0);
    }
    pthread_mutex_unlock(&starting);
    return visible_count;
}

int cuda_device_count(void) { return visible_count; }

const Device *cuda_device(const Scenario *s, size_t ordinal)
{
    return ordinal < (size_t)visible_count ? s->devices[visible[ordinal]] : NULL;
}

void profiler_users(int change) { atomic_fetch_add(&profilers, change); }

/* ---- Calls ---- */

static _Atomic int inside[MAX_DEVICES];

int call_open(Call *c, Function fn)
{
    *c = (Call){.fn = fn, .entered = NO_DEVICE};
    int flags = FUNCTION[fn].flags;
    atomic_fetch_add(&record(fn)->total, 1);
    scenario_now();
    c->t = seconds_now();
    c->scenario = scenario_at(atomic_load(&current), c->t);
    if (!c->scenario)
        return flags & DRIVER ? CUDA_NO_DEVICE : NOT_INITIALIZED;
    if (flags & CUDA && !atomic_load(&cuda_ready))
        return flags & DRIVER ? CUDA_NOT_INITIALIZED : NOT_INITIALIZED;
    return flags & PROFILER && atomic_load(&profilers) <= 0 ? NOT_INITIALIZED : OK;
}

int call_enter(Call *c, int device)
{
    c->entered = device;
    if (device != NO_DEVICE) {
        atomic_fetch_add(&record(c->fn)->device[device], 1);
        stat_peak(STAT_max_inside, device, atomic_fetch_add(&inside[device], 1) + 1);
    }
    return apply_faults(c);
}

int call_close(Call *c, int ret)
{
    if (c->entered != NO_DEVICE)
        atomic_fetch_sub(&inside[c->entered], 1);
    return ret;
}

void misuse(Function fn, const char *why)
{
    fprintf(stderr, "fake_cupti: %s: %s\n", FUNCTION[fn].name, why);
    abort();
}
