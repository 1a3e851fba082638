/* Which kinds of records CUPTI makes, and when.
 *
 * On CUPTI 13.0 a kind of calls, copies or sets, or a single function's calls, that are enabled or disabled while the
 * program is in a call of CUDA's break what CUPTI knows of the calling thread: its later kernels or calls are recorded no
 * more, or twice, or all under one id, or the program ends in a segmentation fault (docs/benchmarks.md has how often). So
 * these are enabled inside cuInit, when no call of CUDA's runs yet, and never disabled; where we were not there, they are
 * not recorded. Kernels may be switched at any time. */
#define _GNU_SOURCE
#include "agent.h"

static const int COPIES[] = {KIND_MEMCPY, KIND_MEMCPY2, KIND_MEMSET};
enum { COPY_KINDS = sizeof COPIES / sizeof *COPIES };

static bool is_loaded, with_waits, with_launches, with_copies, with_driver;
static bool are_calls_silent; /* enabled, but none come */
static bool is_registered, may_be_replaced;
static enum agent_reason why_not_loaded;
static int early_error;

bool kinds_have_waits(void) { return with_waits && !are_calls_silent; }
bool kinds_have_launches(void) { return with_launches && !are_calls_silent; }
bool kinds_have_copies(void) { return with_copies; }

bool kinds_wanted(uint32_t kind)
{
    switch (kind) {
    case KIND_CONCURRENT_KERNEL: return true;
    case KIND_MEMCPY: case KIND_MEMCPY2: case KIND_MEMSET: return with_copies;
    case KIND_RUNTIME: return with_waits && cupti_can_record_calls();
    case KIND_DRIVER: return with_driver;
    case KIND_SYNCHRONIZATION: return with_waits && !cupti_can_record_calls();
    default: return false;
    }
}

static void load(void)
{
    is_loaded = true;
    why_not_loaded = cupti_load(options.cuda_home, options.any_version);
    if (why_not_loaded == AGENT_REASON_NONE && !buffers_create())
        why_not_loaded = AGENT_REASON_BUFFERS;
    buffers_set_version(cupti_version());
}

static int register_once(void)
{
    int error = is_registered && !may_be_replaced ? CUPTI_OK : cupti_register(buffers_requested, buffers_completed);
    is_registered = true;
    exit_before_cupti();
    return error;
}

/* Versions that cannot record single functions' calls have records of waits. */
static int switch_calls(bool on)
{
    if (!cupti_can_record_calls())
        return on ? cupti_enable(KIND_SYNCHRONIZATION) : cupti_disable(KIND_SYNCHRONIZATION);
    int error = cupti_switch_calls(KIND_RUNTIME, with_launches, on);
    return error || !with_driver ? error : cupti_switch_calls(KIND_DRIVER, with_launches, on);
}

enum agent_reason kinds_load(int *error)
{
    if (!is_loaded)
        load();
    *error = early_error;
    return why_not_loaded;
}

void kinds_withdraw(void)
{
    for (int i = 0; with_copies && i < COPY_KINDS; i++)
        (void)cupti_disable(COPIES[i]);
    if (with_waits)
        (void)switch_calls(false);
}

void kinds_prepare(void)
{
    bool is_wanted = options.mode != AGENT_MODE_OFF && (options.waits || options.copies);
    if (!is_wanted || cuda_load() != AGENT_REASON_NONE)
        return;
    load();
    if (why_not_loaded != AGENT_REASON_NONE)
        return;
    early_error = cupti_probe();
    if (early_error) { /* another tool was there before us: its kinds are not ours to switch */
        early_error = early_error == CUPTI_SUBSCRIBER_TAKEN ? CUPTI_OK : early_error;
        return;
    }
    early_error = register_once();
    with_waits = options.waits;
    with_launches = options.calls && cupti_can_record_calls();
    with_driver = options.driver_calls && cupti_can_record_calls();
    with_copies = options.copies;
    for (int i = 0; with_copies && !early_error && i < COPY_KINDS; i++)
        early_error = cupti_enable(COPIES[i]);
    if (with_waits && !early_error)
        early_error = switch_calls(true);
    if (early_error) /* nothing will be traced */
        kinds_withdraw();
    exit_before_cupti();
}

int kinds_on(bool kernels)
{
    int error = register_once();
    error = error || !kernels ? error : cupti_enable(KIND_CONCURRENT_KERNEL);
    exit_before_cupti();
    return error;
}

int kinds_off(bool kernels) { return kernels ? cupti_disable(KIND_CONCURRENT_KERNEL) : CUPTI_OK; }

void kinds_doubt_callbacks(void) { is_registered = false; }

void kinds_were_touched(bool is_still_there)
{
    with_waits = with_launches = with_driver = with_copies = is_registered = false;
    may_be_replaced = is_still_there;
}

void kinds_note_calls(bool do_come) { are_calls_silent = !do_come; }
