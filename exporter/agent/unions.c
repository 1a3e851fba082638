/* Busy, overlapping and idle time of a window: kernel-agent.md, section 8 ("Windows, exactly").
 *
 * Every kernel, copy and set leaves an interval. They are sorted once, by start, and swept for each device. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "agent.h"

enum { INTERVALS = 1 << 20, STREAMS = 512 };

struct interval {
    uint64_t start, end;
    uint64_t launched; /* when its call returned, not after `start`; NEVER: unknown */
    uint64_t ahead;    /* while sweeping: the least `launched` of this one and all later ones */
    uint8_t device, activity;
};
#define NEVER UINT64_MAX

struct stream {
    uint32_t device, context, stream;
    bool used;
    uint64_t first_start, last_end, ns;
};

static struct interval *intervals, *spare; /* INTERVALS each; only touched pages cost memory */
static uint32_t count, numbered_from;      /* numbers given out before the last reset are void */
static bool overflowed;
static struct stream streams[STREAMS];
static uint32_t stream_count;
static bool streams_overflowed;

static struct interval *reserve(void)
{
    void *memory = mmap(NULL, sizeof(struct interval) * INTERVALS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static bool has_room(void)
{
    if (!intervals)
        intervals = reserve();
    if (!spare)
        spare = reserve();
    return intervals && spare && count < INTERVALS;
}

uint32_t unions_add(uint32_t device, enum activity activity, uint64_t start, uint64_t end)
{
    if (overflowed || !has_room()) { /* no memory: asked for once a window, not once a record */
        overflowed = true;
        return NO_INTERVAL;
    }
    intervals[count] = (struct interval){.start = start, .end = end, .launched = NEVER,
                                         .device = (uint8_t)device, .activity = (uint8_t)activity};
    return numbered_from + count++;
}

void unions_launched(uint32_t number, uint64_t launched)
{
    uint32_t index = number - numbered_from;
    if (number == NO_INTERVAL || index >= count)
        return;
    struct interval *i = &intervals[index];
    i->launched = launched < i->start ? launched : i->start; /* the call may return later */
}

void unions_stream(uint32_t device, uint32_t context, uint32_t stream, uint64_t start, uint64_t end)
{
    uint32_t place = (stream * 31u + context * 7u + device) % STREAMS;
    for (uint32_t probe = 0; probe < STREAMS; probe++, place = (place + 1) % STREAMS) {
        struct stream *s = &streams[place];
        if (!s->used) {
            if (stream_count == STREAMS / 2)
                break;
            stream_count++;
            *s = (struct stream){.device = device, .context = context, .stream = stream, .used = true,
                                 .first_start = start};
        }
        if (s->device != device || s->context != context || s->stream != stream)
            continue;
        s->first_start = start < s->first_start ? start : s->first_start;
        s->last_end = end > s->last_end ? end : s->last_end;
        s->ns += end - start;
        return;
    }
    streams_overflowed = true;
}

/* ---- Sorting ---- */

static uint32_t end_of_run(uint32_t from)
{
    while (from + 1 < count && intervals[from].start <= intervals[from + 1].start)
        from++;
    return from + 1;
}

static void merge(struct interval *to, uint32_t begin, uint32_t middle, uint32_t end)
{
    uint32_t left = begin, right = middle;
    for (uint32_t i = begin; i < end; i++)
        to[i] = left < middle && (right >= end || intervals[left].start <= intervals[right].start)
                    ? intervals[left++]
                    : intervals[right++];
}

/* Merge sort of the runs that are there: each buffer's records are nearly in order. */
void unions_sort(void)
{
    for (uint32_t runs = 2; runs > 1;) {
        runs = 0;
        for (uint32_t begin = 0; begin < count; runs++) {
            uint32_t middle = end_of_run(begin);
            uint32_t end = middle < count ? end_of_run(middle) : middle;
            merge(spare, begin, middle, end);
            begin = end;
        }
        struct interval *sorted = spare;
        spare = intervals;
        intervals = sorted;
    }
}

/* ---- Sweeping ---- */

/* A union that grows by intervals in the order of their starts. */
struct growing {
    uint64_t reach, sum;
};

static void grow(struct growing *g, uint64_t start, uint64_t end)
{
    if (end <= g->reach)
        return;
    g->sum += end - (start > g->reach ? start : g->reach);
    g->reach = end;
}

/* Nothing ran in [from, to], `launched` is the earliest launch of what started later. is_known: the launch of what
 * ended the pause is. After `closed` work may have run of which there is no record. */
static void add_idle(struct united *u, uint64_t from, uint64_t to, uint64_t launched, bool is_known, uint64_t closed)
{
    uint64_t cut = to < closed ? to : closed > from ? closed : from;
    uint64_t queued = launched >= cut ? 0 : cut - (launched > from ? launched : from);
    u->idle_queue += queued;
    *(is_known ? &u->idle_host : &u->idle_other) += cut - from - queued;
    u->idle_other += to - cut;
}

/* For each interval of the device the earliest launch of it and all that start later. */
static void look_ahead(uint32_t device)
{
    uint64_t least = NEVER;
    for (uint32_t i = count; i-- > 0;) {
        if (intervals[i].device != device)
            continue;
        least = intervals[i].launched < least ? intervals[i].launched : least;
        intervals[i].ahead = least;
    }
}

/* A: the latest first start, B: the least of the last ends (not before `closed`), over the streams with at least 1 %
 * of the kernels' time. */
static bool bounds(uint32_t device, uint64_t closed, uint64_t *begin, uint64_t *end)
{
    uint64_t all = 0;
    for (uint32_t i = 0; i < STREAMS; i++)
        all += streams[i].used && streams[i].device == device ? streams[i].ns : 0;
    *begin = 0;
    *end = UINT64_MAX;
    for (uint32_t i = 0; i < STREAMS; i++) {
        const struct stream *s = &streams[i];
        if (!s->used || s->device != device || s->ns < all / 100)
            continue;
        uint64_t last = s->last_end > closed ? s->last_end : closed;
        *begin = s->first_start > *begin ? s->first_start : *begin;
        *end = last < *end ? last : *end;
    }
    return *end != UINT64_MAX; /* of a hundred streams and more perhaps none has so much */
}

/* Whether kernels ran before any were recorded: by another clock, not one that was converted with a small error. */
static bool is_clock_behind(uint32_t device)
{
    enum { ERROR_NS = 1000000 };
    for (uint32_t i = 0; i < STREAMS; i++)
        if (streams[i].used && streams[i].device == device && streams[i].first_start + ERROR_NS < windows_opening())
            return true;
    return false;
}

/* The device's first work that starts at `time` or later; NULL: there is none. */
static const struct interval *first_from(uint32_t device, uint64_t time)
{
    for (uint32_t i = 0; i < count; i++)
        if (intervals[i].device == device && intervals[i].start >= time)
            return &intervals[i];
    return NULL;
}

struct united unions_of(uint32_t device, uint64_t from, uint64_t closed, bool continues)
{
    struct united u = {.begin = from, .end = closed};
    bool has_bounds = from > 0 || bounds(device, closed, &u.begin, &u.end);
    if (continues) /* the next part begins there */
        u.end = closed;
    if (overflowed || streams_overflowed || !has_bounds || u.end <= u.begin || is_clock_behind(device))
        return (struct united){0};
    look_ahead(device);
    struct growing start = {.reach = u.begin}, busy = start, kernels = start;
    struct growing one[] = {[ACTIVITY_COMPUTE] = start, [ACTIVITY_COMMUNICATION] = start, [ACTIVITY_COPY] = start};
    for (uint32_t n = 0; n < count && intervals[n].start < u.end; n++) {
        const struct interval *i = &intervals[n];
        if (i->device != device || i->end <= u.begin)
            continue;
        if (i->start > busy.reach)
            add_idle(&u, busy.reach, i->start, i->ahead, i->launched != NEVER, closed);
        uint64_t end = i->end < u.end ? i->end : u.end;
        grow(&busy, i->start, end);
        grow(&one[i->activity], i->start, end);
        if (i->activity != ACTIVITY_COPY)
            grow(&kernels, i->start, end);
    }
    if (busy.reach < u.end) {
        const struct interval *next = first_from(device, u.end);
        /* Without any later work nothing was launched, if launches are recorded at all. */
        bool is_known = next ? next->launched != NEVER : kinds_have_launches();
        add_idle(&u, busy.reach, u.end, next ? next->ahead : NEVER, is_known, closed);
    }
    u.busy = busy.sum;
    u.compute = one[ACTIVITY_COMPUTE].sum;
    u.communication = one[ACTIVITY_COMMUNICATION].sum;
    u.copy = one[ACTIVITY_COPY].sum;
    u.overlap = u.compute + u.communication - kernels.sum;
    return u;
}

/* Gives the memory back to the system after a window with very many. */
static void release(struct interval *memory, uint32_t used)
{
    if (memory && (size_t)used * sizeof *memory > (4u << 20))
        (void)madvise(memory, sizeof *memory * INTERVALS, MADV_DONTNEED);
}

void unions_reset(uint64_t from)
{
    uint32_t kept = 0, before = count;
    for (uint32_t i = 0; from && i < count; i++)
        if (intervals[i].end > from)
            spare[kept++] = intervals[i];
    struct interval *other = spare;
    spare = intervals;
    intervals = other;
    numbered_from += before;
    if (numbered_from > NO_INTERVAL / 2)
        numbered_from = 0;
    count = kept;
    release(spare, before);
    if (!kept)
        release(intervals, before);
    overflowed = streams_overflowed = false;
    memset(streams, 0, sizeof streams);
    stream_count = 0;
}
