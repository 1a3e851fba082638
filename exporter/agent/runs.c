/* What ran: kernels, once their records are understood, and nodes of graphs whose times are in doubt.
 *
 * Of a replay that goes on while kernels are switched CUPTI 13.0.1 tells nodes with the start of an earlier one, from
 * before the window, or with an end of when we asked for their records, a quarter of a second later
 * (docs/benchmarks.md). So nodes that do not lie in the window are held until all its records are here, in whatever order
 * their buffers come, and count if they took about as long as the same kernel does otherwise. */
#define _GNU_SOURCE
#include "agent.h"

enum { HELD = 1 << 14, TIMES_THE_LONGEST = 2 };

static struct run held[HELD];
static uint32_t held_count;
static uint64_t certain; /* nodes that lie in the window */

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

/* How long the kernel took at most, in this window or, where it was not seen there, ever. 0: nobody knows. */
static uint64_t longest_of(uint32_t slot)
{
    const struct agent_file *file = file_map();
    uint64_t here = kernels_at(slot)->max_ns;
    return here || !file ? here : file->kernels[slot].max_ns;
}

/* Where no node lies in the window, the GPU's clock is another, and those before it are as good as any. */
static bool is_sound(const struct run *run)
{
    uint64_t longest = longest_of(run->slot);
    if (longest)
        return run->end - run->start <= TIMES_THE_LONGEST * longest;
    return windows_began_by(run->start) || !certain;
}

/* It ran, from its start on, but nobody knows until when: not beyond the window, as far as this is concerned. */
static void drop(const struct run *run)
{
    sums.kept--;
    sums.unsound++;
    uint32_t interval = NO_INTERVAL;
    if (windows_contain(run->start)) {
        uint64_t end = windows_cut(run->end);
        unions_stream(run->device, run->context, run->stream, run->start, end);
        interval = unions_add(run->device, run->activity, run->start, end);
    }
    if (run->correlation && kinds_have_launches() && windows_trust_graph_ids())
        pairs_node(run->correlation, run->device, interval);
}

static void judge(const struct run *run)
{
    if (is_sound(run))
        count(run);
    else
        drop(run);
}

void runs_add(const struct run *run)
{
    bool is_certain = !run->in_graph || (windows_began_by(run->start) && !windows_ended_by(run->end));
    if (is_certain) {
        certain += run->in_graph;
        count(run);
    } else if (held_count < HELD) {
        held[held_count++] = *run;
    } else {
        judge(run);
    }
}

void runs_close(void)
{
    for (uint32_t i = 0; i < held_count; i++)
        judge(&held[i]);
    runs_forget();
}

void runs_forget(void)
{
    held_count = 0;
    certain = 0;
}
