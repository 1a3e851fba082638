/* What ran: kernels, once their records are understood, and nodes of graphs whose times are in doubt.
 *
 * Of a replay that goes on while kernels are switched CUPTI 13.0.1 tells nodes with the start of an earlier one, from
 * before the window, or with an end of when we asked for their records, a quarter of a second later
 * (docs/benchmarks.md). So nodes that do not lie in the window are held until all its records are here, in whatever order
 * their buffers come, and those that lie in it are the measure. */
#define _GNU_SOURCE
#include <string.h>

#include "agent.h"

enum { HELD = 1 << 16, TIMES_THE_LONGEST = 2 };

static struct run held[HELD];
static uint32_t held_count;
/* How long a node took at most that lay in a window (of those without a slot of their own any of the device's), and the
 * devices of which anything did. Kernels outside graphs are no measure: what communicates takes as long as others let it. */
struct measure {
    uint64_t longest[AGENT_KERNELS + AGENT_DEVICES];
    bool is_clock_right[AGENT_DEVICES];
};
/* Of this window, which may yet be discarded, and of those before. */
static struct measure found, known;

static void count(const struct run *run)
{
    sums_kernel(run->slot, run->device, run->end - run->start, run->in_graph);
    if (!kinds_have_launches())
        sums_waiter(run->context, run->device);
    unions_stream(run->device, run->context, run->stream, run->start, run->end);
    uint32_t interval = unions_add(run->device, run->activity, run->start, run->end);
    if (!run->correlation || !kinds_have_launches())
        return;
    if (!run->in_graph)
        pairs_kernel(run->correlation, run->device, run->slot, run->start, interval);
    else if (windows_trust_graph_ids())
        pairs_node(run->correlation, run->device, interval);
}

/* What was launched before the window has no record, so that none can have begun there but by another clock: then it
 * ends there too. */
static bool is_sound(const struct run *run)
{
    uint64_t longest = known.longest[run->slot];
    if (!windows_began_by(run->start))
        return !known.is_clock_right[run->device] && !windows_began_by(run->end);
    return !longest || run->end - run->start <= TIMES_THE_LONGEST * longest;
}

/* It ran, but its start or its end is not known: in the window, for no longer than it ever took. */
static void drop(const struct run *run)
{
    uint64_t before = known.longest[run->slot], now = found.longest[run->slot];
    uint64_t longest = before > now ? before : now;
    uint64_t start = windows_begin_at(run->start), end = windows_cut(run->end);
    uint32_t interval = NO_INTERVAL;
    sums.kept--;
    sums.unsound++;
    if (longest && end > start + longest) {
        if (windows_began_by(run->start))
            end = start + longest;
        else
            start = end - longest;
    }
    if (end > start) {
        unions_stream(run->device, run->context, run->stream, start, end);
        interval = unions_add(run->device, run->activity, start, end);
    }
    if (run->correlation && kinds_have_launches() && windows_trust_graph_ids())
        pairs_node(run->correlation, run->device, interval);
}

static void note_certain(const struct run *run)
{
    uint64_t ns = run->end - run->start;
    found.is_clock_right[run->device] = true;
    if (run->in_graph && ns > found.longest[run->slot])
        found.longest[run->slot] = ns;
}

static void learn(void)
{
    for (uint32_t slot = 0; slot < AGENT_KERNELS + AGENT_DEVICES; slot++)
        if (found.longest[slot] > known.longest[slot])
            known.longest[slot] = found.longest[slot];
    for (uint32_t device = 0; device < AGENT_DEVICES; device++)
        known.is_clock_right[device] |= found.is_clock_right[device];
}

void runs_add(const struct run *run)
{
    bool is_certain = windows_began_by(run->start) && !windows_ended_by(run->end);
    if (run->in_graph && !is_certain) {
        if (held_count < HELD)
            held[held_count++] = *run;
        else
            drop(run);
        return;
    }
    if (is_certain)
        note_certain(run);
    count(run);
}

void runs_close(void)
{
    learn();
    for (uint32_t i = 0; i < held_count; i++) {
        if (is_sound(&held[i]))
            count(&held[i]);
        else
            drop(&held[i]);
    }
    runs_forget();
}

void runs_forget(void)
{
    held_count = 0;
    found = (struct measure){0};
}

void runs_forget_clocks(void) { memset(known.is_clock_right, 0, sizeof known.is_clock_right); }
