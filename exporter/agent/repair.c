/* Threads whose kernels CUPTI records no more.
 *
 * A launch that is in progress while kernels are switched on or off can leave its thread in a state in which CUPTI
 * records the calls of its later launches, but not their kernels; seen on an H200 with CUPTI 13.0 after about one
 * window in fifty of a program that does nothing but launch, whatever else is switched, in whichever order, and with
 * activity buffers per thread or not. The same accident sets it right again, as often. So a window that lacks kernels
 * is thrown away, and kernels are switched on and off for a few milliseconds at a time, until the thread's are there.
 * (A thread that captures launches into one graph all the window long looks the same: that costs the window and
 * tries.) */
#define _GNU_SOURCE
#include "agent.h"

#define FIRST_LENGTH (2 * SECOND / 1000)
#define LONGEST_LENGTH (SECOND / 60) /* it is the number of tries that matters, not their length */
#define LONGEST_TRACING (4 * SECOND) /* of all tries of a repair: two thousand at first */
#define LONGEST_REPAIR (30 * SECOND)
#define LONGEST_SILENCE (SECOND / 2) /* of tracing in which the thread launched nothing: it is no matter any more */
enum {
    FEW = 8,               /* launches that may lack a kernel: they fail, too */
    SHARE = 1000,          /* one of so many */
    EVIDENCE = 8,          /* launches that are enough to judge by, */
    LAST_EVIDENCE = 2,     /* and in the longest try */
    WAITING_WORK = 1 << 13, /* launches that may wait for their start, where tracing goes on */
};

static struct {
    bool goes_on;
    uint64_t length, began, spent, silent; /* spent: tracing; silent: of it, without a launch */
} repair;

bool repair_goes_on(void) { return repair.goes_on; }
uint64_t repair_length(void) { return repair.length; }
uint64_t repair_spent(void) { return repair.spent; }
void repair_end(void) { repair.goes_on = false; }

bool repair_begins(uint64_t now, bool continues)
{
    struct unpaired all = pairs_unpaired();
    uint64_t few = continues ? WAITING_WORK : FEW, share = continues ? 10 : SHARE;
    if (all.missing <= few || all.missing * share <= all.launches || !pairs_watch_lost())
        return false;
    repair.goes_on = true;
    repair.length = FIRST_LENGTH;
    repair.began = now;
    repair.spent = repair.silent = 0;
    return true;
}

bool repair_judge(uint64_t now, uint64_t opened, uint64_t closed)
{
    if (opened < repair.began) /* no try yet: the window that showed the need, in continuous mode */
        return true;
    struct unpaired thread = pairs_watched();
    bool is_last = repair.length >= LONGEST_LENGTH;
    bool enough = thread.launches >= (is_last ? LAST_EVIDENCE : EVIDENCE);
    bool is_back = enough && thread.missing * EVIDENCE <= thread.launches;
    repair.spent += closed - opened;
    repair.silent = thread.launches ? 0 : repair.silent + closed - opened;
    if (!enough && !is_last)
        repair.length *= 2;
    /* Others may have been lost too, or by the tries. */
    bool is_done = (is_back || repair.silent >= LONGEST_SILENCE) && pairs_watch_lost() < EVIDENCE;
    repair.goes_on = !is_done && repair.spent < LONGEST_TRACING && now - repair.began < LONGEST_REPAIR;
    return repair.goes_on;
}
