/* Which kinds of records CUPTI makes, and when.
 *
 * On CUPTI 13.0 a kind of calls, copies or sets that is enabled or disabled while the program is in a call of CUDA's
 * breaks what CUPTI knows of the calling thread: its later kernels or calls are recorded no more, or the program ends in a
 * segmentation fault (docs/benchmarks.md has how often). So these are enabled inside cuInit, when no call of CUDA's runs
 * yet, and never disabled; where we were not there, they are not recorded. Kernels may be switched at any time, and so may
 * the functions whose calls are recorded. */
#define _GNU_SOURCE
#include "agent.h"

static const int COPIES[] = {KIND_MEMCPY, KIND_MEMCPY2, KIND_MEMSET};
enum { COPY_KINDS = sizeof COPIES / sizeof *COPIES };

static bool is_loaded, with_calls, with_copies, with_driver;
static bool is_registered, may_be_replaced;
static enum agent_reason why_not_loaded;
static int early_error;

bool kinds_have_calls(void) { return with_calls; }
bool kinds_have_launches(void) { return with_calls && cupti_can_record_calls(); }
bool kinds_have_copies(void) { return with_copies; }

static void load(void)
{
    is_loaded = true;
    why_not_loaded = cupti_load(options.cuda_home, options.any_version);
    if (why_not_loaded == AGENT_REASON_NONE && !buffers_create())
        why_not_loaded = AGENT_REASON_BUFFERS;
    buffers_set_version(cupti_version());
}

static void note(int *error, int result) { *error = *error ? *error : result; }

static int register_once(void)
{
    int error = is_registered && !may_be_replaced ? CUPTI_OK : cupti_register(buffers_requested, buffers_completed);
    is_registered = true;
    exit_before_cupti();
    return error;
}

/* Versions that cannot record single functions' calls have records of waits, which come in pauses too. */
static int enable_calls(void)
{
    if (!cupti_can_record_calls())
        return cupti_enable(KIND_SYNCHRONIZATION);
    int error = cupti_enable(KIND_RUNTIME);
    return error || !with_driver ? error : cupti_enable(KIND_DRIVER);
}

static int disable_calls(void)
{
    if (!cupti_can_record_calls())
        return cupti_disable(KIND_SYNCHRONIZATION);
    int error = with_driver ? cupti_disable(KIND_DRIVER) : CUPTI_OK;
    note(&error, cupti_disable(KIND_RUNTIME));
    return error;
}

/* Functions that are switched inside cuInit are all on after it, so that this is done when it is over, and again for each
 * window. */
static int record_calls(bool on)
{
    if (!kinds_have_launches())
        return CUPTI_OK;
    int error = cupti_record_calls(KIND_RUNTIME, on);
    if (with_driver)
        note(&error, cupti_record_calls(KIND_DRIVER, on));
    return error;
}

enum agent_reason kinds_load(int *error)
{
    if (!is_loaded)
        load();
    *error = early_error;
    return why_not_loaded;
}

int kinds_calm(void) { return record_calls(false); }

void kinds_withdraw(void)
{
    for (int i = 0; with_copies && i < COPY_KINDS; i++)
        (void)cupti_disable(COPIES[i]);
    if (with_calls)
        (void)disable_calls();
}

void kinds_prepare(void)
{
    bool is_wanted = options.mode != AGENT_MODE_OFF && (options.calls || options.copies);
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
    with_calls = options.calls;
    with_driver = with_calls && options.driver_calls && cupti_can_record_calls();
    with_copies = options.copies;
    for (int i = 0; with_copies && !early_error && i < COPY_KINDS; i++)
        early_error = cupti_enable(COPIES[i]);
    if (with_calls && !early_error)
        early_error = enable_calls();
    if (early_error) /* nothing will be traced */
        kinds_withdraw();
    exit_before_cupti();
}

int kinds_on(bool kernels, uint64_t *calls_from)
{
    int error = register_once();
    error = error ? error : record_calls(true);
    if (error)
        return error;
    *calls_from = cupti_now();
    error = kernels ? cupti_enable(KIND_CONCURRENT_KERNEL) : CUPTI_OK;
    exit_before_cupti();
    return error;
}

int kinds_off(bool kernels, uint64_t *calls_to)
{
    int error = kernels ? cupti_disable(KIND_CONCURRENT_KERNEL) : CUPTI_OK;
    *calls_to = cupti_now();
    note(&error, record_calls(false));
    return error;
}

void kinds_doubt_callbacks(void) { is_registered = false; }

void kinds_were_touched(bool is_still_there)
{
    with_calls = with_driver = with_copies = is_registered = false;
    may_be_replaced = is_still_there;
}

void kinds_lost_calls(void) { with_calls = with_driver = false; }

void kinds_give_calls_up(void)
{
    (void)disable_calls();
    kinds_lost_calls();
}
