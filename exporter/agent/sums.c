/* What a window collects, and adding it to the file. */
#define _GNU_SOURCE
#include <string.h>

#include "agent.h"

struct sums sums;

/* A wait names a thread, or a context where calls are not recorded; work tells whose device that is, perhaps later. */
static struct {
    uint32_t id, device;
    bool used, has_device;
    uint64_t ns[AGENT_SYNCS], calls[AGENT_SYNCS];
} waiters[THREADS];
static uint32_t waiter_count;
static struct {
    uint32_t waiter, device;
    bool is_known;
} last; /* told by sums_waiter */

static uint32_t last_main_device;

uint32_t sums_bucket(uint64_t ns)
{
    static const uint32_t BOUNDS[] = AGENT_DURATION_BOUNDS;
    uint32_t bucket = 0;
    while (bucket < AGENT_BUCKETS - 1 && ns > BOUNDS[bucket])
        bucket++;
    return bucket;
}

void sums_kernel(uint32_t slot, uint32_t device, uint64_t ns, bool in_graph)
{
    struct agent_kernel *k = kernels_at(slot);
    k->executions++;
    k->launches += !in_graph;
    k->ns += ns;
    k->ns_squared += (double)ns * (double)ns;
    k->max_ns = ns > k->max_ns ? ns : k->max_ns;
    k->buckets[sums_bucket(ns)]++;
    sums.executions[device]++;
}

void sums_latency(uint32_t slot, uint32_t device, uint64_t ns)
{
    struct agent_kernel *k = kernels_at(slot);
    k->latency_ns += ns;
    k->latency_count++;
    sums.devices[device].queue_ns += ns;
    sums.devices[device].queue_buckets[sums_bucket(ns)]++;
}

void sums_api(uint32_t device, uint64_t ns, uint64_t calls)
{
    sums.devices[device].launch_api_ns += ns;
    sums.devices[device].launch_api_calls += calls;
}

/* The place of a thread or context; -1: too many. */
static int waiter_place(uint32_t id)
{
    for (uint32_t probe = 0; probe < THREADS; probe++) {
        uint32_t place = (thread_start(id) + probe) % THREADS;
        if (!waiters[place].used) {
            waiters[place].used = true;
            waiters[place].id = id;
            waiter_count++;
        }
        if (waiters[place].id == id)
            return (int)place;
    }
    return -1;
}

void sums_sync(uint32_t waiter, uint32_t type, uint64_t ns, bool begins)
{
    int place = waiter_place(waiter);
    type = type < AGENT_SYNCS ? type : AGENT_SYNC_UNKNOWN;
    struct agent_device *main = &sums.devices[sums_main_device()];
    uint64_t *sum = place >= 0 ? waiters[place].ns : main->sync_ns;
    uint64_t *calls = place >= 0 ? waiters[place].calls : main->sync_calls;
    sum[type] += ns;
    calls[type] += begins;
}

void sums_waiter(uint32_t waiter, uint32_t device)
{
    if (last.is_known && waiter == last.waiter && device == last.device)
        return;
    int place = waiter_place(waiter);
    if (place < 0)
        return;
    waiters[place].device = device;
    waiters[place].has_device = true;
    last.waiter = waiter;
    last.device = device;
    last.is_known = true;
}



uint32_t sums_main_device(void)
{
    uint32_t best = last_main_device;
    for (uint32_t i = 0; i < AGENT_DEVICES; i++)
        if (sums.executions[i] > sums.executions[best])
            best = i;
    for (uint32_t i = 0; i < AGENT_DEVICES && !sums.devices[best].used; i++)
        if (sums.devices[i].used)
            best = i;
    last_main_device = best;
    return best;
}

uint64_t sums_queue_p95(void)
{
    static const uint32_t BOUNDS[] = AGENT_DURATION_BOUNDS;
    uint64_t all = 0, seen = 0, buckets[AGENT_BUCKETS] = {0};
    for (uint32_t i = 0; i < AGENT_DEVICES; i++)
        for (uint32_t bucket = 0; bucket < AGENT_BUCKETS; bucket++)
            buckets[bucket] += sums.devices[i].queue_buckets[bucket];
    for (uint32_t bucket = 0; bucket < AGENT_BUCKETS; bucket++)
        all += buckets[bucket];
    if (all < 20)
        return 0;
    for (uint32_t bucket = 0; bucket < AGENT_BUCKETS - 1; bucket++) {
        seen += buckets[bucket];
        if (seen * 100 >= all * 95)
            return BOUNDS[bucket];
    }
    return 8 * (uint64_t)BOUNDS[AGENT_BUCKETS - 2];
}

/* ---- Adding to the file ---- */

/* Who they are stays, but of a full table: threads come and go. */
static void forget_waits(void)
{
    if (waiter_count >= THREADS) {
        memset(waiters, 0, sizeof waiters);
        waiter_count = 0;
        last.is_known = false;
        return;
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        memset(waiters[i].ns, 0, sizeof waiters[i].ns);
        memset(waiters[i].calls, 0, sizeof waiters[i].calls);
    }
}

static void settle_waits(void)
{
    uint32_t unknown = sums_main_device();
    for (uint32_t i = 0; i < THREADS; i++) {
        struct agent_device *device = &sums.devices[waiters[i].has_device ? waiters[i].device : unknown];
        for (uint32_t type = 0; type < AGENT_SYNCS; type++) {
            device->sync_ns[type] += waiters[i].ns[type];
            device->sync_calls[type] += waiters[i].calls[type];
        }
    }
    forget_waits();
}

/* Graph launches whose nodes cannot be told apart: all have records, or none has. */
static void settle_graphs(void)
{
    struct agent_device *device = &sums.devices[sums_main_device()];
    *(sums.nodes ? &device->graph_launches_traced : &device->graph_launches_untraced) += sums.loose_graphs;
    sums_api((uint32_t)(device - sums.devices), sums.loose_api_ns, sums.loose_graphs);
}

static void settle_unions(const struct finished *window)
{
    unions_sort();
    for (uint32_t i = 0; i < AGENT_DEVICES; i++) {
        struct agent_device *d = &sums.devices[i];
        if (!d->used)
            continue;
        struct united u = {0};
        if (window->has_union)
            u = unions_of(i, window->from, window->closed, window->continues);
        d->traced_ns = window->traced_ns;
        d->device_traced_ns = u.end - u.begin;
        d->busy_ns = u.busy;
        d->compute_ns = u.compute;
        d->communication_ns = u.communication;
        d->copy_ns = u.copy;
        d->overlap_ns = u.overlap;
        d->idle_host_ns = u.idle_host;
        d->idle_queue_ns = u.idle_queue;
        d->idle_other_ns = u.idle_other;
        d->windows_without_union = u.end == 0;
    }
}

/* All fields of a device are sums but its name and whether it is used. */
static void add_device(struct agent_device *to, const struct agent_device *window)
{
    enum { FIRST = offsetof(struct agent_device, traced_ns), WORDS = (sizeof *to - FIRST) / sizeof(uint64_t) };
    uint64_t sum, more;
    for (size_t i = 0; i < WORDS; i++) {
        memcpy(&sum, (char *)to + FIRST + i * sizeof sum, sizeof sum);
        memcpy(&more, (const char *)window + FIRST + i * sizeof more, sizeof more);
        sum += more;
        memcpy((char *)to + FIRST + i * sizeof sum, &sum, sizeof sum);
    }
    memcpy(to->uuid, window->uuid, sizeof to->uuid);
    to->used = window->used;
}

static void add_key(struct agent_kernel *to, const struct agent_kernel *window)
{
    memcpy(to, window, offsetof(struct agent_kernel, executions));
}

static void add_kernel(struct agent_kernel *to, const struct agent_kernel *window, uint64_t number)
{
    to->executions += window->executions;
    to->launches += window->launches;
    to->ns += window->ns;
    to->ns_squared += window->ns_squared;
    to->max_ns = window->max_ns > to->max_ns ? window->max_ns : to->max_ns;
    to->latency_ns += window->latency_ns;
    to->latency_count += window->latency_count;
    for (uint32_t i = 0; i < AGENT_BUCKETS; i++)
        to->buckets[i] += window->buckets[i];
    to->window = number;
    to->window_executions = window->executions;
    to->window_ns = window->ns;
    to->window_max_ns = window->max_ns;
    to->window_latency_ns = window->latency_ns;
    to->window_latency_count = window->latency_count;
}

static void clear_kernel(struct agent_kernel *window)
{
    size_t key = offsetof(struct agent_kernel, executions);
    memset((char *)window + key, 0, sizeof *window - key);
}

/* Adds the window's share of a slot to the file, if there is one, and forgets it. */
static void settle_kernel(struct agent_file *file, uint32_t slot, uint64_t number)
{
    struct agent_kernel *window = kernels_at(slot);
    if (!window->executions && !window->latency_count)
        return;
    if (file)
        add_kernel(&file->kernels[slot], window, number);
    clear_kernel(window);
}

static void settle_kernels(struct agent_file *file, uint64_t number)
{
    for (uint32_t slot = 0; slot < kernels_count(); slot++)
        settle_kernel(file, slot, number);
    for (uint32_t slot = AGENT_KERNELS; slot < AGENT_KERNELS + AGENT_DEVICES; slot++)
        settle_kernel(file, slot, number);
}

/* Who the devices are stays; what they did is forgotten. */
static void reset(const struct finished *window)
{
    struct sums fresh = {0};
    for (uint32_t i = 0; i < AGENT_DEVICES; i++) {
        memcpy(fresh.devices[i].uuid, sums.devices[i].uuid, sizeof fresh.devices[i].uuid);
        fresh.devices[i].used = sums.devices[i].used;
    }
    sums = fresh;
    unions_reset(window && window->continues ? window->closed : 0);
}

static void add_counts(struct agent_header *h)
{
    h->records_kept += sums.kept;
    h->records_dropped += sums.dropped + sums.unsound;
    h->records_invalid += sums.invalid;
    h->records_unmatched += sums.unmatched;
    h->node_records += sums.nodes;
}

/* Slots that are new, with their keys, though discarded windows may be all that they have had: readers look once. */
static void add_names(struct agent_file *file)
{
    static uint32_t known, slots; /* not from the file: it is in the hands of others too */
    uint32_t used;
    const char *strings = kernels_strings(&used);
    memcpy(file->strings + known, strings + known, used - known);
    known = used;
    for (; slots < kernels_count(); slots++)
        add_key(&file->kernels[slots], kernels_at(slots));
    file->header.strings_used = used;
    file->header.kernels = slots;
    if (kernels_full())
        file->header.flags |= AGENT_FLAG_NAMES_FULL;
}

void sums_publish(const struct finished *window)
{
    struct agent_file *file = file_map();
    settle_graphs();
    settle_waits();
    settle_unions(window);
    if (file) {
        struct agent_header *h = &file->header;
        file_begin();
        h->windows_published++;
        h->last_window_ns = realtime_ns();
        add_counts(h);
        add_names(file);
        for (uint32_t i = 0; i < AGENT_DEVICES; i++)
            if (sums.devices[i].used)
                add_device(&file->devices[i], &sums.devices[i]);
    }
    settle_kernels(file, file ? file->header.windows_published : 0);
    if (file)
        file_end();
    reset(window);
}

void sums_discard(void)
{
    struct agent_file *file = file_map();
    sums.dropped += sums.kept;
    sums.kept = 0;
    if (file) {
        file_begin();
        file->header.windows_discarded++;
        add_counts(&file->header);
        file_end();
    }
    forget_waits();
    runs_forget();
    pairs_forget();
    settle_kernels(NULL, 0);
    reset(NULL);
}
