/* When to trace, and when to stop for good.
 *
 *   ATTACHING  no context yet: beyond what cuInit enabled CUPTI is not touched
 *   IDLE       between two windows
 *   OPEN       tracing
 *   DRAINING   tracing is over, the last records are on their way
 *   HALTED     another tool uses CUPTI: nothing is touched, not even what we enabled (it would end their collection);
 *              buffers alone are asked for, before CUPTI has them all
 *   STOPPED    gpu_hpc_agent_stop was called
 *   OVER       for good
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"

#define NEVER UINT64_MAX
#define LONGEST_WINDOW (10 * SECOND)
#define FIRST_PATIENCE (2 * SECOND)
#define RELIEF (SECOND / 50)
#define LEAP (SECOND / 2)
#define SUSPENDED (2 * SECOND)
enum {
    DISCARDS_IN_A_ROW = 6,  /* then windows are of no use in this process */
    STALE_WAITS = 20,       /* periods to wait for a discarded window's buffers */
    TICKS_OVER_BUDGET = 5,  /* continuous mode */
    MANY_KERNELS = 100,     /* which cannot all be without a call */
    OLD_NODE_LIMIT = 20000000, /* before 13.0.1 times became invalid after 25 M */
};

static enum { ATTACHING, IDLE, OPEN, DRAINING, HALTED, STOPPED, OVER } phase;
static struct {
    uint64_t opening, closing;     /* records' clock: around all work that may have been recorded */
    uint64_t begin, end;           /* records' clock: between them all launches were recorded with their work */
    uint64_t opened, closed;       /* CLOCK_MONOTONIC: the same */
    uint64_t length;               /* wanted */
    uint64_t deadline, next_flush; /* while its records are awaited */
    uint32_t epoch;                /* of the last buffers that may have its records */
} window;
/* The last windows that were published, the newest first. */
static struct span {
    uint64_t begin, end;
} published[2];
static uint64_t published_offset; /* of the records' clock to CLOCK_MONOTONIC, then */
/* In continuous mode the window never closes; what is published is what lies between two marks. */
static struct {
    bool waits;                   /* for the buffers handed out before it */
    uint64_t time, at;            /* records' clock, CLOCK_MONOTONIC */
    uint64_t last_time, last_at;  /* of the mark before */
    uint64_t due, next_flush;
    uint32_t epoch;
} mark;
static bool continuous, stepped_down, with_nodes, with_kernels, has_graphs, ignore_others;
static uint64_t next_begin, started, period, resume_at, life_nodes, last_queue_p95;
static uint32_t discards, stale_waits, stale_epoch, ticks_over;
static uint64_t patience;     /* how long the next window's records are awaited */
static uint64_t next_relief;  /* CLOCK_MONOTONIC */
static uint64_t on_since;     /* CLOCK_MONOTONIC; 0: the file's last interval has ended */
static uint64_t chance = 1;

uint64_t windows_opening(void) { return window.opening; }

bool windows_began_by(uint64_t time) { return time >= window.begin; }
bool windows_ended_by(uint64_t time) { return time > window.end; }
uint64_t windows_begin_at(uint64_t time) { return windows_began_by(time) ? time : window.begin; }
uint64_t windows_cut(uint64_t time) { return windows_ended_by(time) ? window.end : time; }

/* Work without a time is the open window's. */
bool windows_contain(uint64_t start)
{
    bool is_open = window.begin != NEVER && window.end == NEVER;
    return start ? windows_began_by(start) && !windows_ended_by(start) : is_open;
}

bool windows_have_kernels(void) { return with_kernels; }
bool windows_trust_graph_ids(void) { return cupti_version() >= CUPTI_13_1_1; }

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Times of before and after the clock was set cannot be held against each other. */
static void forget_published_if_clock_was_set(uint64_t clock)
{
    uint64_t offset = clock - monotonic_ns();
    if (offset - published_offset + LEAP > 2 * LEAP) {
        memset(published, 0, sizeof published);
        published_offset = offset;
        runs_forget_clocks();
    }
    published[0].end = least(published[0].end, clock);
}

static void add_share(struct share *share, struct span span, uint64_t begin, uint64_t end)
{
    uint64_t from = begin > span.begin ? begin : span.begin, until = least(end, span.end);
    share->ns += until > from ? until - from : 0;
    share->begins |= begin >= span.begin && begin <= span.end;
}

/* The record of a wait comes when it ends, in a pause or in the next window. It counts in the window in which it ended, or
 * after which it did, and in the one before. Of one that reaches farther back the rest is not told: what came then would be
 * of another time than all that it is held against. */
struct share windows_share(uint64_t begin, uint64_t end)
{
    enum { NEWEST_FIRST = 3, TOLD = 2 };
    bool has_window = phase == OPEN || phase == DRAINING;
    const struct span none = {0}, spans[NEWEST_FIRST] = {
        has_window ? (struct span){window.begin, window.end} : none, published[0], published[1]};
    struct share share = {0};
    for (int i = 0, told = 0; i < NEWEST_FIRST && told < TOLD; i++) {
        if (!spans[i].end || spans[i].begin > end)
            continue;
        add_share(&share, spans[i], begin, end);
        told++;
    }
    return share;
}

enum moment windows_moment(uint64_t time)
{
    if (time < window.opening || time > window.closing)
        return MOMENT_OUTSIDE;
    return windows_began_by(time) && !windows_ended_by(time) ? MOMENT_INSIDE : MOMENT_EDGE;
}

/* Evenly in [0, 1). */
static double random_share(void)
{
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (double)(chance >> 11) / 9007199254740992.0;
}

static void tell(enum agent_state state)
{
    file_state(state, stepped_down ? AGENT_REASON_BUDGET : AGENT_REASON_NONE);
}

/* ---- Ends ---- */

static const char *explain(enum agent_reason reason)
{
    switch (reason) {
    case AGENT_REASON_NO_CUDA: return "libcuda.so.1 has not the functions needed";
    case AGENT_REASON_NO_CUPTI: return "no libcupti found that can be loaded";
    case AGENT_REASON_MISSING_FUNCTION: return "libcupti lacks functions";
    case AGENT_REASON_UNKNOWN_VERSION: return "this version of libcupti is not proven";
    case AGENT_REASON_BUDGET: return "tracing costs more than its budget";
    case AGENT_REASON_INVALID_RECORDS: return "CUPTI's records have invalid times";
    case AGENT_REASON_BUFFERS: return "CUPTI keeps all buffers";
    case AGENT_REASON_WINDOWS_DISCARDED: return "no trace window becomes complete";
    default: return "a call of CUPTI failed";
    }
}

/* Nodes of graphs are recorded with all kernels. (Records of whole replays instead would be cheap, but CUPTI 13.0 brings
 * the program down as soon as a graph is replayed that is older than they.) So a program with graphs whose nodes are not
 * wanted is traced without kernels, once it is known to have some. */
static bool wants_kernels(void) { return with_nodes || !has_graphs; }

static bool knows_graphs(void) { return has_graphs || sums.nodes || sums.graphs; }

static void note_interval_end(void)
{
    struct agent_file *file = file_map();
    if (!file || !on_since)
        return;
    struct agent_header *h = &file->header;
    file_begin();
    h->intervals[(h->intervals_total - 1) % AGENT_INTERVALS].end_ns = realtime_ns();
    h->on_ns += monotonic_ns() - on_since;
    file_end();
    on_since = 0;
}

/* CUPTI has made the records all the same. */
static void discard(void)
{
    life_nodes += sums.nodes;
    sums_discard();
}

/* Ends it all. Kernels are switched off, unless another tool may depend on them; what cuInit enabled stays. */
static void give_up(enum agent_reason reason, int code)
{
    if (code == CUPTI_QUITTING)
        return; /* the process exits: nobody will see */
    const char *call = reason == AGENT_REASON_CUPTI_ERROR ? cupti_failed_call() : "";
    struct agent_file *file = file_map();
    if (file) {
        file_begin();
        file->header.error_code = code;
        snprintf(file->header.error_call, sizeof file->header.error_call, "%s", call);
        file_end();
    }
    if (phase == OPEN) {
        window.closed = monotonic_ns();
        if (cupti_probe() != CUPTI_SUBSCRIBER_TAKEN)
            (void)kinds_off(with_kernels);
    }
    note_interval_end();
    if (phase == OPEN || phase == DRAINING)
        discard();
    phase = OVER;
    file_state(AGENT_OFF, reason);
    say_once(explain(reason));
}

/* Another tool has CUPTI's subscription. */
static void halt(uint64_t now)
{
    if (phase == OPEN)
        window.closed = now;
    note_interval_end();
    if (phase == OPEN || phase == DRAINING)
        discard();
    mark.waits = false;
    memset(published, 0, sizeof published); /* the clock may be set meanwhile, and nobody looks */
    phase = HALTED;
    resume_at = options.resume_ns == NEVER ? NEVER : now + options.resume_ns;
    file_state(AGENT_PAUSED, AGENT_REASON_PROFILER);
}

/* Whether CUPTI is ours to touch; otherwise the phase has changed. */
static bool is_free(uint64_t now)
{
    int result = cupti_probe();
    if (result == CUPTI_OK || (result == CUPTI_SUBSCRIBER_TAKEN && ignore_others))
        return true;
    if (result == CUPTI_SUBSCRIBER_TAKEN)
        halt(now);
    else
        give_up(AGENT_REASON_CUPTI_ERROR, result);
    return false;
}

/* ---- Attaching ---- */

static void note_devices(void)
{
    uint32_t active = cuda_active_devices();
    static const uint8_t NONE[16];
    for (uint32_t i = 0; i < AGENT_DEVICES; i++) {
        struct agent_device *d = &sums.devices[i];
        if (active & 1u << i)
            d->used = 1;
        if (d->used && memcmp(d->uuid, NONE, sizeof NONE) == 0 && !cuda_device_uuid(i, d->uuid))
            memset(d->uuid, 0, sizeof d->uuid);
    }
}

static void note_versions(void)
{
    struct agent_file *file = file_map();
    if (!file)
        return;
    file_begin();
    file->header.cupti_version = cupti_version();
    file->header.driver_version = cuda_driver_version();
    uint32_t flags = file->header.flags & AGENT_FLAG_NAMES_FULL;
    flags |= kinds_have_launches() ? AGENT_FLAG_LAUNCHES : 0u;
    flags |= kinds_have_waits() ? 0u : AGENT_FLAG_NO_WAITS;
    flags |= kinds_have_copies() ? 0u : AGENT_FLAG_NO_COPIES;
    flags |= with_nodes ? AGENT_FLAG_GRAPH_NODES : 0u;
    file->header.flags = flags;
    file_end();
}

static void attach(uint64_t now)
{
    int error;
    enum agent_reason reason = kinds_load(&error);
    with_nodes = options.graph_nodes;
    if (options.node_limit == NEVER && cupti_version() < CUPTI_13_0_1)
        options.node_limit = OLD_NODE_LIMIT;
    note_versions();
    if (reason == AGENT_REASON_NONE && error)
        reason = AGENT_REASON_CUPTI_ERROR;
    if (reason != AGENT_REASON_NONE) {
        give_up(reason, error);
        return;
    }
    chance = (now ^ (uint64_t)getpid() << 32) | 1;
    continuous = options.mode == AGENT_MODE_CONTINUOUS;
    window.length = options.window_ns;
    period = options.period_ns;
    patience = least(FIRST_PATIENCE, options.drain_ns);
    /* Not all ranks of a job at the same moment. */
    next_begin = now + (continuous ? 0 : (uint64_t)((double)(period - window.length) * 0.25 * random_share()));
    phase = IDLE;
    if (is_free(now))
        tell(AGENT_WAITING);
}

/* Windows begin once the process has a context: programs that only count devices have none. Contexts that are
 * not primary cannot be seen from outside; who has such tells us to begin after a while. */
static uint64_t step_attaching(uint64_t now)
{
    static uint64_t initialised;
    if (!started) {
        started = now;
        if (options.mode == AGENT_MODE_OFF) {
            phase = OVER;
            file_state(AGENT_OFF, AGENT_REASON_CONFIGURED);
            return NEVER;
        }
        enum agent_reason reason = cuda_load();
        note_versions();
        if (reason != AGENT_REASON_NONE) {
            give_up(reason, 0);
            return NEVER;
        }
    }
    if (!initialised && cuda_initialised())
        initialised = now;
    if (initialised && (cuda_active_devices() || now - initialised >= options.attach_ns)) {
        attach(now);
        return now;
    }
    return now + (now - started < 60 * SECOND ? SECOND / 20 : SECOND);
}

/* ---- Opening ---- */

static void note_interval_begin(void)
{
    struct agent_file *file = file_map();
    if (!file)
        return;
    struct agent_header *h = &file->header;
    on_since = monotonic_ns();
    file_begin();
    h->intervals[h->intervals_total % AGENT_INTERVALS] = (struct agent_interval){.begin_ns = realtime_ns()};
    h->intervals_total++;
    file_end();
}

/* Whether the buffers of a discarded window are back; their records would count for the next one. */
static bool is_clean(uint64_t now)
{
    bool are_back = buffers_are_back(stale_epoch);
    buffers_drain(false); /* and what came back since the step began, or the window would begin with it */
    if (are_back) {
        stale_waits = 0;
        return true;
    }
    int error = cupti_flush(false);
    next_begin = now + period;
    if (error)
        give_up(AGENT_REASON_CUPTI_ERROR, error);
    else if (++stale_waits <= STALE_WAITS)
        return false;
    else if (options.resume_ns != NEVER && !ignore_others) /* a profiler that came and went in a pause has them */
        halt(now);
    else
        give_up(AGENT_REASON_WINDOWS_DISCARDED, 0);
    return false;
}

/* For what came in the pause there may have been no room, which nobody lacks. */
static void forget_dropped(void)
{
    uint64_t dropped;
    (void)cupti_dropped(&dropped); /* should it fail, the window's end will see it */
}

static void open_window(uint64_t now)
{
    if (!is_free(now) || !is_clean(now))
        return;
    note_devices();
    forget_dropped();
    window.opening = cupti_now();
    window.closing = window.begin = window.end = NEVER;
    phase = OPEN;
    note_interval_begin();
    window.opened = monotonic_ns();
    with_kernels = wants_kernels();
    int error = kinds_on(with_kernels);
    if (error) {
        give_up(AGENT_REASON_CUPTI_ERROR, error);
        return;
    }
    window.opened = monotonic_ns();
    window.begin = cupti_now();
    mark.last_time = 0;
    mark.last_at = window.opened;
    mark.due = window.opened + window.length;
    mark.waits = false;
    ticks_over = 0;
    tell(AGENT_TRACING);
}

static uint64_t step_idle(uint64_t now)
{
    if (stop_wanted()) {
        phase = STOPPED;
        file_state(AGENT_PAUSED, AGENT_REASON_STOPPED);
        return NEVER;
    }
    if (now < next_begin)
        return next_begin;
    open_window(now);
    return now;
}

/* ---- Publishing ---- */

/* As shares of the time: what tracing costs while it goes on (kernel-agent.md, section 8), and what each launch is slower
 * by for all of the program's life, which no pause takes back (docs/benchmarks.md). */
struct cost {
    double tracing, always;
};

static struct cost cost_of(uint64_t traced_ns)
{
    enum { KERNELS_NS = 1000, CALLS_OR_COPIES_NS = 2300, NODE_NS = 15 };
    double launches = (double)(sums.work + sums.graphs), nodes = (double)sums.nodes, traced = (double)traced_ns;
    double cost_ns = 1000 * (launches * options.launch_cost_us + nodes * options.node_cost_us);
    double always_ns = launches * (kinds_have_waits() || kinds_have_copies() ? CALLS_OR_COPIES_NS : KERNELS_NS);
    always_ns += nodes * NODE_NS;
    return traced_ns ? (struct cost){cost_ns / traced, always_ns / traced} : (struct cost){0};
}

static void note_schedule(double ratio, uint64_t length, uint64_t whole)
{
    struct agent_file *file = file_map();
    if (!file)
        return;
    file_begin();
    file->header.overhead_ratio = ratio < 1 ? ratio : 1;
    file->header.window_seconds = (double)length / 1e9;
    file->header.period_seconds = (double)whole / 1e9;
    file_end();
}

/* Longer pauses, never shorter windows. false: even the longest pause would cost too much. */
static bool schedule(struct cost cost, uint64_t length)
{
    double wanted = (double)length * cost.tracing / options.budget;
    /* A window that was made longer for a long queue is traced no larger a share of the time. */
    double share = (double)options.period_ns * ((double)window.length / (double)options.window_ns);
    period = share < (double)options.longest_period_ns ? (uint64_t)share : options.longest_period_ns;
    period = period > length ? period : length;
    if (wanted > (double)period)
        period = wanted < 1e18 ? (uint64_t)wanted : NEVER / 16;
    note_schedule(cost.always + cost.tracing * (double)length / (double)period, length, period);
    double pause = (double)(period - length) * (0.75 + 0.5 * random_share());
    next_begin = window.closed + (uint64_t)pause;
    /* Work that waits longer than a window before it starts would look as if it waited less. */
    uint64_t longer = least(4 * last_queue_p95, LONGEST_WINDOW);
    window.length = longer > options.window_ns ? longer : options.window_ns;
    return period <= options.longest_period_ns;
}

static bool are_times_bad(void)
{
    uint64_t all = sums.kept + sums.invalid;
    return sums.invalid * 100 > all || (sums.invalid && sums.nodes && cupti_version() < CUPTI_13_0_1);
}

/* What is told to be recorded is. */
static bool are_calls_missing(bool complete)
{
    return complete && sums.plain_kernels >= MANY_KERNELS && !sums.calls && !sums.dropped;
}

/* Not only copies, or a few launches among very many kernels, or what is told would change with each window. */
static bool do_launches_come(void)
{
    enum { SHARE = 10 };
    return sums.launches && sums.launches * SHARE >= sums.plain_kernels;
}

static void note_calls(bool do_come)
{
    kinds_note_calls(do_come);
    note_versions();
}

/* Once all records of the window, or up to the mark, are here. Answers whether their times were bad. */
static bool publish(const struct finished *finished)
{
    uint64_t dropped;
    if (cupti_dropped(&dropped) == CUPTI_OK)
        sums.dropped += dropped;
    bool bad = are_times_bad();
    life_nodes += sums.nodes;
    has_graphs = knows_graphs();
    note_devices(); /* one may be new */
    last_queue_p95 = sums_queue_p95();
    if (kinds_have_launches() && are_calls_missing(finished->has_union))
        note_calls(false);
    bool do_come_again = !kinds_have_launches() && do_launches_come();
    sums_publish(finished);
    if (do_come_again) /* from the next window on: this one's kernels did not wait for them */
        note_calls(true);
    return bad;
}

/* Windows whose work runs on for long may be few among others: what one of them has taught is forgotten slowly. One
 * that had to be forced, and lacked nothing, teaches nothing. */
static void learn_patience(uint64_t awaited)
{
    uint64_t wanted = awaited < patience ? 4 * awaited : 0, kept = patience - patience / 32;
    wanted = wanted > kept ? wanted : kept;
    patience = least(wanted > FIRST_PATIENCE ? wanted : FIRST_PATIENCE, options.drain_ns);
}

static void publish_window(void)
{
    struct finished finished = {.traced_ns = window.closed - mark.last_at, .from = mark.last_time,
                                .closed = window.end, .has_union = with_kernels};
    runs_close();
    pairs_close();
    struct cost cost = cost_of(finished.traced_ns);
    discards = 0;
    learn_patience(monotonic_ns() - window.closed);
    if (with_kernels && !sums.kept)
        kinds_doubt_callbacks();
    bool is_bad = publish(&finished);
    phase = IDLE;
    published[1] = published[0];
    published[0] = (struct span){window.begin, window.end};
    published_offset = cupti_now() - monotonic_ns();
    if (is_bad)
        give_up(AGENT_REASON_INVALID_RECORDS, 0);
    else if (continuous) /* stopped */
        next_begin = 0;
    else if (!schedule(cost, finished.traced_ns))
        give_up(AGENT_REASON_BUDGET, 0);
    if (phase == IDLE)
        tell(AGENT_WAITING);
}

/* ---- Closing ---- */

static void close_window(uint64_t now)
{
    if (!is_free(now))
        return;
    window.end = cupti_now();
    window.closed = monotonic_ns();
    int error = kinds_off(with_kernels);
    window.closing = cupti_now();
    note_interval_end();
    phase = DRAINING;
    window.epoch = buffers_new_epoch();
    window.next_flush = now;
    window.deadline = now + patience;
    if (error)
        give_up(AGENT_REASON_CUPTI_ERROR, error);
    else
        tell(AGENT_WAITING);
}

static void throw_away(uint64_t now)
{
    discard();
    stale_epoch = window.epoch;
    phase = IDLE;
    next_begin = now + period;
}

static void count_discard(void)
{
    if (++discards >= DISCARDS_IN_A_ROW)
        give_up(AGENT_REASON_WINDOWS_DISCARDED, 0);
}

static void discard_window(uint64_t now)
{
    throw_away(now);
    bool was_longest = patience >= options.drain_ns;
    patience = least(2 * patience, options.drain_ns);
    if (was_longest) /* before, it was perhaps only given up too early */
        count_discard();
}

/* Whether CUPTI has lost the kernels of a thread (kinds.c), which a tool that switches kinds can do to it. */
static bool lacks_kernels(void)
{
    enum { FEW = 8, SHARE = 1000 }; /* that may lack theirs: launches fail, too */
    struct unpaired all = pairs_unpaired();
    return all.missing > FEW && all.missing * SHARE > all.launches && pairs_lost_a_thread();
}

/* Whether the program or the machine was suspended, or the clock of the records was set, in what was traced until then
 * since the last mark: a wait may seem to have taken hours, and a launch to have come before the window. */
static bool is_disturbed(uint64_t until)
{
    uint64_t from = mark.last_time ? mark.last_time : window.begin;
    uint64_t clock = cupti_now() - from, passed = monotonic_ns() - mark.last_at;
    uint64_t apart = clock > passed ? clock - passed : passed - clock;
    return apart > LEAP || until > mark.due + SUSPENDED + (continuous ? options.drain_ns : 0);
}

/* All its records are here. */
static void finish_window(uint64_t now)
{
    if (is_disturbed(window.closed)) {
        throw_away(now);
    } else if (with_kernels && !continuous && lacks_kernels()) {
        throw_away(now);
        count_discard();
    } else {
        publish_window();
    }
}

/* Flushes when it is time for it; false: the phase has changed. Does a profiler no harm, so that it is not probed for:
 * each probe takes the subscription for a moment, in which a profiler would not get it. */
static bool flush(uint64_t now, uint64_t *next)
{
    if (now < *next)
        return true;
    int error = cupti_flush(false);
    if (error) {
        give_up(AGENT_REASON_CUPTI_ERROR, error);
        return false;
    }
    *next = now + options.flush_ns;
    return true;
}

struct forced {
    bool complete;       /* all buffers of the epoch are back */
    uint64_t unfinished; /* records of work without an end */
};

/* Takes all records of an epoch, finished or not; false: the phase has changed. */
static bool force_out(uint32_t epoch, struct forced *forced)
{
    int error = cupti_flush(true);
    if (error) {
        give_up(AGENT_REASON_CUPTI_ERROR, error);
        return false;
    }
    uint64_t invalid = sums.invalid;
    forced->complete = buffers_are_back(epoch);
    buffers_drain(true);
    forced->unfinished = sums.invalid - invalid;
    return true;
}

/* The time is up. Should the record of a call that goes on be there (13.0 writes it when the call returns), it keeps its
 * buffer, and those of its thread after it. Forced out, nothing but itself is missing; but when work is unfinished the window
 * is discarded. Either way the next one need not wait. */
static void force(uint64_t now)
{
    if (!is_free(now)) /* unfinished records would reach the other tool */
        return;
    if (ignore_others) { /* it may be at work again */
        discard_window(now);
        return;
    }
    struct forced forced;
    if (!force_out(window.epoch, &forced))
        return;
    if (forced.complete && !forced.unfinished)
        finish_window(now);
    else
        discard_window(now);
}

static uint64_t step_draining(uint64_t now)
{
    if (!flush(now, &window.next_flush))
        return now;
    bool complete = buffers_are_back(window.epoch); /* before the drain: what came back is in it */
    buffers_drain(true);
    if (complete)
        finish_window(now);
    else if (now >= window.deadline)
        force(now);
    else
        return least(window.next_flush, window.deadline);
    return now;
}

/* ---- Tracing ---- */

/* Too dear for five marks in a row, and a budget was given: windows from now on. */
static bool is_too_dear(double cost)
{
    ticks_over = cost > options.budget ? ticks_over + 1 : 0;
    return options.has_budget && ticks_over >= TICKS_OVER_BUDGET;
}

static void publish_mark(bool complete, uint64_t now)
{
    if (is_disturbed(mark.at)) { /* and what came after the mark */
        close_window(now);
        return;
    }
    struct finished finished = {.traced_ns = mark.at - mark.last_at, .from = mark.last_time, .closed = mark.time,
                                .has_union = complete && with_kernels, .continues = true};
    runs_close();
    struct cost cost = cost_of(finished.traced_ns);
    bool is_bad = publish(&finished);
    note_schedule(cost.always + cost.tracing, finished.traced_ns, finished.traced_ns);
    mark.last_time = mark.time;
    mark.last_at = mark.at;
    mark.waits = false;
    mark.due = mark.at + window.length;
    if (is_bad) {
        give_up(AGENT_REASON_INVALID_RECORDS, 0);
    } else if (is_too_dear(cost.tracing)) {
        continuous = false;
        stepped_down = true;
        close_window(now);
    }
}

/* The time is up, as in force(). But here whatever a thread does after its unfinished record would never come: so one
 * such record, of a kernel that runs for minutes, costs itself and the union of this part, and all else is
 * published. */
static void force_mark(uint64_t now)
{
    if (!is_free(now))
        return;
    if (ignore_others) {
        publish_mark(false, now);
        return;
    }
    struct forced forced;
    if (!force_out(mark.epoch, &forced))
        return;
    sums.invalid -= forced.unfinished; /* forced out before they had an end: no fault of CUPTI's */
    sums.dropped += forced.unfinished;
    publish_mark(forced.complete && !forced.unfinished, now);
}

static uint64_t step_continuous(uint64_t now)
{
    if (!mark.waits && now < mark.due)
        return mark.due;
    if (!mark.waits) {
        if (!is_free(now))
            return now;
        mark.waits = true;
        mark.time = cupti_now();
        mark.at = monotonic_ns();
        mark.epoch = buffers_new_epoch();
        mark.next_flush = now;
    }
    if (!flush(now, &mark.next_flush))
        return now;
    bool complete = buffers_are_back(mark.epoch);
    buffers_drain(true);
    if (complete)
        publish_mark(true, now);
    else if (now >= mark.at + options.drain_ns)
        force_mark(now);
    else
        return mark.next_flush;
    return now;
}

/* CUPTI gives full buffers back once a second, which is too seldom for graphs of short kernels. But where so many
 * threads have one each, asking them back helps for no longer than until these launch. */
static bool relieve_buffers(uint64_t now)
{
    if (!buffers_pressed() || now < next_relief)
        return true;
    next_relief = now + RELIEF;
    buffers_relieved();
    int error = cupti_flush(false);
    if (error)
        give_up(AGENT_REASON_CUPTI_ERROR, error);
    return !error;
}

static uint64_t step_open(uint64_t now)
{
    if (!relieve_buffers(now))
        return NEVER;
    buffers_drain(true);
    if (buffers_exhausted()) {
        give_up(AGENT_REASON_BUFFERS, 0);
        return NEVER;
    }
    bool is_spent = with_nodes && life_nodes + sums.nodes >= options.node_limit;
    bool is_unwanted = with_kernels && !with_nodes && knows_graphs();
    bool is_long = !continuous && now - window.opened >= window.length;
    if (stop_wanted() || is_spent || is_unwanted || is_long) {
        close_window(now);
        if (is_spent && phase == DRAINING) {
            with_nodes = false; /* from the next window on */
            note_versions();
        }
        return now;
    }
    uint64_t next = continuous ? step_continuous(now) : window.opened + window.length;
    return buffers_pressed() ? least(next, next_relief) : next;
}

/* ---- Elsewhere ---- */

static uint64_t step_halted(uint64_t now)
{
    if (now < resume_at)
        return resume_at;
    /* The owner wants us back. A tool that keeps the subscription for ever is taken to have finished. */
    int result = cupti_probe();
    ignore_others = result == CUPTI_SUBSCRIBER_TAKEN;
    buffers_forget(buffers_new_epoch()); /* the other tool has got them */
    kinds_were_touched(ignore_others);
    note_versions();
    phase = IDLE;
    next_begin = now;
    return now;
}

static uint64_t step_stopped(uint64_t now)
{
    if (stop_wanted())
        return NEVER;
    phase = IDLE;
    next_begin = now;
    tell(AGENT_WAITING);
    return now;
}

/* Of what is recorded in pauses too. Threads that have ended leave their buffers with CUPTI until it is asked for them:
 * at once before there are none, whoever is at work beside us. Answers when to look again. */
static uint64_t empty_buffers(uint64_t now)
{
    static uint64_t last;
    bool are_scarce = buffers_scarce();
    uint64_t next = last + (are_scarce ? RELIEF : SECOND);
    buffers_drain(false);
    if (!buffers_pressed() || (phase == HALTED && !are_scarce))
        return NEVER;
    if (now < next)
        return next;
    last = now;
    buffers_relieved();
    (void)cupti_flush(false); /* should it fail, the next window will see it */
    buffers_drain(false);
    return NEVER;
}

static uint64_t step(uint64_t now)
{
    switch (phase) {
    case ATTACHING: return step_attaching(now);
    case IDLE: return step_idle(now);
    case OPEN: return step_open(now);
    case DRAINING: return step_draining(now);
    case HALTED: return step_halted(now);
    case STOPPED: return step_stopped(now);
    default: return NEVER;
    }
}

uint64_t windows_step(uint64_t now)
{
    uint64_t relief = NEVER;
    if (phase == IDLE || phase == STOPPED)
        forget_published_if_clock_was_set(cupti_now());
    if (phase != OPEN && phase != DRAINING)
        relief = empty_buffers(now);
    return least(step(now), relief);
}
