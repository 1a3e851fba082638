/* What the environment says. A value that cannot be read leaves the default. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "agent.h"

struct options options;

/* Decimal and not negative. strtod would follow the program's locale. */
static bool number(const char *name, double *value)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return false;
    double result = 0, scale = 1;
    bool fraction = false, digits = false;
    for (const char *c = text; *c; c++) {
        if (*c == '.' && !fraction) {
            fraction = true;
        } else if (*c >= '0' && *c <= '9') {
            digits = true;
            result = result * 10 + (*c - '0');
            scale *= fraction ? 10 : 1;
        } else {
            return false;
        }
    }
    result /= scale;
    if (!digits || !(result <= 1e15)) /* nor infinity over infinity */
        return false;
    *value = result;
    return true;
}

/* Seconds (or what `unit` ns make) within bounds. */
static uint64_t duration(const char *name, double unit, double fallback, double least, double most)
{
    double value = fallback;
    number(name, &value);
    value = value < least ? least : value > most ? most : value;
    return (uint64_t)(value * unit);
}

static void text(const char *name, const char *fallback, char *value, size_t size)
{
    const char *given = getenv(name);
    if (!given || !*given || strlen(given) >= size)
        given = fallback;
    memcpy(value, given, strlen(given) + 1);
}

/* What is recorded beside kernels: words, with commas between them. */
static void read_records(void)
{
    const char *const words[] = {"kernels", "calls", "copies", "driver", "waits"};
    bool given[] = {false, false, false, false, false};
    enum { WORDS = sizeof given / sizeof *given };
    const char *rest = getenv("GPU_HPC_AGENT_RECORDS");
    options.calls = options.waits = options.copies = true;
    if (!rest || !*rest)
        return;
    while (*rest) {
        size_t size = strcspn(rest, ","), i = 0;
        while (i < WORDS && (strlen(words[i]) != size || strncmp(rest, words[i], size) != 0))
            i++;
        if (i == WORDS)
            return;
        given[i] = true;
        rest += size + (rest[size] == ',');
    }
    options.driver_calls = given[3];
    options.calls = given[1] || given[3];
    options.waits = options.calls || given[4];
    options.copies = given[2];
}

static enum agent_mode read_mode(void)
{
    const char *mode = getenv("GPU_HPC_AGENT_MODE");
    if (mode && strcmp(mode, "continuous") == 0)
        return AGENT_MODE_CONTINUOUS;
    /* Whoever meant something else than these meant no tracing rather than some. */
    return !mode || !*mode || strcmp(mode, "duty") == 0 ? AGENT_MODE_DUTY : AGENT_MODE_OFF;
}

/* What identifies a job, a rank or a pod. Nothing that could be a secret. */
static const char *const SNAPSHOT[] = {
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "JOB_ID", "PBS_JOBID",
    "LSB_JOBID", "JOB_NAME", "WANDB_NAME", "KUBEFLOW_JOB_NAME", "KUBEFLOW_RUN_NAME", "RAY_JOB_NAME", "RAY_CLUSTER_NAME",
    "POD_NAME", "POD_NAMESPACE", "POD_UID", "CONTAINER_NAME", "HOSTNAME", "CUDA_VISIBLE_DEVICES",
};

static void take_snapshot(void)
{
    uint32_t used = 0;
    for (size_t i = 0; i < sizeof SNAPSHOT / sizeof *SNAPSHOT; i++) {
        const char *value = getenv(SNAPSHOT[i]);
        size_t name = strlen(SNAPSHOT[i]), size = value ? strlen(value) : 0;
        if (!value || size > 512 || used + name + size + 2 > AGENT_ENVIRONMENT)
            continue;
        char *entry = options.environment + used;
        memcpy(entry, SNAPSHOT[i], name);
        entry[name] = '=';
        memcpy(entry + name + 1, value, size + 1);
        used += (uint32_t)(name + size + 2);
    }
    options.environment_size = used;
}

void options_read(void)
{
    double value;
    memset(&options, 0, sizeof options);
    options.mode = read_mode();
    read_records();
    text("GPU_HPC_AGENT_DIRECTORY", "/run/gpu-hpc-exporter/agents", options.directory, sizeof options.directory);
    text("CUDA_HOME", "", options.cuda_home, sizeof options.cuda_home);
    options.budget = 0.01;
    options.has_budget = number("GPU_HPC_AGENT_BUDGET", &options.budget) && options.budget > 0;
    if (options.budget <= 0)
        options.budget = 0.01;
    options.window_ns = duration("GPU_HPC_AGENT_WINDOW_SECONDS", 1e9, 1, 0.001, 60);
    options.period_ns = duration("GPU_HPC_AGENT_PERIOD_SECONDS", 1e9, 10, 0.002, 3600);
    options.longest_period_ns = duration("GPU_HPC_AGENT_LONGEST_PERIOD_SECONDS", 1e9, 600, 0.002, 86400);
    options.flush_ns = duration("GPU_HPC_AGENT_FLUSH_SECONDS", 1e9, 0.25, 0.001, 10);
    options.drain_ns = duration("GPU_HPC_AGENT_DRAIN_SECONDS", 1e9, 30, 0.01, 600);
    options.attach_ns = UINT64_MAX;
    if (number("GPU_HPC_AGENT_ATTACH_SECONDS", &value))
        options.attach_ns = duration("GPU_HPC_AGENT_ATTACH_SECONDS", 1e9, 0, 0, 86400);
    options.resume_ns = UINT64_MAX;
    if (number("GPU_HPC_AGENT_RESUME_AFTER_PROFILER_MINUTES", &value))
        options.resume_ns = duration("GPU_HPC_AGENT_RESUME_AFTER_PROFILER_MINUTES", 60e9, 0, 0, 1e6);
    options.launch_cost_us = 4;
    options.node_cost_us = 1.5; /* the dearest machine of five: 1.03 of nodes of 3.5; two others: 0.2 */
    number("GPU_HPC_AGENT_LAUNCH_COST_MICROSECONDS", &options.launch_cost_us);
    number("GPU_HPC_AGENT_NODE_COST_MICROSECONDS", &options.node_cost_us);
    options.node_limit = UINT64_MAX;
    if (number("GPU_HPC_AGENT_NODE_RECORDS", &value))
        options.node_limit = (uint64_t)value;
    const char *nodes = getenv("GPU_HPC_AGENT_GRAPH_NODES"), *any = getenv("GPU_HPC_AGENT_ANY_VERSION");
    options.graph_nodes = !nodes || strcmp(nodes, "0") != 0;
    options.any_version = any && strcmp(any, "1") == 0;
    if (options.period_ns < options.window_ns)
        options.period_ns = options.window_ns;
    if (options.longest_period_ns < options.period_ns)
        options.longest_period_ns = options.period_ns;
    take_snapshot();
}
