/* A program with a GPU: does what the lines of its standard input say, and answers each with one line.
 *
 * `kernel NAME [option=value…]`; README.md lists commands and options. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fake_activity.h"

int cuInit(unsigned flags);
void host_calls(bool yes);

static char **arguments;
static int64_t base;
static const char *agent; /* path of the agent's library */

/* ---- Options ---- */

static const char *option(char **words, const char *name)
{
    size_t size = strlen(name);
    for (; *words; words++)
        if (strncmp(*words, name, size) == 0 && (*words)[size] == '=')
            return *words + size + 1;
    return NULL;
}

static int64_t number(char **words, const char *name, int64_t fallback)
{
    const char *text = option(words, name);
    return text ? strtoll(text, NULL, 10) : fallback;
}

/* ---- Records ---- */

static void put32(uint8_t *record, size_t at, uint32_t value) { memcpy(record + at, &value, sizeof value); }
static void put64(uint8_t *record, size_t at, uint64_t value) { memcpy(record + at, &value, sizeof value); }

/* thread=N: the id that calls name. */
static _Thread_local uint32_t thread_id;

static void append_call(int kind, uint32_t id, int64_t begin, int64_t end, uint32_t correlation, uint32_t result,
                        int lane)
{
    uint8_t record[64] = {0};
    if (!api_on(kind, id))
        return;
    put32(record, 0, (uint32_t)kind);
    put32(record, 4, id);
    put64(record, 8, (uint64_t)begin);
    put64(record, 16, (uint64_t)end);
    put32(record, 24, (uint32_t)getpid());
    put32(record, 28, thread_id);
    put32(record, 32, correlation);
    put32(record, 36, result);
    append(record, record_size((uint32_t)kind), end, lane);
}

/* A launch's times: the call, then the work. */
typedef struct { int64_t begin, end, start, stop; } Times;

static _Atomic int64_t stream_ends[1024];

/* at, launched: places on the base's scale; otherwise now, in the order of the stream unless free=1. */
static Times times(char **words, int64_t fallback_ns)
{
    Times t;
    int64_t ns = number(words, "ns", fallback_ns);
    t.begin = realtime();
    t.end = t.begin + number(words, "api_ns", 1000);
    t.start = t.end + number(words, "delay", 2000);
    if (option(words, "at")) {
        t.start = base + number(words, "at", 0);
        t.end = option(words, "launched") ? base + number(words, "launched", 0) : t.start;
        t.begin = t.end - number(words, "api_ns", 1000);
    } else if (!number(words, "free", 1)) {
        _Atomic int64_t *last = &stream_ends[number(words, "stream", 7) % 1024];
        int64_t before = atomic_load(last);
        t.start = before > t.start ? before : t.start;
        atomic_store(last, t.start + ns);
    }
    t.stop = t.start + ns;
    const char *invalid = option(words, "invalid");
    if (invalid && strcmp(invalid, "zero") == 0)
        t.start = t.stop = 0;
    else if (invalid && strcmp(invalid, "huge") == 0)
        t.stop = INT64_MAX;
    else if (invalid)
        t.stop = t.start - 1;
    return t;
}

/* A thread whose kernels leave no record until they have been switched on so often. */
static _Thread_local long lost_until;

static void append_kernel(char **words, const char *name, Times t, uint32_t correlation, uint64_t node, int lane)
{
    uint8_t record[256] = {0};
    if (!kind_on(KERNEL) || kernel_enables() < lost_until)
        return;
    put32(record, 0, KERNEL);
    int64_t skew = number(words, "skew", 0); /* of the GPU's clock */
    put64(record, 16, (uint64_t)(t.start + skew));
    put64(record, 24, (uint64_t)(t.stop + skew));
    put32(record, 40, (uint32_t)number(words, "device", 0));
    put32(record, 44, (uint32_t)number(words, "context", 1));
    put32(record, 48, (uint32_t)number(words, "stream", 7));
    for (size_t i = 0; i < 3; i++) {
        put32(record, 52 + 4 * i, i ? 1 : (uint32_t)number(words, "grid", 1));
        put32(record, 64 + 4 * i, i ? 1 : (uint32_t)number(words, "block", 32));
    }
    put32(record, 92, correlation);
    put64(record, 104, (uint64_t)(uintptr_t)name);
    put64(record, 144, node);
    put32(record, 156, node ? 1 : 0);
    append(record, record_size(KERNEL), t.stop == INT64_MAX ? t.start : t.stop, lane);
}

/* A name that lives as long as its records. With distinct=N the number i % N is appended. */
static const char *name_of(char **words, int64_t i)
{
    static char places[8][8192];
    int64_t distinct = number(words, "distinct", 0), size = number(words, "long", 0);
    const char *place = option(words, "place"); /* the same memory for another name */
    char text[8192], *name;
    if (distinct)
        snprintf(text, sizeof text, "%s_%lld", words[0], (long long)(i % distinct));
    else
        snprintf(text, sizeof text, "%s", words[0]);
    for (size_t end = strlen(text); (int64_t)end < size && end < sizeof text - 1;)
        text[end++] = 'x', text[end] = 0;
    if (place)
        return strcpy(places[atoi(place) % 8], text);
    name = strdup(text); /* CUPTI's own: lives on */
    return name;
}

/* same_id=1: a thread whose kernels are lost has one id for all its launches. */
static uint32_t launch_id(char **words)
{
    static _Thread_local uint32_t lost_id;
    if (!number(words, "same_id", 0) || kernel_enables() >= lost_until)
        return next_correlation();
    lost_id = lost_id ? lost_id : next_correlation();
    return lost_id;
}

static void launch_kernel(char **words, const char *name)
{
    Times t = times(words, 1000);
    bool driver = number(words, "driver", 0);
    uint32_t correlation = launch_id(words), id = (uint32_t)number(words, "cbid", driver ? 307 : 211);
    bool reversed = number(words, "reversed", 0); /* the kernel's record comes first, in another buffer */
    if (reversed)
        append_kernel(words, name, t, correlation, 0, 1);
    if (number(words, "call", 1))
        append_call(driver ? DRIVER : RUNTIME, id, t.begin, t.end, correlation, (uint32_t)number(words, "result", 0),
                    0);
    if (!reversed && number(words, "work", 1))
        append_kernel(words, name, t, correlation, 0, (int)number(words, "lane", 0));
}

/* wait_ns=N: cudaStreamSynchronize, on the same thread. */
static void wait_for_stream(char **words)
{
    int64_t wait = number(words, "wait_ns", 0), now = realtime();
    if (wait)
        append_call(RUNTIME, 131, now - wait, now, next_correlation(), 0, 0);
}

/* nodes=N kernels; match=0: other ids than the launch, as before 13.1.1; driver=1: by the driver's function. */
static void launch_graph(char **words, const char *name)
{
    Times t = times(words, 1000);
    int64_t nodes = number(words, "nodes", 1), ns = number(words, "ns", 1000);
    uint32_t correlation = next_correlation();
    bool driver = number(words, "driver", 0);
    if (number(words, "call", 1))
        append_call(driver ? DRIVER : RUNTIME, driver ? 514 : 311, t.begin, t.end, correlation, 0, 0);
    for (int64_t i = 0; i < nodes; i++) {
        Times node = {.start = t.start + i * ns, .stop = t.start + (i + 1) * ns};
        append_kernel(words, name, node, number(words, "match", 1) ? correlation : 0, (uint64_t)i + 1,
                      (int)number(words, "lane", 0));
    }
}

/* A launch into a graph that is being made. */
static void capture_kernel(void)
{
    int64_t now = realtime();
    append_call(RUNTIME, 315, now, now, next_correlation(), 0, 0);
    append_call(RUNTIME, 211, now, now, next_correlation(), 0, 0);
    append_call(RUNTIME, 319, now, now, next_correlation(), 0, 0);
}

/* unfinished wait|graph|kernel: a call of cudaDeviceSynchronize or cudaGraphLaunch that goes on, or work without an
 * end. */
static void launch_unfinished(const char *what)
{
    uint8_t record[256] = {0};
    bool is_kernel = strcmp(what, "kernel") == 0;
    uint32_t kind = is_kernel ? KERNEL : RUNTIME, function = strcmp(what, "graph") == 0 ? 311 : 165;
    if (is_kernel ? !kind_on(KERNEL) : !api_on(RUNTIME, function))
        return;
    put32(record, 0, kind);
    put32(record, 4, function);
    put64(record, is_kernel ? 16 : 8, (uint64_t)realtime());
    put64(record, 104, (uint64_t)(uintptr_t)what);
    append(record, record_size(kind), INT64_MAX, 0);
}

static uint8_t memory_of(const char *name)
{
    return name && strcmp(name, "pinned") == 0 ? 2 : name && strcmp(name, "pageable") == 0 ? 1 : 3;
}

/* copy h2d|d2h|d2d|p2p|h2h [memory=pinned] [bytes=N] */
static void launch_copy(char **words)
{
    static const struct { const char *name; uint8_t kind; } DIRECTIONS[] = {
        {"h2d", 1}, {"d2h", 2}, {"d2d", 8}, {"p2p", 10}, {"h2h", 9}};
    Times t = times(words, 5000);
    uint8_t record[128] = {0}, memory = memory_of(option(words, "memory"));
    uint32_t correlation = next_correlation();
    append_call(RUNTIME, (uint32_t)number(words, "cbid", 41), t.begin, t.end, correlation, 0, 0);
    for (size_t i = 0; i < 5; i++)
        if (strcmp(words[0], DIRECTIONS[i].name) == 0)
            record[4] = DIRECTIONS[i].kind;
    bool peer = record[4] == 10;
    if (!kind_on(peer ? MEMCPY2 : MEMCPY))
        return;
    put32(record, 0, peer ? MEMCPY2 : MEMCPY);
    record[5] = record[4] == 1 ? memory : 3;
    record[6] = record[4] == 2 ? memory : 3;
    put64(record, 8, (uint64_t)number(words, "bytes", 4096));
    put64(record, 16, (uint64_t)t.start);
    put64(record, 24, (uint64_t)t.stop);
    put32(record, 32, (uint32_t)number(words, "device", 0));
    put32(record, peer ? 60 : 44, correlation);
    append(record, record_size(peer ? MEMCPY2 : MEMCPY), t.stop, 0);
}

static void launch_set(char **words)
{
    Times t = times(words, 3000);
    uint8_t record[128] = {0};
    if (!kind_on(MEMSET))
        return;
    put32(record, 0, MEMSET);
    put64(record, 8, (uint64_t)number(words, "bytes", 4096));
    put64(record, 16, (uint64_t)t.start);
    put64(record, 24, (uint64_t)t.stop);
    put32(record, 32, (uint32_t)number(words, "device", 0));
    append(record, record_size(MEMSET), t.stop, 0);
}

/* sync TYPE [ns=N] [since=NS] [context=N] [driver=1] [cbid=N]: a record of the wait, or of the call of the function
 * that waits: for so long, or since then (ns since 1970), until now. */
static void synchronise(char **words)
{
    int64_t now = realtime(), began = number(words, "since", now - number(words, "ns", 1000));
    static const uint32_t IDS[2][5] = {{0, 137, 147, 131, 165}, {0, 121, 295, 126, 17}};
    uint32_t driver = number(words, "driver", 0) != 0, type = (uint32_t)atoi(words[0]);
    uint8_t record[64] = {0};
    uint32_t id = (uint32_t)number(words, "cbid", type < 5 ? IDS[driver][type] : 0);
    append_call(driver ? DRIVER : RUNTIME, id, began, now, next_correlation(), 0, 0);
    if (!kind_on(SYNC))
        return;
    put32(record, 0, SYNC);
    put32(record, 4, type);
    put64(record, 8, (uint64_t)began);
    put64(record, 16, (uint64_t)now);
    put32(record, 28, (uint32_t)number(words, "context", 1));
    append(record, record_size(SYNC), now, 0);
}

/* ---- Work on many threads ---- */

typedef struct { const char *what; char **words; atomic_int begun; } Work;

enum { MAX_THREADS = 1024 };

static void *work(void *argument)
{
    Work *w = argument;
    if (option(w->words, "lose"))
        lost_until = kernel_enables() + number(w->words, "lose", 0) * (1 + atomic_fetch_add(&w->begun, 1));
    thread_id = (uint32_t)number(w->words, "thread", gettid());
    int64_t count = number(w->words, "count", 1), pause = number(w->words, "every_us", 0);
    const char *name = NULL;
    for (int64_t i = 0; i < count; i++) {
        if (!name || option(w->words, "distinct"))
            name = strcmp(w->what, "kernel") == 0 || strcmp(w->what, "graph") == 0 ? name_of(w->words, i) : "";
        if (strcmp(w->what, "kernel") == 0)
            launch_kernel(w->words, name);
        else if (strcmp(w->what, "graph") == 0)
            launch_graph(w->words, name);
        else if (strcmp(w->what, "capture") == 0)
            capture_kernel();
        else if (strcmp(w->what, "copy") == 0)
            launch_copy(w->words);
        else if (strcmp(w->what, "set") == 0)
            launch_set(w->words);
        else
            synchronise(w->words);
        wait_for_stream(w->words);
        if (pause)
            nanosleep(&(struct timespec){.tv_nsec = pause * 1000}, NULL);
    }
    return NULL;
}

static void do_work(const char *what, char **words)
{
    pthread_t threads[MAX_THREADS];
    Work w = {what, words, 0};
    int64_t count = number(words, "threads", 0);
    if (!count) {
        work(&w);
        return;
    }
    for (int64_t i = 0; i < count && i < MAX_THREADS; i++)
        pthread_create(&threads[i], NULL, work, &w);
    for (int64_t i = 0; i < count && i < MAX_THREADS; i++)
        pthread_join(threads[i], NULL);
}

/* ---- Processes ---- */

/* The child launches too, as a data loader that touches CUDA by mistake, then ends. */
static void do_fork(char **words)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        abandon_buffers();
        for (int64_t i = 0; i < number(words, "count", 0); i++)
            launch_kernel(words, "child");
        while (option(words, "wait"))
            pause(); /* until it is killed */
        if (option(words, "exit"))
            exit(0);
        _exit(0);
    }
    if (option(words, "wait")) {
        printf(" %d", (int)child);
        return;
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf(" status=%d", status);
}

static void touch_everything(void)
{
    /* A program that tidies up descriptors, and then gets the same numbers for its own. */
    for (int fd = 3; fd < 64; fd++)
        close(fd);
    for (int i = 0; i < 8; i++) {
        FILE *file = tmpfile();
        printf(" %d", file ? fileno(file) : -1);
    }
}

/* On the base's scale. */
static void sleep_until(int64_t time)
{
    int64_t rest = base + time - realtime();
    if (rest > 0)
        nanosleep(&(struct timespec){.tv_sec = rest / 1000000000, .tv_nsec = rest % 1000000000}, NULL);
}

static void agent_entry(const char *name)
{
    void *library = dlopen(agent, RTLD_NOW), *function = dlsym(library, name);
    int (*entry)(void);
    memcpy(&entry, &function, sizeof function);
    printf(" %d", entry());
}

/* Runs after the agent's handler, and leaves it time for the mistake. */
static void on_exit_begin(void)
{
    begin_exit();
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
}

static void *fork_beside(void *unused)
{
    (void)unused;
    while (!kind_on(MEMCPY))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    do_fork((char *[]){"wait=1", NULL});
    return NULL;
}

/* init [fork=1]: another thread forks when the first kind is enabled. */
static void initialise(char **words)
{
    pthread_t beside;
    bool forks = option(words, "fork");
    if (forks)
        pthread_create(&beside, NULL, fork_beside, NULL);
    host_calls(true);
    int result = cuInit(0);
    host_calls(false);
    if (forks)
        pthread_join(beside, NULL);
    printf(" %d", result);
}

static bool command(char **words)
{
    const char *what = words[0], *argument = words[1] ? words[1] : "";
    char **rest = words + 1;
    if (strstr("kernel graph capture copy set sync", what))
        do_work(what, rest);
    else if (strcmp(what, "lose") == 0)
        lost_until = kernel_enables() + atol(argument);
    else if (strcmp(what, "unfinished") == 0)
        launch_unfinished(argument);
    else if (strcmp(what, "secure") == 0)
        settings.secure = true;
    else if (strcmp(what, "version") == 0)
        settings.version = (uint32_t)atoi(argument);
    else if (strcmp(what, "driver") == 0)
        settings.driver = atoi(argument);
    else if (strcmp(what, "devices") == 0)
        settings.devices = atoi(argument);
    else if (strcmp(what, "global_buffers") == 0)
        settings.global_buffers = true;
    else if (strcmp(what, "records_per_buffer") == 0)
        settings.records_per_buffer = (size_t)atoi(argument);
    else if (strcmp(what, "stall") == 0)
        settings.stalled = atoi(argument);
    else if (strcmp(what, "keep_empty") == 0)
        settings.keeps_empty = true;
    else if (strcmp(what, "correlation") == 0)
        set_correlation((uint32_t)strtoul(argument, NULL, 10));
    else if (strcmp(what, "fault") == 0)
        fault(argument, (int)number(rest, "code", 999), (long)number(rest, "after", 0));
    else if (strcmp(what, "slow") == 0)
        slow(argument, (long)number(rest, "ms", 0));
    else if (strcmp(what, "load") == 0)
        printf(" %s", dlopen(argument, RTLD_NOW) ? "loaded" : "failed");
    else if (strcmp(what, "init") == 0)
        initialise(rest);
    else if (strcmp(what, "all_calls") == 0)
        tool_wants_calls(atoi(argument));
    else if (strcmp(what, "all_waits") == 0)
        tool_wants_waits();
    else if (strcmp(what, "alarms") == 0)
        settings.has_alarms = true;
    else if (strcmp(what, "context") == 0)
        cuda_context(atoi(argument));
    else if (strcmp(what, "clock") == 0)
        set_clock(strtoll(argument, NULL, 10));
    else if (strcmp(what, "base") == 0)
        base = realtime() + number(rest, "in", 0);
    else if (strcmp(what, "unset_injection") == 0)
        unsetenv("CUDA_INJECTION64_PATH");
    else if (strcmp(what, "until") == 0)
        sleep_until(strtoll(argument, NULL, 10));
    else if (strcmp(what, "calls") == 0)
        print_calls();
    else if (strcmp(what, "kinds") == 0)
        print_kinds();
    else if (strcmp(what, "subscribe") == 0)
        tool_subscribe(true);
    else if (strcmp(what, "unsubscribe") == 0)
        tool_subscribe(false);
    else if (strcmp(what, "profile") == 0)
        tool_take_over(number(rest, "frees", 0));
    else if (strcmp(what, "profiled") == 0)
        printf(" %ld", tool_let_go());
    else if (strcmp(what, "foreign") == 0)
        tool_return_foreign();
    else if (strcmp(what, "fork") == 0)
        do_fork(rest);
    else if (strcmp(what, "close_all") == 0)
        touch_everything();
    else if (strcmp(what, "entry") == 0)
        agent_entry(argument);
    else if (strcmp(what, "exec") == 0)
        return execv("/proc/self/exe", arguments) == 0;
    else if (strcmp(what, "exit") == 0)
        exit(atoi(argument));
    else
        return false;
    return true;
}

int main(int count, char **values)
{
    (void)count;
    arguments = values;
    agent = getenv("CUDA_INJECTION64_PATH");
    agent = agent ? strdup(agent) : "";
    char line[8192], *words[32];
    atexit(on_exit_begin);
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        int n = 0;
        for (char *word = strtok(line, " \n"); word && n < 31; word = strtok(NULL, " \n"))
            words[n++] = word;
        words[n] = NULL;
        printf("ok");
        if (!n || !command(words)) {
            fprintf(stderr, "host: %s is no command\n", n ? words[0] : "nothing");
            return 2;
        }
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
