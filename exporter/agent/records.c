/* What a record means. */
#define _GNU_SOURCE
#include <string.h>

#include "agent.h"

static uint32_t u32_at(const uint8_t *record, size_t offset)
{
    uint32_t value;
    memcpy(&value, record + offset, sizeof value);
    return value;
}

static uint64_t u64_at(const uint8_t *record, size_t offset)
{
    uint64_t value;
    memcpy(&value, record + offset, sizeof value);
    return value;
}

/* Times that are far off the window are garbage; but a clock may be set while we trace. */
#define TOLERANCE (3600 * SECOND)
static uint64_t earliest, latest;

static void set_bounds(void)
{
    uint64_t opening = windows_opening();
    earliest = opening > TOLERANCE ? opening - TOLERANCE : 1;
    latest = cupti_now() + TOLERANCE;
}

/* Counts the record; false: it has no valid times (no memory was left for them, or CUPTI erred). */
static bool is_valid(uint64_t start, uint64_t end)
{
    bool valid = start >= earliest && end >= start && end <= latest;
    *(valid ? &sums.kept : &sums.invalid) += 1;
    return valid;
}

/* Whether the record of work is good, on a device that has a place. */
static bool is_work(uint64_t start, uint64_t end, uint32_t device)
{
    if (device >= AGENT_DEVICES) {
        sums.dropped++;
        return false;
    }
    if (!is_valid(start, end))
        return false;
    sums.devices[device].used = 1;
    return true;
}

/* What the cost is made of. */
static void count_work(bool in_graph)
{
    sums.nodes += in_graph;
    sums.work += !in_graph;
}

static void take_kernel(const uint8_t *record)
{
    uint64_t start = u64_at(record, KERNEL_START), end = u64_at(record, KERNEL_END);
    uint32_t device = u32_at(record, KERNEL_DEVICE), context = u32_at(record, KERNEL_CONTEXT);
    uint32_t correlation = u32_at(record, KERNEL_CORRELATION);
    bool in_graph = u64_at(record, KERNEL_GRAPH_NODE) != 0;
    const char *name = (const char *)(uintptr_t)u64_at(record, KERNEL_NAME);
    count_work(in_graph);
    sums.plain_kernels += !in_graph;
    if (!is_work(start, end, device)) {
        if (correlation && !in_graph) /* its launch lacks nothing */
            pairs_timeless_kernel(correlation, device < AGENT_DEVICES ? device : sums_main_device());
        return;
    }
    name = name ? name : "";
    struct shape shape;
    memcpy(shape.grid, record + KERNEL_GRID, sizeof shape.grid);
    memcpy(shape.block, record + KERNEL_BLOCK, sizeof shape.block);
    bool is_communication = kernels_is_communication(name);
    runs_add(&(struct run){
        .start = start, .end = end, .slot = kernels_slot(device, name, &shape), .device = device, .context = context,
        .stream = u32_at(record, KERNEL_STREAM), .correlation = correlation, .in_graph = in_graph,
        .activity = is_communication ? ACTIVITY_COMMUNICATION : ACTIVITY_COMPUTE,
    });
}

static bool copy_place(const uint8_t *record, struct copy_place *place)
{
    uint8_t host = AGENT_DEVICE;
    switch (record[MEMCPY_COPY_KIND]) {
    case MEMCPY_HTOD: case MEMCPY_HTOA:
        place->direction = AGENT_H2D;
        host = record[MEMCPY_SOURCE];
        break;
    case MEMCPY_DTOH: case MEMCPY_ATOH:
        place->direction = AGENT_D2H;
        host = record[MEMCPY_DESTINATION];
        break;
    case MEMCPY_ATOA: case MEMCPY_ATOD: case MEMCPY_DTOA: case MEMCPY_DTOD:
        *place = (struct copy_place){AGENT_D2D, AGENT_DEVICE};
        return true;
    case MEMCPY_PTOP:
        *place = (struct copy_place){AGENT_P2P, AGENT_DEVICE};
        return true;
    default: /* within the host */
        return false;
    }
    place->memory = host == MEMORY_KIND_PINNED ? AGENT_PINNED : AGENT_PAGEABLE;
    return true;
}

static void add_copy(uint32_t device, struct copy_place place, uint64_t bytes, uint64_t ns)
{
    static const uint32_t BOUNDS[] = AGENT_COPY_BOUNDS;
    struct agent_copies *copies = &sums.devices[device].copies[place.direction][place.memory];
    uint32_t bucket = 0;
    while (bucket < AGENT_COPY_BUCKETS - 1 && bytes > BOUNDS[bucket])
        bucket++;
    copies->count++;
    copies->bytes += bytes;
    copies->ns += ns;
    copies->buckets[bucket]++;
}

static void take_copy(const uint8_t *record, size_t correlation_at, size_t node_at)
{
    uint64_t start = u64_at(record, MEMCPY_START), end = u64_at(record, MEMCPY_END);
    uint32_t device = u32_at(record, MEMCPY_DEVICE), correlation = u32_at(record, correlation_at);
    bool in_graph = u64_at(record, node_at) != 0;
    struct copy_place place;
    if (!windows_contain(start))
        return;
    count_work(in_graph);
    if (!is_work(start, end, device) || !copy_place(record, &place))
        return;
    add_copy(device, place, u64_at(record, MEMCPY_BYTES), end - start);
    uint32_t interval = unions_add(device, ACTIVITY_COPY, start, end);
    if (!correlation || !kinds_have_launches())
        return;
    if (!in_graph)
        pairs_copy(correlation, device, place, interval);
    else if (windows_trust_graph_ids())
        pairs_node(correlation, device, interval);
}

static void take_set(const uint8_t *record)
{
    uint64_t start = u64_at(record, MEMSET_START), end = u64_at(record, MEMSET_END);
    uint32_t device = u32_at(record, MEMSET_DEVICE);
    if (!windows_contain(start))
        return;
    count_work(u64_at(record, MEMSET_GRAPH_NODE) != 0);
    if (!is_work(start, end, device))
        return;
    sums.devices[device].sets++;
    sums.devices[device].set_bytes += u64_at(record, MEMSET_BYTES);
    sums.devices[device].set_ns += end - start;
    unions_add(device, ACTIVITY_COPY, start, end);
}

/* One that crosses a window's begin or end counts for what lies in it, however long ago it began. */
static void take_wait(uint32_t waiter, uint32_t type, uint64_t begin, uint64_t end)
{
    struct share share = windows_share(begin, end);
    if (share.ns && is_valid(end, end))
        sums_sync(waiter, type, share.ns, share.begins);
}

static void take_sync(const uint8_t *record)
{
    uint64_t start = u64_at(record, SYNC_START), end = u64_at(record, SYNC_END);
    take_wait(u32_at(record, SYNC_CONTEXT), u32_at(record, SYNC_TYPE), start, end);
}

/* Of a wait's call; -1: it is none. */
static int sync_type_of(enum api_call call)
{
    switch (call) {
    case CALL_SYNC_EVENT: return AGENT_SYNC_EVENT;
    case CALL_SYNC_STREAM: return AGENT_SYNC_STREAM;
    case CALL_SYNC_CONTEXT: return AGENT_SYNC_CONTEXT;
    default: return -1;
    }
}

static void take_call(const uint8_t *record, int kind)
{
    uint64_t begin = u64_at(record, API_START), end = u64_at(record, API_END);
    uint32_t correlation = u32_at(record, API_CORRELATION), thread = u32_at(record, API_THREAD);
    enum api_call call = api_call_of(kind, u32_at(record, API_CBID));
    int sync_type = sync_type_of(call);
    enum moment moment = windows_moment(begin);
    bool is_ours = moment != MOMENT_OUTSIDE && call != CALL_OTHER; /* another tool's, who enabled the kind */
    sums.calls += is_ours;
    sums.launches += is_ours && (call == CALL_LAUNCH || call == CALL_GRAPH);
    if (sync_type >= 0 && kinds_have_waits())
        take_wait(thread, (uint32_t)sync_type, begin, end);
    if (!is_ours || !kinds_have_launches())
        return;
    if (sync_type >= 0 || !end || !is_valid(begin, end)) /* no end: it goes on */
        return;
    /* While kernels are switched on and off calls are recorded whose work is not. */
    if (call == CALL_LAUNCH && !windows_have_kernels()) {
        sums_api(sums_main_device(), end - begin, 1);
    } else if (call == CALL_LAUNCH) {
        bool has_failed = u32_at(record, API_RESULT) != 0;
        pairs_launch(correlation, thread, begin, end, moment == MOMENT_EDGE || has_failed);
    } else if (call == CALL_COPY) {
        pairs_copy_call(correlation, thread, begin, end);
    } else if (call == CALL_CAPTURE) {
        pairs_capture(thread);
    } else if (moment == MOMENT_EDGE) {
        return;
    } else if (windows_trust_graph_ids()) {
        sums.graphs++;
        pairs_graph(correlation, thread, begin, end);
    } else {
        sums.graphs++;
        sums.loose_graphs++;
        sums.loose_api_ns += end - begin;
    }
}

static bool is_wait(const uint8_t *record, uint32_t kind)
{
    bool is_call = kind == KIND_RUNTIME || kind == KIND_DRIVER;
    return kind == KIND_SYNCHRONIZATION ||
           (is_call && api_waits(api_call_of((int)kind, u32_at(record, API_CBID))));
}

/* The bytes that are read of a kind's records; 0: a kind that we did not ask for, but another tool. */
static size_t needed(uint32_t kind)
{
    switch (kinds_wanted(kind) ? kind : 0) {
    case KIND_CONCURRENT_KERNEL: return windows_have_kernels() ? KERNEL_NEEDS : 0;
    case KIND_MEMCPY: return MEMCPY_NEEDS;
    case KIND_MEMCPY2: return MEMCPY2_NEEDS;
    case KIND_MEMSET: return MEMSET_NEEDS;
    case KIND_SYNCHRONIZATION: return SYNC_NEEDS;
    case KIND_RUNTIME: case KIND_DRIVER: return API_NEEDS;
    default: return 0;
    }
}

static void take(const uint8_t *record, uint32_t kind)
{
    switch (kind) {
    case KIND_CONCURRENT_KERNEL: take_kernel(record); break;
    case KIND_MEMCPY: take_copy(record, MEMCPY_CORRELATION, MEMCPY_GRAPH_NODE); break;
    case KIND_MEMCPY2: take_copy(record, MEMCPY2_CORRELATION, MEMCPY2_GRAPH_NODE); break;
    case KIND_MEMSET: take_set(record); break;
    case KIND_SYNCHRONIZATION: take_sync(record); break;
    default: take_call(record, (int)kind); break;
    }
}

void records_take(uint8_t *buffer, size_t valid, bool keep)
{
    uint8_t *record = NULL, *last = buffer - 1;
    set_bounds();
    if (!cupti_enter())
        return;
    /* A library that errs must not lead us out of the buffer, or round in circles. */
    while (cupti_next_record(buffer, valid, &record) == CUPTI_OK && record > last && record < buffer + valid) {
        last = record;
        size_t left = (size_t)(buffer + valid - record);
        uint32_t kind = left >= sizeof kind ? u32_at(record, 0) : 0;
        size_t size = needed(kind);
        bool is_whole = size <= left;
        if (!keep)
            sums.dropped += kind == KIND_CONCURRENT_KERNEL; /* all other kinds come in pauses too */
        else if (!is_whole)
            sums.invalid++;
        if (size && is_whole && (keep || is_wait(record, kind)))
            take(record, kind);
    }
    cupti_leave();
}
