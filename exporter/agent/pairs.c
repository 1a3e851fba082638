/* A call and the work that it asked for have the same correlation id but come in different buffers, in either order.
 * Whichever is first waits here; ids count up, so that a place is needed again 64 Ki ids later: what still waits there
 * then never finds its other half. */
#define _GNU_SOURCE
#include <string.h>

#include "agent.h"

enum { PLACES = 1 << 16, CAPTURING = 16, NEARLY_ALL = 8 };

struct waiting {
    uint64_t begin, end;   /* a call's; of work the start, in `begin` */
    uint32_t correlation;
    uint32_t generation;   /* other than now: free */
    uint32_t slot, interval;
    uint32_t thread;       /* of a call */
    uint8_t side;          /* enum pair_side */
    uint8_t device;
    struct copy_place place;
    bool is_edge;            /* of a launch: perhaps its kernel is not recorded */
    bool has_call, has_node; /* of a graph launch: each side may come first, and nodes come many times */
};

static struct waiting ring[PLACES];
static uint32_t generation = 1;
/* What waits, by kind. Their time belongs to the window though their device is not known. */
static struct {
    uint64_t launches, kernels, graphs, api_ns, api_calls;
} open;
static uint64_t launches, expired_launches, expired_kernels;
/* Launches by thread, and how many of them have found their kernels. Counted as they come: a thread whose kernels CUPTI
 * has lost may give all its launches one id, so that most of them expire at once. */
static struct thread {
    uint32_t id;
    uint64_t launches, paired;
} threads[THREADS];
static uint32_t capturing[CAPTURING], capturing_count;

static void add_call(uint64_t ns)
{
    open.api_ns += ns;
    open.api_calls++;
}

/* The call's device is known now. */
static void settle_call(uint32_t device, uint64_t ns)
{
    open.api_ns -= ns;
    open.api_calls--;
    sums_api(device, ns, 1);
}

static void expire(struct waiting *w)
{
    uint32_t device = sums_main_device();
    if (w->side == PAIR_LAUNCH && !w->is_edge) {
        sums.unmatched++;
        expired_launches++;
        open.launches--;
        settle_call(device, w->end - w->begin);
    } else if (w->side == PAIR_KERNEL) {
        sums.unmatched++;
        expired_kernels++;
        open.kernels--;
    } else if (w->side == PAIR_GRAPH && w->has_call && !w->has_node) {
        open.graphs--;
        sums.devices[device].graph_launches_untraced++;
        settle_call(device, w->end - w->begin);
    }
    w->side = PAIR_FREE;
}

static struct waiting *place_of(uint32_t correlation)
{
    struct waiting *w = &ring[correlation % PLACES];
    if (w->generation != generation)
        *w = (struct waiting){.generation = generation};
    if (w->side != PAIR_FREE && w->correlation != correlation)
        expire(w);
    return w;
}

/* Where there are too many, the place of one that lacks nothing. NULL: none does, or it is the number of a free place. */
static struct thread *thread_of(uint32_t id)
{
    struct thread *complete = NULL;
    if (!id)
        return NULL;
    for (uint32_t probe = 0; probe < THREADS; probe++) {
        struct thread *thread = &threads[(thread_start(id) + probe) % THREADS];
        if (!thread->id)
            thread->id = id;
        if (thread->id == id)
            return thread;
        if (thread->paired == thread->launches)
            complete = thread;
    }
    if (complete)
        *complete = (struct thread){.id = id};
    return complete;
}

static void count_launch(uint32_t id, bool is_paired)
{
    struct thread *thread = thread_of(id);
    launches++;
    if (!thread)
        return;
    thread->launches++;
    thread->paired += is_paired;
}

static void count_pair(uint32_t id)
{
    struct thread *thread = thread_of(id);
    if (thread && thread->paired < thread->launches) /* else there was no place for the launch */
        thread->paired++;
}

/* Lets `next` wait, in the place of whatever waits there under the same id (which CUPTI never gives twice). */
static void wait_in(struct waiting *w, struct waiting next)
{
    if (w->side != PAIR_FREE)
        expire(w);
    next.generation = generation;
    *w = next;
}

static void meet(uint32_t device, uint32_t slot, uint64_t start, uint32_t thread, uint64_t begin, uint64_t end,
                 uint32_t interval)
{
    sums_waiter(thread, device);
    sums_api(device, end - begin, 1);
    sums_latency(slot, device, start > end ? start - end : 0);
    unions_launched(interval, end);
}

void pairs_launch(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end, bool is_edge)
{
    struct waiting *w = place_of(correlation);
    if (!is_edge)
        count_launch(thread, w->side == PAIR_KERNEL || w->side == PAIR_TIMELESS_KERNEL);
    if (w->side == PAIR_KERNEL) {
        open.kernels--;
        meet(w->device, w->slot, w->begin, thread, begin, end, w->interval);
        w->side = PAIR_FREE;
        return;
    }
    if (w->side == PAIR_TIMELESS_KERNEL) {
        sums_api(w->device, end - begin, 1);
        w->side = PAIR_FREE;
        return;
    }
    wait_in(w, (struct waiting){.side = PAIR_LAUNCH, .correlation = correlation, .begin = begin, .end = end,
                                .thread = thread, .is_edge = is_edge});
    if (is_edge)
        return;
    open.launches++;
    add_call(end - begin);
}

void pairs_kernel(uint32_t correlation, uint32_t device, uint32_t slot, uint64_t start, uint32_t interval)
{
    struct waiting *w = place_of(correlation);
    if (w->side == PAIR_LAUNCH) {
        if (!w->is_edge) {
            count_pair(w->thread);
            open.launches--;
            open.api_ns -= w->end - w->begin;
            open.api_calls--;
        }
        meet(device, slot, start, w->thread, w->begin, w->end, interval);
        w->side = PAIR_FREE;
        return;
    }
    wait_in(w, (struct waiting){.side = PAIR_KERNEL, .correlation = correlation, .device = (uint8_t)device,
                                .slot = slot, .begin = start, .interval = interval});
    open.kernels++;
}

void pairs_timeless_kernel(uint32_t correlation, uint32_t device)
{
    struct waiting *w = place_of(correlation);
    if (w->side == PAIR_LAUNCH) {
        if (!w->is_edge) {
            count_pair(w->thread);
            open.launches--;
            settle_call(device, w->end - w->begin);
        }
        w->side = PAIR_FREE;
        return;
    }
    wait_in(w, (struct waiting){.side = PAIR_TIMELESS_KERNEL, .correlation = correlation, .device = (uint8_t)device});
}

static void meet_copy(uint32_t device, struct copy_place place, uint32_t thread, uint64_t begin, uint64_t end,
                      uint32_t interval)
{
    sums_waiter(thread, device);
    struct agent_copies *copies = &sums.devices[device].copies[place.direction][place.memory];
    copies->api_ns += end - begin;
    copies->api_calls++;
    unions_launched(interval, begin); /* a blocking call ends after its copy */
}

void pairs_copy_call(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end)
{
    struct waiting *w = place_of(correlation);
    if (w->side == PAIR_COPY) {
        meet_copy(w->device, w->place, thread, begin, end, w->interval);
        w->side = PAIR_FREE;
        return;
    }
    wait_in(w, (struct waiting){.side = PAIR_COPY_CALL, .correlation = correlation, .begin = begin, .end = end,
                                .thread = thread});
}

void pairs_copy(uint32_t correlation, uint32_t device, struct copy_place place, uint32_t interval)
{
    struct waiting *w = place_of(correlation);
    if (w->side == PAIR_COPY_CALL) {
        meet_copy(device, place, w->thread, w->begin, w->end, interval);
        w->side = PAIR_FREE;
        return;
    }
    wait_in(w, (struct waiting){.side = PAIR_COPY, .correlation = correlation, .device = (uint8_t)device,
                                .place = place, .interval = interval});
}

/* A graph launch keeps its place for all its nodes. */
static struct waiting *graph_of(uint32_t correlation)
{
    struct waiting *w = place_of(correlation);
    if (w->side != PAIR_GRAPH)
        wait_in(w, (struct waiting){.side = PAIR_GRAPH, .correlation = correlation, .interval = NO_INTERVAL});
    return w;
}

static void trace_graph(struct waiting *w)
{
    sums_waiter(w->thread, w->device);
    sums.devices[w->device].graph_launches_traced++;
}

void pairs_graph(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end)
{
    struct waiting *w = graph_of(correlation);
    if (w->has_call)
        return;
    w->has_call = true;
    w->thread = thread;
    w->begin = begin;
    w->end = end;
    if (w->has_node) {
        trace_graph(w);
        sums_api(w->device, end - begin, 1);
        unions_launched(w->interval, end); /* the first that came; of the others the launch stays unknown */
        return;
    }
    open.graphs++;
    add_call(end - begin);
}

void pairs_node(uint32_t correlation, uint32_t device, uint32_t interval)
{
    struct waiting *w = graph_of(correlation);
    bool is_first = !w->has_node;
    if (is_first) {
        w->has_node = true;
        w->device = (uint8_t)device;
        w->interval = interval;
    }
    if (!w->has_call)
        return;
    unions_launched(interval, w->end);
    if (is_first) {
        open.graphs--;
        settle_call(device, w->end - w->begin);
        trace_graph(w);
    }
}

/* A kernel and its launch that came too late for each other make no launch missing: one of them, or both, have expired.
 * Other kernels that wait are those of launches that are not recorded, by the driver's functions. */
struct unpaired pairs_unpaired(void)
{
    uint64_t late = open.kernels < expired_launches ? open.kernels : expired_launches;
    uint64_t calls = open.launches + expired_launches, kernels = expired_kernels + late;
    return (struct unpaired){launches, calls > kernels ? calls - kernels : 0};
}

static bool captures(uint32_t thread)
{
    for (uint32_t i = 0; i < capturing_count; i++)
        if (capturing[i] == thread)
            return true;
    return false;
}

void pairs_capture(uint32_t thread)
{
    if (capturing_count < CAPTURING && !captures(thread))
        capturing[capturing_count++] = thread;
}

bool pairs_lost_a_thread(void)
{
    for (int i = 0; i < THREADS; i++) {
        const struct thread *thread = &threads[i];
        uint64_t missing = thread->launches - thread->paired;
        if (missing && thread->paired * NEARLY_ALL <= missing && !captures(thread->id))
            return true;
    }
    return false;
}

void pairs_close(void)
{
    uint32_t device = sums_main_device();
    sums.unmatched += open.launches + open.kernels;
    sums.devices[device].graph_launches_untraced += open.graphs;
    sums_api(device, open.api_ns, open.api_calls);
    pairs_forget();
}

void pairs_forget(void)
{
    open.launches = open.kernels = open.graphs = open.api_ns = open.api_calls = 0;
    launches = expired_launches = expired_kernels = 0;
    memset(threads, 0, sizeof threads);
    capturing_count = 0;
    generation++;
}
