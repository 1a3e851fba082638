/* libcupti.so: the functions that the agent may call, and those that it must not. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fake_activity.h"

int engine_enable(int kind, bool on);
int engine_api(int kind, uint32_t id, bool on);
int engine_register(Requested request, Completed complete);
int engine_flush(uint32_t flag);
int engine_next(uint8_t *buffer, size_t valid, uint8_t **record);
size_t engine_dropped(void);
int engine_subscribe(void);
void engine_unsubscribe(void);

#define CALL(then)                \
    do {                          \
        int code = call(__func__); \
        if (code != OK)           \
            return code;          \
        then;                     \
        return OK;                \
    } while (0)

int cuptiGetVersion(uint32_t *version) { CALL(*version = settings.version); }

int cuptiSubscribe(void **subscriber, void *function, void *user)
{
    (void)user;
    int code = call(__func__);
    if (code != OK)
        return code;
    if (!function)
        return 1;
    *subscriber = (void *)1;
    return engine_subscribe();
}

int cuptiUnsubscribe(void *subscriber)
{
    (void)subscriber;
    CALL(engine_unsubscribe());
}

/* A CUPTI that was loaded after the agent ends before it, unless the agent takes care; that leaves it time for the
 * mistake. */
static void end(void)
{
    begin_exit();
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
}

int cuptiActivityRegisterCallbacks(Requested request, Completed complete)
{
    static atomic_bool begun;
    if (!atomic_exchange(&begun, true))
        atexit(end);
    CALL(return engine_register(request, complete));
}
/* The real library loses a thread's records, or makes them twice, or crashes, if a call of CUDA's is going on. */
static void want_cuinit(int kind, bool on)
{
    if (is_in_cuinit())
        return;
    fprintf(stderr, "fake_activity: kind %d was switched %s in a living program\n", kind, on ? "on" : "off");
    abort();
}

static int switch_kind(int kind, bool on)
{
    if (kind != KERNEL)
        want_cuinit(kind, on);
    return engine_enable(kind, on);
}

static int switch_api(int kind, uint32_t id, bool on)
{
    want_cuinit(kind, on);
    return engine_api(kind, id, on);
}

int cuptiActivityEnable(int kind) { CALL(return switch_kind(kind, true)); }
int cuptiActivityDisable(int kind) { CALL(return switch_kind(kind, false)); }
int cuptiActivityFlushAll(uint32_t flag)
{
    if (flag && tool_is_subscribed()) {
        fprintf(stderr, "fake_activity: another tool's unfinished records were forced out\n");
        abort();
    }
    CALL(return engine_flush(flag));
}
int cuptiActivityEnableRuntimeApi(uint32_t id, uint8_t on) { CALL(return switch_api(RUNTIME, id, on)); }
int cuptiActivityEnableDriverApi(uint32_t id, uint8_t on) { CALL(return switch_api(DRIVER, id, on)); }
int cuptiGetTimestamp(uint64_t *time) { CALL(*time = (uint64_t)realtime()); }

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record)
{
    CALL(return engine_next(buffer, valid, record));
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count)
{
    (void)context, (void)stream;
    CALL(*count = engine_dropped());
}

int cuptiActivitySetAttribute(int attribute, size_t *size, void *value)
{
    (void)value;
    char name[48];
    snprintf(name, sizeof name, "attribute_%d", attribute);
    call(name);
    CALL(if (!size || *size != 1) return 1);
}

int cuptiFinalize(void)
{
    fprintf(stderr, "fake_activity: cuptiFinalize was called\n");
    abort();
}
