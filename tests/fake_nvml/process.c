/* Processes on a device, and its events. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "getters.h"

static bool listed(const Process *p, const Call *c)
{
    const Entity *e = c->entity;
    if (p->device != e->device || !span_holds(&p->span, c->t))
        return false;
    return e->gi < 0 || (p->gi == (uint32_t)e->gi && (p->ci == U32NA || p->ci == (uint32_t)e->ci));
}

/* The next listed process of a type (-1: any with utilization) at or after *i; NULL at the end. */
static const Process *next_process(const Call *c, int type, int *i)
{
    for (; *i < c->scenario->process_count; ++*i) {
        const Process *p = &c->scenario->processes[*i];
        if (listed(p, c) && (type < 0 ? p->sampled : (int)p->type == type))
            return &c->scenario->processes[(*i)++];
    }
    return NULL;
}

/* An entry of `stride` bytes: 16 as before MIG, 24, or 32 as the first R535 drivers wrote. */
static void put(char *at, unsigned stride, const Process *p)
{
    struct { uint32_t pid; uint64_t memory; uint32_t gi, ci; uint64_t protected_memory; } entry;
    memset(&entry, 0, sizeof entry);
    entry.pid = p->pid;
    entry.memory = p->memory;
    entry.gi = p->gi;
    entry.ci = p->ci;
    memset(at, 0, stride);
    memcpy(at, &entry, stride < sizeof entry ? stride : sizeof entry);
}

static int processes(Function fn, ProcessType type, const Handle *h, unsigned *count, char *out)
{
    Call c;
    int rc = call_device(&c, fn, h);
    if (rc == OK && !count)
        rc = INVALID_ARGUMENT;
    if (rc != OK)
        return call_close(&c, rc);
    unsigned room = *count, found = 0;
    int i = 0;
    for (const Process *p; (p = next_process(&c, (int)type, &i)); found++)
        if (out && found < room)
            put(out + (size_t)found * c.scenario->process_stride, c.scenario->process_stride, p);
    *count = found;
    return call_close(&c, found > room || (found && !out) ? INSUFFICIENT_SIZE : OK);
}

#define PROCESSES(name, type) \
    int name(const Handle *h, unsigned *count, char *out) \
    { \
        return processes(FN_##name, type, h, count, out); \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, P_COMPUTE)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, P_COMPUTE)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, P_GRAPHICS)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, P_GRAPHICS)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, P_MPS)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, P_MPS)

static uint64_t realtime_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

int nvmlDeviceGetProcessUtilization(const Handle *h, ProcessSample *out, unsigned *count, uint64_t since)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetProcessUtilization, h);
    if (rc == OK)
        rc = !count ? INVALID_ARGUMENT : mig_on(c.entity, c.scenario, c.t) ? NOT_SUPPORTED : OK;
    if (rc != OK)
        return call_close(&c, rc);
    uint64_t now = realtime_us();
    unsigned room = *count, found = 0;
    int i = 0;
    for (const Process *p; since < now && (p = next_process(&c, -1, &i)); found++)
        if (out && found < room)
            out[found] = (ProcessSample){p->pid, now, p->sm, p->mem, p->enc, p->dec};
    *count = found;
    if (found == 0)
        rc = NOT_FOUND;
    else if (!out || found > room)
        rc = INSUFFICIENT_SIZE;
    return call_close(&c, rc);
}

/* ---- Events ---- */

typedef struct {
    _Atomic uint64_t types[MAX_DEVICES];
    _Atomic bool freed;
    double position; /* events up to here are behind us */
    int delivered;   /* how many of those exactly at `position` were delivered */
} EventSet;

enum { EVENT_XID = 8 };

GETTER(nvmlDeviceGetSupportedEventTypes, supported_events, 64)

int nvmlEventSetCreate(EventSet **out)
{
    Call c;
    int rc = call_open(&c, FN_nvmlEventSetCreate);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK) {
        if (!(*out = calloc(1, sizeof **out)))
            abort();
        (*out)->position = c.t; /* earlier events are lost, as in a driver */
    }
    return call_close(&c, rc);
}

/* The memory stays, so that a waiting thread is safe. */
int nvmlEventSetFree(EventSet *set)
{
    Call c;
    int rc = call_open(&c, FN_nvmlEventSetFree);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK && (!set || atomic_exchange(&set->freed, true)))
        rc = INVALID_ARGUMENT;
    return call_close(&c, rc);
}

int nvmlDeviceRegisterEvents(const Handle *h, uint64_t types, EventSet *set)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceRegisterEvents, h);
    uint64_t offered = 0;
    if (rc == OK)
        rc = !set || set->freed ? INVALID_ARGUMENT : get_u64(&c, K_supported_events, &offered);
    if (rc == OK && (types & ~offered))
        rc = NOT_SUPPORTED;
    if (rc == OK)
        atomic_fetch_or(&set->types[c.entity->device], types);
    return call_close(&c, rc);
}

/* The set's next Xid that is due, in order of time and then of lines; moves the set past it. */
static const Xid *next_xid(EventSet *set, const Scenario *s, double now)
{
    const Xid *best = NULL;
    int same = 0, rank = 0;
    for (int i = 0; i < s->xid_count; i++) {
        const Xid *x = &s->xids[i];
        if (x->at > now || x->at < set->position)
            continue;
        if (x->at == set->position && same++ < set->delivered)
            continue;
        if (best && x->at >= best->at)
            continue;
        best = x;
        rank = x->at == set->position ? same : 1;
    }
    if (best) {
        set->position = best->at;
        set->delivered = rank;
    }
    return best;
}

static bool wanted(const EventSet *set, const Xid *x)
{
    return atomic_load(&set->types[x->device]) & EVENT_XID;
}

static int wait_xid(EventSet *set, EventData *out, unsigned timeout_ms)
{
    const double deadline = seconds_now() + timeout_ms / 1000.0;
    for (;;) {
        if (atomic_load(&set->freed))
            return INVALID_ARGUMENT;
        const Scenario *s = scenario_now();
        for (const Xid *x; (x = next_xid(set, s, seconds_now()));)
            if (wanted(set, x)) {
                void *device = (void *)(uintptr_t)handle_of(s->devices[x->device]);
                *out = (EventData){device, EVENT_XID, x->code, x->gi, U32NA};
                return OK;
            }
        if (seconds_now() >= deadline)
            return TIMEOUT;
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
}

int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms)
{
    Call c;
    int rc = call_open(&c, FN_nvmlEventSetWait_v2);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK)
        rc = set && out ? wait_xid(set, out, timeout_ms) : INVALID_ARGUMENT;
    return call_close(&c, rc);
}
