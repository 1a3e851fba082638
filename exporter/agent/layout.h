/* The file that an agent writes and the exporter reads: one per process, fixed size, little endian.
 *
 * DIRECTORY/<pid in its namespace>-<start time in clock ticks>-<random>.shm, mode 0640. While the agent fills the
 * header for the first time the name ends in .tmp. The agent holds an OFD write lock on byte 0 for as long as the
 * process (and its image: exec frees it) lives; but a program that closes all descriptors frees it too: the owner is
 * dead when the lock is free *and* heartbeat_ns stands still.
 *
 * Only the agent's own thread writes. `sequence` is odd while it does: copy the whole file, read `sequence`
 * before and after, and try again unless both are equal and even. A process killed in the middle leaves it odd for
 * ever: then nothing in the file is to be trusted but the fields up to `sequence`, which never change.
 *
 * All sums are cumulative since the process began and only grow, in nanoseconds, bytes or plain counts. They belong
 * to finished windows: a window's sums and its denominators (`traced_ns`, `device_traced_ns`) are added in one go, but
 * for waits that go on when it ends, which come with the next one's.
 *
 * Everything after `sequence` may be hostile: whoever may write into the directory may write this.
 *
 * Padding is explicit and zero. Readers check magic, version, file_size and the offsets and strides below; a
 * change of meaning or place increments AGENT_LAYOUT_VERSION. */
#ifndef GPU_HPC_AGENT_LAYOUT_H
#define GPU_HPC_AGENT_LAYOUT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define AGENT_MAGIC "GPUHPCAG" /* 8 bytes, no end mark */
#define AGENT_LAYOUT_VERSION 1u

#define AGENT_DEVICES 16u           /* CUDA ordinals 0..15 of the process; records of others count as dropped */
#define AGENT_KERNELS 4096u         /* slots with a name */
#define AGENT_STRINGS (1536u << 10) /* bytes of the names' arena */
#define AGENT_NAME 4096u            /* longer names are cut */
#define AGENT_BUCKETS 9u            /* of durations: 8 finite, then +Inf */
#define AGENT_COPY_BUCKETS 7u       /* of copied bytes: 6 finite, then +Inf */
#define AGENT_INTERVALS 64u         /* of the last times when tracing was on */
#define AGENT_ENVIRONMENT 4096u     /* bytes of the environment's snapshot */

/* Upper bounds (le), in ns: 1 us times 8^i. */
#define AGENT_DURATION_BOUNDS \
    { 1000u, 8000u, 64000u, 512000u, 4096000u, 32768000u, 262144000u, 2097152000u }
/* Upper bounds (le), in bytes. */
#define AGENT_COPY_BOUNDS \
    { 256u, 4096u, 65536u, 1048576u, 16777216u, 268435456u }

enum agent_state {
    AGENT_WAITING = 0, /* ready; no context yet (then with a reason), or between two windows (reason none) */
    AGENT_TRACING = 1, /* in a window */
    AGENT_PAUSED = 2,  /* stopped for the given reason; may go on */
    AGENT_OFF = 3,     /* stopped for the given reason, for good */
};

enum agent_reason {
    AGENT_REASON_NONE = 0,
    AGENT_REASON_NO_CONTEXT = 1,          /* waiting: the process has no CUDA context yet */
    AGENT_REASON_PROFILER = 2,            /* paused: another tool holds CUPTI's only subscription */
    AGENT_REASON_CONFIGURED = 3,          /* off: GPU_HPC_AGENT_MODE=off */
    AGENT_REASON_STOPPED = 4,             /* paused: gpu_hpc_agent_stop() was called */
    AGENT_REASON_NO_CUDA = 5,             /* off: libcuda.so.1 is not there or lacks functions */
    AGENT_REASON_NO_CUPTI = 6,            /* off: no libcupti found, or none that can be loaded */
    AGENT_REASON_MISSING_FUNCTION = 7,    /* off: libcupti lacks a function that is needed */
    AGENT_REASON_UNKNOWN_VERSION = 8,     /* off: cupti_version is outside of the proven range */
    AGENT_REASON_CUPTI_ERROR = 9,         /* off: a call failed; error_code and error_call tell which */
    AGENT_REASON_BUDGET = 10,             /* off: even the longest pause costs more than the budget. In the states
                                             waiting and tracing: continuous mode stepped down to duty */
    AGENT_REASON_INVALID_RECORDS = 11,    /* off: too many records without valid times */
    AGENT_REASON_BUFFERS = 12,            /* off: CUPTI kept all buffers */
    AGENT_REASON_WINDOWS_DISCARDED = 13,  /* off: several windows in a row never became complete */
};

enum agent_mode { AGENT_MODE_DUTY = 0, AGENT_MODE_CONTINUOUS = 1, AGENT_MODE_OFF = 2 };

/* Bits of agent_header.flags. */
enum {
    AGENT_FLAG_LAUNCHES = 1 << 0,    /* launch calls are recorded (wanted, and CUPTI 12.5 or later): launch to start, queue
                                        histogram, API times and graph launches are known; without it they stay 0
                                        and all idle time is `other` */
    AGENT_FLAG_GRAPH_NODES = 1 << 1, /* kernels inside graphs are recorded one by one; without it (budget of node
                                        records spent, or configured) no kernels are, once there are graphs */
    AGENT_FLAG_NAMES_FULL = 1 << 2,  /* a kernel found no slot or no room for its name: see the overflow slots */
    AGENT_FLAG_NO_COPIES = 1 << 3,   /* copies and sets are not recorded: their sums stay */
    AGENT_FLAG_NO_WAITS = 1 << 4,    /* waits are not recorded: their sums stay */
};

/* A time when tracing was on, CLOCK_REALTIME ns; end 0: it still is. */
struct agent_interval {
    uint64_t begin_ns, end_ns;
};

enum agent_direction { AGENT_H2D = 0, AGENT_D2H = 1, AGENT_D2D = 2, AGENT_P2P = 3, AGENT_DIRECTIONS = 4 };
/* The host's side of the copy; d2d and p2p are always DEVICE. Host memory not known to be pinned is PAGEABLE. */
enum agent_memory { AGENT_PINNED = 0, AGENT_PAGEABLE = 1, AGENT_DEVICE = 2, AGENT_MEMORIES = 3 };

struct agent_copies {                      /* 96 bytes */
    uint64_t count;
    uint64_t bytes;
    uint64_t ns;                           /* on the device */
    uint64_t api_ns;                       /* in the calls that asked for them (blocking ones wait inside) */
    uint64_t api_calls;
    uint64_t buckets[AGENT_COPY_BUCKETS];  /* not cumulative: each copy is in one */
};

/* As CUPTI numbers them. STREAM_WAIT_EVENT makes a stream wait, not the host. */
enum agent_sync {
    AGENT_SYNC_UNKNOWN = 0,
    AGENT_SYNC_EVENT = 1,
    AGENT_SYNC_STREAM_WAIT_EVENT = 2,
    AGENT_SYNC_STREAM = 3,
    AGENT_SYNC_CONTEXT = 4,
    AGENT_SYNCS = 5,
};

struct agent_device {
    uint8_t uuid[16];               /* all zero: the driver did not tell */
    uint32_t used;                  /* 1: the process has a context there, or records came from it; else all is 0 */
    uint32_t padding;
    uint64_t traced_ns;             /* wall time of published windows: denominator of what is not below */
    uint64_t device_traced_ns;      /* [A, B] of kernel-agent.md section 8: denominator of the next nine */
    uint64_t busy_ns;               /* union of kernels, copies and sets */
    uint64_t compute_ns;            /* union of kernels that are not communication */
    uint64_t communication_ns;      /* union of kernels whose name begins with "nccl" */
    uint64_t copy_ns;               /* union of copies and sets */
    uint64_t overlap_ns;            /* communication while compute runs too */
    uint64_t idle_host_ns;          /* nothing ran and nothing was launched */
    uint64_t idle_queue_ns;         /* something was launched and had not started */
    uint64_t idle_other_ns;         /* idle, but the launch of what ended it is unknown */
    uint64_t windows_without_union; /* published windows that added nothing to these nine */
    uint64_t launch_api_ns;         /* host time in launch calls, graph launches included */
    uint64_t launch_api_calls;
    uint64_t queue_ns;              /* launch to start: sum, and by bucket (count is the buckets' sum) */
    uint64_t queue_buckets[AGENT_BUCKETS];
    uint64_t graph_launches_traced; /* replays with records of their nodes */
    uint64_t graph_launches_untraced;
    uint64_t sets;                  /* memset operations, their bytes and time */
    uint64_t set_bytes;
    uint64_t set_ns;
    uint64_t sync_ns[AGENT_SYNCS]; /* by type; of each wait what lies in the window in which it ends or after which it
                                    * does, and in the one before */
    uint64_t sync_calls[AGENT_SYNCS]; /* that began in a window */
    struct agent_copies copies[AGENT_DIRECTIONS][AGENT_MEMORIES];
};

/* One kernel: device, full name, grid and block are its key. Slots fill up from 0 and keep their key for ever.
 * Slots AGENT_KERNELS + d are the overflow of device d: name_size 0, kernels of any name, grid and block. */
struct agent_kernel {                 /* 216 bytes */
    uint32_t device;                  /* index of agent_header's devices */
    uint32_t name_offset;             /* from strings_offset: bytes as CUPTI gives them (mangled), then a 0 byte */
    uint32_t name_size;               /* bytes without that 0; AGENT_NAME: probably cut. None of them is 0 */
    uint32_t padding;
    uint32_t grid[3], block[3];
    uint64_t executions;              /* 0: the slot is free, or its first window is not yet published */
    uint64_t launches;                /* of these outside graphs */
    uint64_t ns;
    double ns_squared;                /* sum of the squares of the durations, ns^2 */
    uint64_t max_ns;                  /* since the process began */
    uint64_t latency_ns;              /* launch call's end to start, negative ones as 0: sum, number */
    uint64_t latency_count;
    uint64_t buckets[AGENT_BUCKETS];  /* of durations, not cumulative */
    uint64_t window;                  /* number of the last published window with this kernel; it says of it: */
    uint64_t window_executions;
    uint64_t window_ns;
    uint64_t window_max_ns;
    uint64_t window_latency_ns;
    uint64_t window_latency_count;
};

struct agent_header {
    char magic[8];
    uint32_t version;       /* AGENT_LAYOUT_VERSION */
    uint32_t header_size;   /* sizeof(struct agent_header) */
    uint64_t file_size;     /* sizeof(struct agent_file) */
    uint32_t device_offset, device_stride, device_count;
    uint32_t kernel_offset, kernel_stride, kernel_count, overflow_count; /* overflow slots follow the kernels */
    uint32_t strings_offset, strings_size;
    uint32_t pid;           /* in the process's own pid namespace */
    uint64_t start_ticks;   /* field 22 of /proc/PID/stat */
    uint32_t uid;
    uint32_t mode;          /* enum agent_mode, as configured */
    uint64_t created_ns;    /* CLOCK_REALTIME */

    uint64_t sequence;      /* odd: being written */

    uint64_t heartbeat_ns;      /* CLOCK_REALTIME, about once a second; older than 5 s: a call hangs or CPU lacks */
    uint32_t state;             /* enum agent_state */
    uint32_t reason;            /* enum agent_reason */
    uint64_t state_since_ns;    /* CLOCK_REALTIME */
    int32_t error_code;         /* CUptiResult or CUresult of the call that ended the tracing */
    uint32_t flags;
    char error_call[40];        /* its name, 0-terminated */
    uint32_t cupti_version;     /* cuptiGetVersion: 28 is 12.9, from 13.0 on 130001 is 13.0.1; 0: not asked */
    uint32_t driver_version;    /* cuDriverGetVersion: 13000 is 13.0; 0: not asked */
    double overhead_ratio;      /* the cost model's estimate for the last window and the pause after it, at most 1 */
    double launch_cost_us, node_cost_us, budget; /* what that estimate was made with */
    uint64_t agent_cpu_ns;      /* CPU time of the agent's own thread */
    uint64_t records_kept;      /* in published windows */
    uint64_t records_dropped;   /* lost: no buffer, no room, discarded windows */
    uint64_t records_invalid;   /* start 0, end before start, or an unknown shape: in no sum */
    uint64_t records_unmatched; /* launch calls and kernels whose other half did not come (both stay in their sums) */
    uint64_t node_records;      /* kernels, copies and sets inside graphs, kept or not */
    uint64_t windows_published; /* also the number of the last one, agent_kernel.window */
    uint64_t windows_discarded; /* incomplete after the longest wait, without the kernels of
                                   launches (kinds.c), a profiler began in them, or the
                                   program was suspended or its clock set */
    uint64_t last_window_ns;    /* CLOCK_REALTIME when the last one was published */
    double window_seconds;      /* the last window's length */
    double period_seconds;      /* from its begin to that of the next; equal to window_seconds: continuous */
    uint64_t on_ns;             /* time with tracing on, discarded windows included */
    uint32_t buffers_out;       /* activity buffers that CUPTI holds now */
    uint32_t kernels;           /* slots in use, at most kernel_count */
    uint32_t strings_used;      /* bytes */
    uint32_t environment_size;  /* bytes used of environment */
    uint64_t intervals_total;   /* how many there were; interval i is intervals[i % AGENT_INTERVALS] */
    struct agent_interval intervals[AGENT_INTERVALS];
    char environment[AGENT_ENVIRONMENT]; /* whole "NAME=value" entries, each with a 0 byte after it */
};

struct agent_file {
    struct agent_header header;
    struct agent_device devices[AGENT_DEVICES];
    struct agent_kernel kernels[AGENT_KERNELS + AGENT_DEVICES];
    char strings[AGENT_STRINGS];
};

static_assert(offsetof(struct agent_header, sequence) == 88, "the fixed part of the header");
static_assert(sizeof(struct agent_interval) == 16, "no hidden padding");
static_assert(sizeof(struct agent_copies) == 96, "no hidden padding");
static_assert(sizeof(struct agent_device) == 1480, "no hidden padding");
static_assert(sizeof(struct agent_kernel) == 216, "no hidden padding");
static_assert(sizeof(struct agent_header) == 5448, "no hidden padding");
static_assert(sizeof(struct agent_file) == 2490184, "fixed size");

#endif
