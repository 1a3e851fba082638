/* The mapped file. Once it is there only the agent's thread writes it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <linux/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

static struct agent_file *_Atomic map; /* a fork's child lets go of it, on the thread that forked */
static atomic_int lock_fd = -1;
static struct stat lock_file; /* to know whether the descriptor is still ours: programs close all that they find */

void say_once(const char *what)
{
    static bool said;
    if (said)
        return;
    said = true;
    dprintf(STDERR_FILENO, "gpu-hpc-agent: %s; this process runs on without\n", what);
}

/* Field 22 of /proc/self/stat. The program's name, in parentheses, may hold anything. */
static uint64_t start_ticks(void)
{
    char text[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    char *field = strrchr(text, ')');
    for (int i = 2; field && i < 22; i++)
        field = strchr(field + 1, ' ');
    return field ? decimal(field + 1) : 0;
}

static uint32_t chance(void)
{
    uint32_t number;
    if (syscall(SYS_getrandom, &number, sizeof number, GRND_NONBLOCK) != (long)sizeof number)
        number = (uint32_t)monotonic_ns();
    return number;
}

/* glibc has this function since 2.33 only; the kernel's structure is the same. */
static bool status_of(int fd, struct stat *status) { return syscall(SYS_fstat, fd, status) == 0; }

/* Programs that closed their standard descriptors write to these numbers all the same: not into our file. */
static int above_standard(int fd)
{
    if (fd > STDERR_FILENO)
        return fd;
    int higher = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    close(fd);
    return higher;
}

/* Never waits; another's lock is impossible on a file that we just made. */
static bool lock(int fd)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &whole) == 0;
}

/* All blocks exist before the mapping is written: a full disk would otherwise be a SIGBUS later. */
static struct agent_file *map_new(int fd)
{
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur < sizeof(struct agent_file))
        return NULL; /* a SIGXFSZ would end the program */
    if (posix_fallocate(fd, 0, sizeof(struct agent_file)) != 0)
        return NULL;
    void *memory = mmap(NULL, sizeof(struct agent_file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return NULL;
    (void)madvise(memory, sizeof(struct agent_file), MADV_DONTFORK);
    return memory;
}

static void fill(struct agent_file *file, uint64_t ticks)
{
    struct agent_header *h = &file->header;
    memcpy(h->magic, AGENT_MAGIC, sizeof h->magic);
    h->version = AGENT_LAYOUT_VERSION;
    h->header_size = sizeof *h;
    h->file_size = sizeof *file;
    h->device_offset = offsetof(struct agent_file, devices);
    h->device_stride = sizeof *file->devices;
    h->device_count = AGENT_DEVICES;
    h->kernel_offset = offsetof(struct agent_file, kernels);
    h->kernel_stride = sizeof *file->kernels;
    h->kernel_count = AGENT_KERNELS;
    h->overflow_count = AGENT_DEVICES;
    h->strings_offset = offsetof(struct agent_file, strings);
    h->strings_size = AGENT_STRINGS;
    h->pid = (uint32_t)getpid();
    h->start_ticks = ticks;
    h->uid = (uint32_t)getuid();
    h->mode = options.mode;
    h->created_ns = h->heartbeat_ns = h->state_since_ns = realtime_ns();
    h->state = AGENT_WAITING;
    h->reason = AGENT_REASON_NO_CONTEXT;
    h->launch_cost_us = options.launch_cost_us;
    h->node_cost_us = options.node_cost_us;
    h->budget = options.budget;
    h->environment_size = options.environment_size;
    memcpy(h->environment, options.environment, options.environment_size);
    for (uint32_t i = 0; i < AGENT_DEVICES; i++)
        file->kernels[AGENT_KERNELS + i].device = i;
}

bool file_create(void)
{
    char name[sizeof options.directory + 64], final[sizeof name];
    uint64_t ticks = start_ticks();
    int size = snprintf(name, sizeof name, "%s/%d-%llu-%08x", options.directory, (int)getpid(),
                        (unsigned long long)ticks, (unsigned)chance());
    if (size < 0 || (size_t)size + 5 > sizeof name)
        return false;
    memcpy(final, name, (size_t)size);
    memcpy(final + size, ".shm", 5);
    memcpy(name + size, ".tmp", 5);
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0640);
    if (fd < 0)
        return false;
    fd = above_standard(fd);
    struct agent_file *file = NULL;
    bool known = status_of(fd, &lock_file);
    lock_fd = fd; /* before the lock: a child that is forked meanwhile must not hold it */
    /* The exporter is of the directory's group, which the file inherits; a strict umask would shut it out. */
    if (known && fchmod(fd, 0640) == 0 && lock(fd))
        file = map_new(fd);
    if (file)
        fill(file, ticks);
    if (!file || rename(name, final) != 0) {
        unlink(name);
        lock_fd = -1;
        if (fd >= 0)
            close(fd);
        if (file)
            munmap(file, sizeof *file);
        return false;
    }
    map = file;
    return true;
}

struct agent_file *file_map(void) { return map; }

/* The mapping's stores must not leave the frame of the two of `sequence`. */
static void step_sequence(void)
{
    struct agent_file *file = map;
    volatile uint64_t *sequence = &file->header.sequence;
    atomic_signal_fence(memory_order_seq_cst);
    __atomic_store_n(sequence, *sequence + 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void file_begin(void) { step_sequence(); }

void file_end(void) { step_sequence(); }

static uint64_t own_cpu_ns(void)
{
    struct timespec used = {0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * SECOND + (uint64_t)used.tv_nsec;
}

void file_heartbeat(void)
{
    if (!map)
        return;
    struct agent_header *h = &map->header;
    file_begin();
    h->heartbeat_ns = realtime_ns();
    h->agent_cpu_ns = own_cpu_ns();
    h->buffers_out = buffers_out();
    file_end();
}

void file_state(enum agent_state state, enum agent_reason reason)
{
    if (!map)
        return;
    struct agent_header *h = &map->header;
    file_begin();
    if (h->state != state || h->reason != reason)
        h->state_since_ns = realtime_ns();
    h->state = state;
    h->reason = reason;
    h->heartbeat_ns = realtime_ns();
    file_end();
}

/* Only calls that are safe between fork and exec. The lock lives as long as any copy of its descriptor. */
void file_forked(void)
{
    struct stat now;
    int saved = errno;
    int fd = lock_fd;
    if (fd >= 0 && status_of(fd, &now) && now.st_dev == lock_file.st_dev && now.st_ino == lock_file.st_ino)
        close(fd);
    lock_fd = -1;
    map = NULL; /* the child has no such mapping (MADV_DONTFORK) */
    errno = saved;
}
