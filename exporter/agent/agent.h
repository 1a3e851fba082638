/* What the parts of the agent tell each other. Unless said otherwise everything runs on the agent's own thread.
 *
 *   entry    the ways in: injection, start, stop, fork, exit; the thread and its loop
 *   options  the environment
 *   cupti    CUPTI and the driver
 *   buffers  the memory that CUPTI fills; the only code that runs on other threads
 *   records  what a record means
 *   runs     kernels, and nodes of graphs whose times are in doubt
 *   pairs    a call and the work it launched, by correlation id
 *   kernels  names and slots
 *   unions   busy, overlapping and idle time
 *   sums     what a window has collected, and adding it to the file
 *   kinds    what CUPTI records, from the begin of the program and in windows
 *   windows  when to trace
 *   file     the mapped file */
#ifndef GPU_HPC_AGENT_H
#define GPU_HPC_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cupti.h"
#include "layout.h"

#define SECOND UINT64_C(1000000000)

/* Programs run in containers with a glibc older than that of our build, in which these functions have a newer version
 * too: then cuInit would fail there. No function that came after 2.17 is called by its name. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST_GLIBC(function) __asm__(".symver " #function "," #function "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST_GLIBC(function) __asm__(".symver " #function "," #function "@GLIBC_2.17")
#else
#define OLDEST_GLIBC(function) static_assert(1, "")
#endif

/* The number that a text begins with: strtoull and sscanf too have newer versions. */
static inline uint64_t decimal(const char *text)
{
    uint64_t number = 0;
    for (; *text >= '0' && *text <= '9'; text++)
        number = number * 10 + (uint64_t)(*text - '0');
    return number;
}

/* ---- options ---- */

struct options {
    enum agent_mode mode;
    char directory[512];
    double budget;          /* share of the time */
    bool has_budget;        /* given: then it holds in continuous mode too */
    uint64_t window_ns, period_ns, longest_period_ns;
    uint64_t flush_ns;      /* between flushes while a window's last records are awaited */
    uint64_t drain_ns;      /* longest wait for them */
    uint64_t attach_ns;     /* from the driver's start on, then begin without a primary context; UINT64_MAX: never */
    uint64_t resume_ns;     /* after a profiler was seen; UINT64_MAX: never */
    double launch_cost_us, node_cost_us;
    uint64_t node_limit;    /* records of graph nodes in a life; UINT64_MAX: by version */
    bool graph_nodes;
    bool calls, copies;     /* are recorded, beside kernels */
    bool waits;             /* the calls that wait, or all */
    bool driver_calls;      /* calls of the driver's functions too, which are those of programs without a runtime */
    bool any_version;
    char cuda_home[512];
    char environment[AGENT_ENVIRONMENT];
    uint32_t environment_size;
};
extern struct options options;
/* Reads the environment; on the thread of the caller, as getenv and another thread's setenv do not go together. */
void options_read(void);

/* ---- buffers ---- */

bool buffers_create(void); /* once */
void buffers_set_version(uint32_t version);
/* CUPTI's callbacks: run on any thread, take no lock, call nothing but futex, leave errno alone. */
void buffers_requested(uint8_t **buffer, size_t *size, size_t *most_records);
void buffers_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
/* Hands every returned buffer's records to records_take, or only counts them, and frees it. */
void buffers_drain(bool keep);
/* Buffers handed out from now on belong to a new epoch, those before to the answered one. */
uint32_t buffers_new_epoch(void);
/* Whether CUPTI has all buffers of this epoch and earlier ones given back. */
bool buffers_are_back(uint32_t epoch);
/* Never waits again for the buffers of this epoch and earlier ones: another tool has them. Their records are lost, and
 * they are replaced. */
void buffers_forget(uint32_t epoch);
uint32_t buffers_out(void);
/* Since they were relieved last, CUPTI has taken of the last half of the large ones. */
bool buffers_pressed(void);
bool buffers_scarce(void); /* three in four are with CUPTI */
void buffers_relieved(void);
bool buffers_exhausted(void); /* CUPTI asked for more than there are, and would crash without */

/* ---- records ---- */

/* Walks one buffer. keep: false counts its kernels as dropped, and waits all the same. */
void records_take(uint8_t *buffer, size_t valid, bool keep);

/* ---- pairs ---- */

enum pair_side { PAIR_FREE = 0, PAIR_LAUNCH, PAIR_GRAPH, PAIR_COPY_CALL, PAIR_KERNEL, PAIR_TIMELESS_KERNEL, PAIR_COPY };
/* The place of a kind of copy in agent_device.copies. */
struct copy_place {
    uint8_t direction, memory;
};
/* Calls, that began in the window, and work; either side may come first. interval: see unions_add. is_edge: began
 * while kernels were being switched on or off, or failed, and counts only when its kernel was recorded. */
void pairs_launch(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end, bool is_edge);
void pairs_graph(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end);
void pairs_copy_call(uint32_t correlation, uint32_t thread, uint64_t begin, uint64_t end);
void pairs_kernel(uint32_t correlation, uint32_t device, uint32_t slot, uint64_t start, uint32_t interval);
void pairs_timeless_kernel(uint32_t correlation, uint32_t device); /* whose record counts not: it has no valid times */
void pairs_copy(uint32_t correlation, uint32_t device, struct copy_place place, uint32_t interval);
void pairs_node(uint32_t correlation, uint32_t device, uint32_t interval);
/* Launches so far, and how many more of them than of kernels are without their other half. */
struct unpaired {
    uint64_t launches, missing;
};
struct unpaired pairs_unpaired(void);
/* Notes that a thread began or ended to capture launches into a graph: they have no kernels, and nothing is wrong. */
void pairs_capture(uint32_t thread);
/* Whether a thread that captured nothing has launches of which nearly none has a kernel. */
bool pairs_lost_a_thread(void);
/* Nothing more comes: what still waits is counted as it is, or forgotten. */
void pairs_close(void);
void pairs_forget(void);

/* ---- kernels ---- */

struct shape {
    uint32_t grid[3], block[3];
};
/* The slot of a kernel; that of the device's overflow where there is no room. */
uint32_t kernels_slot(uint32_t device, const char *name, const struct shape *shape);
struct agent_kernel *kernels_at(uint32_t slot); /* its key, and what the window has of it so far */
uint32_t kernels_count(void);                   /* slots in use, overflow ones excluded */
const char *kernels_strings(uint32_t *used);
bool kernels_full(void);
bool kernels_is_communication(const char *name);

/* ---- unions ---- */

enum activity { ACTIVITY_COMPUTE, ACTIVITY_COMMUNICATION, ACTIVITY_COPY };
#define NO_INTERVAL UINT32_MAX
/* Notes that something ran; answers its number for unions_launched, NO_INTERVAL when there is no room. */
uint32_t unions_add(uint32_t device, enum activity activity, uint64_t start, uint64_t end);
void unions_launched(uint32_t interval, uint64_t launched);
/* Notes a kernel's stream, of which A and B are made. */
void unions_stream(uint32_t device, uint32_t context, uint32_t stream, uint64_t start, uint64_t end);

/* Sums of [begin, end]; end: 0 where there is no union. */
struct united {
    uint64_t begin, end;
    uint64_t busy, compute, communication, copy, overlap, idle_host, idle_queue, idle_other;
};
/* Orders what was noted, once, before unions_of. */
void unions_sort(void);
/* from: where the last window ended when tracing did not stop in between; 0: begin and end are found from the streams,
   and there are none where work began before anything was recorded: its clock is another. closed: until when every
   launch is known. continues: tracing goes on, and the next window begins there. */
struct united unions_of(uint32_t device, uint64_t from, uint64_t closed, bool continues);
/* Forgets all, or keeps what reaches beyond `from` for the next window. */
void unions_reset(uint64_t from);

/* ---- threads ---- */

/* Where to begin to look for a thread in a table of so many: numbers may be addresses, whose last bits are equal. */
enum { THREADS = 256 };
static inline uint32_t thread_start(uint32_t id) { return id * UINT32_C(2654435761) >> 24; }

/* ---- runs ---- */

struct run {
    uint64_t start, end;
    uint32_t slot, device, context, stream, correlation;
    enum activity activity;
    bool in_graph;
};
/* A kernel that ran. Nodes of graphs that do not lie in the window wait for runs_close. */
void runs_add(const struct run *run);
/* All records are here. Before pairs_close. */
void runs_close(void);
void runs_forget(void);
void runs_forget_clocks(void); /* that they were right: the host's was set */

/* ---- sums ---- */

/* What the window has collected so far beside kernels and intervals. */
struct sums {
    struct agent_device devices[AGENT_DEVICES]; /* as in the file */
    uint64_t executions[AGENT_DEVICES];
    uint64_t kept, dropped, invalid, unmatched;
    uint64_t unsound; /* nodes with times of another replay; dropped ones, in the file */
    uint64_t nodes;  /* records inside graphs */
    uint64_t work;   /* kernels, copies and sets outside of them */
    uint64_t graphs; /* calls that launch one */
    uint64_t calls;  /* of functions that are recorded */
    uint64_t launches; /* of these such that launch kernels or graphs */
    uint64_t plain_kernels; /* outside of graphs */
    /* Graph launches whose ids do not lead to their nodes, and the time of these calls. */
    uint64_t loose_graphs, loose_api_ns;
};
extern struct sums sums;
void sums_kernel(uint32_t slot, uint32_t device, uint64_t ns, bool in_graph);
void sums_latency(uint32_t slot, uint32_t device, uint64_t ns);
void sums_api(uint32_t device, uint64_t ns, uint64_t calls);
/* waiter: the thread that waits, or the context where calls are not recorded. begins: in a window. */
void sums_sync(uint32_t waiter, uint32_t type, uint64_t ns, bool begins);
void sums_waiter(uint32_t waiter, uint32_t device);
uint32_t sums_bucket(uint64_t ns);
/* The device that work of unknown device is counted for: that with the most kernels, else the first used one. */
uint32_t sums_main_device(void);
/* A time not exceeded by 95 % of the window's launch-to-start times (a bucket's bound); 0: too few. */
uint64_t sums_queue_p95(void);
/* What the window measured. traced_ns: its length. from, closed, continues: as unions_of. */
struct finished {
    uint64_t traced_ns, from, closed;
    bool has_union;
    bool continues; /* tracing goes on: calls and work may still find each other */
};
/* Adds the window to the file, all at once. */
void sums_publish(const struct finished *window);
/* Throws the window away; its kept records become dropped ones. */
void sums_discard(void);

/* ---- kinds ---- */

/* Inside cuInit, on the thread that called it: finds CUPTI, and enables what stays enabled for the program's life. */
void kinds_prepare(void);
/* The same time and place: disables it again, since nothing will be traced, or there is no thread to empty buffers. */
void kinds_withdraw(void);
/* Finds CUPTI if that was not done. Answers AGENT_REASON_NONE or why not; *error: what CUPTI answered inside cuInit. */
enum agent_reason kinds_load(int *error);
/* A window's records begin, and end. */
int kinds_on(bool kernels);
int kinds_off(bool kernels);
/* Another tool has had its hand on the kinds: what was enabled inside cuInit may not be any more, and is not asked for
 * again. is_still_there: it may replace our callbacks at any time. */
void kinds_were_touched(bool is_still_there);
/* A window was empty: a tool that came and went in a pause may have left its callbacks. The next one registers ours. */
void kinds_doubt_callbacks(void);
/* None come, though there are kernels: a tool that came and went has disabled them, or the driver's functions launch all.
 * Or they come again. */
void kinds_note_calls(bool do_come);
bool kinds_have_waits(void);    /* their calls are recorded, and come */
bool kinds_have_launches(void); /* the calls of all that we know */
bool kinds_have_copies(void);
bool kinds_wanted(uint32_t kind); /* its records are of our asking */

/* ---- windows ---- */

/* What must happen when; answers the next time (CLOCK_MONOTONIC ns) at which it wants to be asked. */
uint64_t windows_step(uint64_t now);
/* Where in the window a call began, in the records' clock. */
enum moment { MOMENT_OUTSIDE, MOMENT_EDGE, MOMENT_INSIDE };
enum moment windows_moment(uint64_t time);
bool windows_began_by(uint64_t time);
bool windows_ended_by(uint64_t time);
uint64_t windows_begin_at(uint64_t time); /* the window's begin, if that comes after */
uint64_t windows_cut(uint64_t time);      /* the window's end, if that was before */
bool windows_contain(uint64_t start);  /* work that is recorded in pauses too counts where it starts */
uint64_t windows_opening(void); /* before kernels were switched on */
/* Of a wait: the ns of it in this window and in the one that was published last, and whether it began in one of them. */
struct share {
    uint64_t ns;
    bool begins;
};
struct share windows_share(uint64_t begin, uint64_t end);
bool windows_have_kernels(void);    /* kernels are recorded, too */
bool windows_trust_graph_ids(void); /* graph launches have the correlation ids of their nodes */

/* ---- file ---- */

bool file_create(void);
struct agent_file *file_map(void); /* NULL: there is none (then nothing is published) */
void file_begin(void);             /* what is written until file_end appears at once */
void file_end(void);
void file_heartbeat(void);
void file_state(enum agent_state state, enum agent_reason reason);
void file_forked(void);            /* in the child: lets go of the parent's file */
/* The one line on stderr. */
void say_once(const char *what);

/* ---- entry ---- */

uint64_t monotonic_ns(void);
uint64_t realtime_ns(void);
void wake_agent(void); /* from any thread; leaves errno alone */
bool stop_wanted(void);
/* After CUPTI has begun its work: it may have registered handlers for the exit, and ours must run before them. */
void exit_before_cupti(void);

#endif
