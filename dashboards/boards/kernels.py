"""GPU kernels: what do the job's kernels, copies and waits do?"""

from __future__ import annotations

from boards.panels import (
    BAR,
    COLORED,
    Json,
    colored,
    column,
    dashboard,
    heatmap,
    latest,
    now,
    override,
    query,
    stat,
    state_timeline,
    steps,
    table,
    texts,
    timeseries,
    variable,
)
from boards.vocabulary import KERNELS, TO_JOB, TO_JOB_OF_SERIES

NODES = 'instance=~"$instance"'
GPU = f'{NODES},gpu=~"$gpu"'
JOBS = f'{GPU},job=~"$job"'
PAIR = "instance,gpu,job"
EACH = "{{instance}} GPU {{gpu}} {{job}}"
TRACED, DEVICE_TRACED = "gpu_hpc_kernel_traced_seconds_total", "gpu_hpc_kernel_device_traced_seconds_total"
"""Denominators: of what kernels, copies and calls add up to, and of the GPU's busy and idle time."""
INTERVAL, RANGE = "$__rate_interval", "$__range"

NO_AGENT = (
    "No kernel agent told of these jobs in this time: start a job with `gpu-hpc-exporter run -- COMMAND`; the panels "
    "below show which jobs have an agent and why one does not trace."
)
"""What a panel says instead of a zero."""
LONGEST_GAP_MS = 20 * 60 * 1000
"""Agents whose budget is small look once in 10 minutes: lines go on until the look after the next is due."""

CATEGORIES = {
    "gemm": "#37872d",
    "attention": "#73bf69",
    "convolution": "#96d98d",
    "reduction": "#5794f2",
    "elementwise": "#8ab8ff",
    "optimizer": "#b877d9",
    "communication": "#f2495c",
    "copy": "#ff9830",
    "generated": "#fade2a",
    "other": "#8e8e8e",
    "not told apart": "#565c66",
}
"""What kernels do. The last: all of them, on a node with more jobs than are told by category."""
WHY_IDLE = {"ran": "#37872d", "host": "#f2495c", "queue": "#ff9830", "other": "#8e8e8e"}
PATTERNS = {
    "many_short": ("many short: launch less", "orange"),
    "few_long": ("few long: look inside with ncu", "blue"),
    "jittery": ("jittery: what disturbs it?", "red"),
    "contended": ("contended: other jobs take SMs", "red"),
}
AGENT_STATES = {"tracing": "green", "waiting": "blue", "paused": "orange", "off": "#8e8e8e"}


def build() -> Json:
    """The dashboard."""
    return dashboard(
        KERNELS,
        "GPU kernels",
        "What kernels, copies and waits of jobs with the kernel agent do. Of several chosen GPUs or jobs the panels "
        "show the mean of their processes, where they do not name each.",
        [
            variable("instance", "Node", "label_values(gpu_hpc_gpu_info, instance)", multi=True, allValue=".+"),
            variable("gpu", "GPU", f"label_values(gpu_hpc_gpu_info{{{NODES}}}, gpu)", multi=True, allValue=".+"),
            variable("job", "Job", f"label_values(gpu_hpc_job_info{{{GPU}}}, job)", multi=True, allValue=".+"),
        ],
        [
            (
                3,
                [
                    *((3, _said(panel)) for panel in (_ran(), _waited_for_host(), _queued(), _host_waited())),
                    *((3, _said(panel)) for panel in (_exposed(), _launch_rate(), _mean_length())),
                    (3, _coverage()),
                ],
            ),
            (11, [(24, _said(_top()))]),
            (9, [(12, _said(_device_time())), (12, _said(_categories()))]),
            (8, [(12, _said(_durations())), (12, _said(_queue()))]),
            (8, [(12, _said(_launches())), (12, _said(_logarithmic(_lengths())))]),
            (8, [(12, _said(_host_time())), (12, _said(_overlap()))]),
            (8, [(8, _said(_copied_bytes())), (8, _said(_copies())), (8, _said(_logarithmic(_copy_sizes(), base=2)))]),
            (8, [(12, _said(_jitter())), (12, _said(_graphs()))]),
            (8, [(12, _said(_ran_of_each())), (12, _jobs_with_agent())]),
            (8, [(10, _libraries()), (14, _agents())]),
            (8, [(8, _reasons()), (8, _records()), (8, _costs())]),
        ],
    )


def _said(panel: Json) -> Json:
    """The panel says why it is empty, and its lines bridge the time between two looks of an agent."""
    defaults = {**panel["fieldConfig"]["defaults"], "noValue": NO_AGENT if panel["type"] != "stat" else "no agent"}
    if panel["type"] == "timeseries":
        defaults["custom"] = {**defaults["custom"], "spanNulls": LONGEST_GAP_MS}
    return {**panel, "fieldConfig": {**panel["fieldConfig"], "defaults": defaults}}


def _logarithmic(panel: Json, base: int = 10) -> Json:
    """Lines that are far apart, on one axis."""
    custom = {**panel["fieldConfig"]["defaults"]["custom"], "fillOpacity": 0}
    custom["scaleDistribution"] = {"type": "log", "log": base}
    defaults = {name: value for name, value in panel["fieldConfig"]["defaults"].items() if name != "min"}
    defaults["custom"] = custom
    return {**panel, "fieldConfig": {**panel["fieldConfig"], "defaults": defaults}}


def _sum(counter: str, by: str = "", more: str = "", span: str = INTERVAL) -> str:
    """How much a counter rose, of all that is chosen together: a second, or within the time range."""
    function = "rate" if span == INTERVAL else "increase"
    labels = f" by({by})" if by else ""
    return f"sum{labels} ({function}({counter}{{{JOBS}{more}}}[{span}]))"


def _seen(counter: str, by: str = "", more: str = "", span: str = INTERVAL, over: str = TRACED) -> str:
    """The same per second that agents looked."""
    match = " on() group_left()" if by else ""
    return f"{_sum(counter, by, more, span)} /{match} ({_sum(over, span=span)} > 0)"


def _ratio(counter: str, by_counter: str, by: str = "", more: str = "", span: str = INTERVAL) -> str:
    return f"{_sum(counter, by, more, span)} / ({_sum(by_counter, by, more, span)} > 0)"


def _waits(span: str) -> str:
    """Host time in waits for the GPU: synchronisation, and calls that copy from or to pageable memory."""
    function = "rate" if span == INTERVAL else "increase"
    calls = f'{function}(gpu_hpc_copy_api_seconds_total{{{JOBS},memory="pageable"}}[{span}])'
    return f"sum ({function}(gpu_hpc_sync_seconds_total{{{JOBS}}}[{span}]) or {calls})"


def _communication_alone(span: str) -> str:
    communication = _sum("gpu_hpc_kernel_activity_seconds_total", more=',activity="communication"', span=span)
    return f"clamp_min({communication} - {_sum('gpu_hpc_kernel_overlap_seconds_total', span=span)}, 0)"


# Figures of the whole time range


def _ran() -> Json:
    return stat(
        "GPU ran",
        "Share of the time in which any kernel or copy of a process ran on the GPU, however hard. Where it is low, "
        "see what it waited for.",
        "percentunit",
        latest(_seen("gpu_hpc_kernel_busy_seconds_total", span=RANGE, over=DEVICE_TRACED)),
        decimals=0,
        thresholds=steps((None, "red"), (0.5, "orange"), (0.8, "green")),
    )


def _waited_for_host() -> Json:
    return stat(
        "It waited for the host",
        "Share of the time in which nothing ran since nothing had been launched: input, Python, launches, or waits of "
        "the host. Look at the host's time below.",
        "percentunit",
        latest(_seen("gpu_hpc_kernel_idle_seconds_total", more=',reason="host"', span=RANGE, over=DEVICE_TRACED)),
        decimals=0,
        thresholds=steps((None, "green"), (0.2, "orange"), (0.5, "red")),
    )


def _queued() -> Json:
    return stat(
        "Launch to start",
        "Mean time from a launch call's return to the kernel's start. Long on a busy GPU is good, the host is ahead; "
        "from 10 ms on an idle one streams or events hold work up.",
        "s",
        latest(_ratio("gpu_hpc_kernel_queue_seconds_sum", "gpu_hpc_kernel_queue_seconds_count", span=RANGE)),
        thresholds=steps((None, "text"), (0.01, "orange")),
    )


def _host_waited() -> Json:
    return stat(
        "Host waited for GPU",
        "Share of the time in synchronisation and in copies from or to pageable memory, of all threads together, "
        "so it may pass 100 %. Where the GPU ran most of the time that is well; else look for .item(), .cpu() and "
        "tensors made on the CPU.",
        "percentunit",
        latest(f"{_waits(RANGE)} / ({_sum(TRACED, span=RANGE)} > 0)"),
        decimals=0,
        thresholds=steps((None, "green"), (0.1, "orange")),
    )


def _exposed() -> Json:
    activity = _sum("gpu_hpc_kernel_activity_seconds_total", more=',activity=~"compute|communication"', span=RANGE)
    either = f"({activity} - {_sum('gpu_hpc_kernel_overlap_seconds_total', span=RANGE)} > 0)"
    return stat(
        "Exposed communication",
        "Communication beside which nothing computed, as a share of the time in which kernels ran. Overlap it, move "
        "less, or find the slow rank that the others wait for.",
        "percentunit",
        latest(f"{_communication_alone(RANGE)} / {either}"),
        decimals=0,
        thresholds=steps((None, "green"), (0.15, "orange"), (0.3, "red")),
    )


def _launch_rate() -> Json:
    return stat(
        "Launches",
        "Kernels launched one by one, outside CUDA graphs, a second and process. Above some ten thousand a second the "
        "host can hardly follow: CUDA graphs, torch.compile, fused optimizers.",
        "cps",
        latest(_seen("gpu_hpc_kernel_launches_total", span=RANGE)),
        thresholds=steps((None, "text")),
    )


def _mean_length() -> Json:
    return stat(
        "Mean kernel",
        "Mean length of an execution, those in CUDA graphs included. Below some 10 us a kernel takes no longer than "
        "its launch: fuse, or launch graphs.",
        "s",
        latest(_ratio("gpu_hpc_kernel_duration_seconds_sum", "gpu_hpc_kernel_duration_seconds_count", span=RANGE)),
        thresholds=steps((None, "text")),
    )


def _with_processes(by: str) -> str:
    return f"(max by({by}) (gpu_hpc_job_processes{{{JOBS}}}) > 0)"


def _with_agent(by: str) -> str:
    return f"{_with_processes(by)} and on({by}) max by({by}) ({TRACED}{{{JOBS}}})"


def _coverage() -> Json:
    return stat(
        "Jobs with an agent",
        "Share of the jobs that run on the chosen GPUs now whose kernels are seen; of the others these panels know "
        "nothing. `gpu-hpc-exporter run -- COMMAND` starts a job with an agent.",
        "percentunit",
        latest(f"(count({_with_agent(PAIR)}) or vector(0)) / (count({_with_processes(PAIR)}) > 0)"),
        decimals=0,
        thresholds=steps((None, "orange"), (1, "green")),
        noValue="no job",
    )


# Which kernels


def _top() -> Json:
    by = "job,kernel"
    executions = _sum("gpu_hpc_kernel_executions_total", by, span=RANGE)
    seconds = _sum("gpu_hpc_kernel_seconds_total", by, span=RANGE)
    mean = f"{seconds} / ({executions} > 0)"
    deviation = f"sqrt({_sum('gpu_hpc_kernel_seconds_squared_total', by, span=RANGE)} / ({executions} > 0))"
    of_job = "on(job) group_left()"
    traced = f"({_sum(TRACED, 'job', span=RANGE)} > 0)"
    pattern = f"count_over_time(gpu_hpc_kernel_pattern{{{JOBS}}}[{RANGE}])"
    return table(
        "Kernels with the most GPU time",
        "The busiest kernels of each job, a second and process on its chosen GPUs; other is all the rest. Begin with "
        "the first: Pattern says what is odd and what helps, and a Spread (deviation of equal executions as a share "
        "of their mean) above 1 that something disturbs it.",
        [
            column("job", "Job", links=[TO_JOB]),
            column("kernel", "Kernel"),
            column("category", "Does"),
            column(
                "Value #A",
                "Of the job's kernel time",
                "percentunit",
                decimals=1,
                min=0,
                max=1,
                custom__cellOptions=BAR,
                color={"mode": "fixed", "fixedColor": "blue"},
            ),
            column("Value #B", "Executions", "cps"),
            column("Value #C", "Launches", "cps"),
            column("Value #D", "Mean", "s"),
            column("Value #E", "Longest", "s"),
            column("Value #F", "Launch to start", "s"),
            column(
                "Value #G",
                "Spread",
                decimals=2,
                thresholds=steps((None, "text"), (1, "red")),
                custom__cellOptions=COLORED,
            ),
            column("pattern", "Pattern", mappings=texts(PATTERNS), custom__cellOptions=COLORED),
        ],
        "Of the job's kernel time",
        now(
            f"{_sum('gpu_hpc_kernel_seconds_total', 'job,kernel,category', span=RANGE)} / {of_job} "
            f"({_sum('gpu_hpc_kernel_seconds_total', 'job', span=RANGE)} > 0)"
        ),
        now(f"{executions} / {of_job} {traced}"),
        now(f"{_sum('gpu_hpc_kernel_launches_total', by, span=RANGE)} / {of_job} {traced}"),
        now(mean),
        now(f"max by({by}) (max_over_time(gpu_hpc_kernel_max_seconds{{{JOBS}}}[{RANGE}]))"),
        now(f"avg by({by}) (avg_over_time(gpu_hpc_kernel_launch_latency_ms{{{JOBS}}}[{RANGE}])) / 1000"),
        now(f"{deviation} / ({mean} > 0)"),
        now(f"topk by({by}) (1, sum by({by},pattern) ({pattern}))"),
    )


# Where the time went


def _device_time() -> Json:
    return timeseries(
        "Where the GPU's time went",
        "ran: a kernel or copy of the process ran. host: nothing had been launched. queue: something was, and waited "
        "for other work. other: the launch of what came next is not known. They add up to 100 %.",
        "percentunit",
        query(_seen("gpu_hpc_kernel_busy_seconds_total", over=DEVICE_TRACED), "ran"),
        query(_seen("gpu_hpc_kernel_idle_seconds_total", "reason", over=DEVICE_TRACED), "{{reason}}"),
        stack=True,
        max=1,
        overrides=colored(WHY_IDLE),
    )


def _categories() -> Json:
    kinds = _seen("gpu_hpc_kernel_duration_seconds_sum", "category")
    return timeseries(
        "Kernel time by what kernels do",
        "Seconds of kernels a second; above 100 % kernels run side by side. Much elementwise and reduction: fuse, "
        "much copy: layouts that do not fit; on a node with more than 8 traced jobs they are not told apart.",
        "percentunit",
        query(f'label_replace({kinds}, "category", "not told apart", "category", "")', "{{category}}"),
        stack=True,
        overrides=colored(CATEGORIES),
    )


def _buckets(histogram: str) -> str:
    rows = _sum(f"{histogram}_bucket", "le", ',le!="+Inf"')
    return f"{rows} / on() group_left() ({_sum(f'{histogram}_count')} > 0)"


def _durations() -> Json:
    return heatmap(
        "How long kernels take",
        "Share of the executions by their length. Two bands are two kinds of work; most below 8 us is launch-bound "
        "work, most above 4 ms is worth a look with ncu.",
        _buckets("gpu_hpc_kernel_duration_seconds"),
        unit="s",
        cells="percentunit",
    )


def _queue() -> Json:
    return heatmap(
        "How long kernels wait from launch to start",
        "Share of the launches by the time from the call's return to the start. A few us: the GPU waits for launches. "
        "Milliseconds: the host is ahead of a busy GPU, or work is held up. Needs CUPTI 12.5.",
        _buckets("gpu_hpc_kernel_queue_seconds"),
        unit="s",
        cells="percentunit",
    )


def _launches() -> Json:
    return timeseries(
        "Kernels a second",
        "Executions: all. Launches: those one by one, outside CUDA graphs, which each cost the host a few us. Far "
        "more executions than launches is a job that uses graphs.",
        "cps",
        query(_seen("gpu_hpc_kernel_executions_total"), "executions"),
        query(_seen("gpu_hpc_kernel_launches_total"), "launches"),
    )


def _lengths() -> Json:
    kinds = _ratio("gpu_hpc_kernel_duration_seconds_sum", "gpu_hpc_kernel_duration_seconds_count", "category")
    return timeseries(
        "Mean length of kernels",
        "By what they do. Kernels that grow longer while their number stays wait for memory, clocks or another job.",
        "s",
        query(f'label_replace({kinds}, "category", "not told apart", "category", "")', "{{category}}"),
        overrides=colored(CATEGORIES),
    )


def _host_time() -> Json:
    calls = "gpu_hpc_copy_api_seconds_total"
    return timeseries(
        "Host time in CUDA",
        "Share of the time in launch calls, in copy calls (those of pageable memory wait for the copy inside) and in "
        "waits for events, streams and contexts; of all threads together, so it may pass 100 %. The rest is the "
        "program's own.",
        "percentunit",
        query(_seen("gpu_hpc_launch_api_seconds_total"), "launch calls"),
        query(_seen(calls, "memory"), "copy calls, {{memory}}"),
        query(_seen("gpu_hpc_sync_seconds_total", "call"), "wait for {{call}}"),
        stack=True,
        overrides=colored(
            {
                "launch calls": "#5794f2",
                "copy calls, pinned": "#fade2a",
                "copy calls, pageable": "#ff9830",
                "copy calls, device": "#b877d9",
                "wait for stream": "#f2495c",
                "wait for event": "#c4162a",
                "wait for context": "#e0b400",
                "wait for unknown": "#8e8e8e",
            }
        ),
    )


def _overlap() -> Json:
    alone = f"{_communication_alone(INTERVAL)} / ({_sum(DEVICE_TRACED)} > 0)"
    return timeseries(
        "Compute, communication, copies",
        "Share of the time in which each ran; hidden communication ran beside compute. The exposed rest ran while "
        "nothing computed, and is what more overlap would win.",
        "percentunit",
        query(_seen("gpu_hpc_kernel_activity_seconds_total", "activity", over=DEVICE_TRACED), "{{activity}}"),
        query(_seen("gpu_hpc_kernel_overlap_seconds_total", over=DEVICE_TRACED), "hidden communication"),
        query(alone, "exposed communication"),
        max=1,
        overrides=colored(
            {
                "compute": "#37872d",
                "communication": "#ff9830",
                "hidden communication": "#73bf69",
                "exposed communication": "#f2495c",
                "copy": "#5794f2",
            }
        ),
    )


# Copies

COPIES = "{{direction}} {{memory}}"
COPY_COLORS = {
    "h2d pinned": "#5794f2",
    "h2d pageable": "#f2495c",
    "d2h pinned": "#8ab8ff",
    "d2h pageable": "#ff9830",
    "d2d device": "#73bf69",
    "p2p device": "#b877d9",
}


def _copied_bytes() -> Json:
    return timeseries(
        "Bytes copied",
        "By direction and where the host's side lies. Pageable ones are slow and block: pin_memory=True and "
        "non_blocking=True.",
        "Bps",
        query(_seen("gpu_hpc_memcpy_bytes_sum", "direction,memory"), COPIES),
        overrides=colored(COPY_COLORS),
    )


def _copies() -> Json:
    return timeseries(
        "Copies",
        "How many a second. Hundreds of small ones from host to GPU are tensors made on the CPU in the loop: create "
        "them with device=.",
        "cps",
        query(_seen("gpu_hpc_memcpy_bytes_count", "direction,memory"), COPIES),
        overrides=colored(COPY_COLORS),
    )


def _copy_sizes() -> Json:
    return timeseries(
        "Mean size of a copy",
        "Below 64 KiB a copy costs its call rather than its bytes: put several into one.",
        "bytes",
        query(_ratio("gpu_hpc_memcpy_bytes_sum", "gpu_hpc_memcpy_bytes_count", "direction,memory"), COPIES),
        overrides=colored(COPY_COLORS),
    )


# What is odd


def _jitter() -> Json:
    executions = _sum("gpu_hpc_kernel_executions_total", "kernel")
    deviation = f"sqrt({_sum('gpu_hpc_kernel_seconds_squared_total', 'kernel')} / ({executions} > 0))"
    mean = f"({_ratio('gpu_hpc_kernel_seconds_total', 'gpu_hpc_kernel_executions_total', 'kernel')} > 0)"
    return timeseries(
        "Spread of equal executions",
        "Deviation of executions of equal name, grid and block as a share of their mean, the 8 worst kernels. Above "
        "1: another job on the GPU, changing clocks, or memory of the host or another GPU.",
        "none",
        query(f"topk(8, {deviation} / {mean})", "{{kernel}}"),
        decimals=2,
    )


def _graphs() -> Json:
    return timeseries(
        "Launches of CUDA graphs",
        "Traced: the kernels inside are seen. Untraced: they are in none of these panels, since the agent's limit for "
        "graph nodes is reached or CUPTI tells of none.",
        "cps",
        query(_seen("gpu_hpc_graph_launches_total", "nodes"), "{{nodes}}"),
        overrides=colored({"traced": "#73bf69", "untraced": "#ff9830"}),
    )


def _ran_of_each() -> Json:
    busy = _sum("gpu_hpc_kernel_busy_seconds_total", PAIR)
    return state_timeline(
        "GPU ran, each GPU and job",
        "Share of the time in which a kernel or copy of the job ran: a rank that differs from the others has other "
        "work, or waits.",
        "percentunit",
        query(f"{busy} / ({_sum(DEVICE_TRACED, PAIR)} > 0)", EACH),
        decimals=0,
        min=0,
        max=1,
        thresholds=steps((None, "#80808022"), (0.01, "#c7e9c0"), (0.3, "#74c476"), (0.5, "#238b45"), (0.85, "#00441b")),
        links=[TO_JOB_OF_SERIES],
    )


# How the agents are


def _jobs_with_agent() -> Json:
    return state_timeline(
        "Which jobs have an agent",
        "Jobs with processes on the GPU. One without an agent is in no panel above: start it with `gpu-hpc-exporter "
        "run -- COMMAND`.",
        "none",
        query(f"({_with_agent(PAIR)}) * 0 + 1 or on({PAIR}) {_with_processes(PAIR)} * 0", EACH),
        mappings=texts({"1": ("has an agent", "green"), "0": ("no agent", "#565c66")}),
        links=[TO_JOB_OF_SERIES],
        noValue="No job had processes on these GPUs in this time.",
    )


def _libraries() -> Json:
    last = f"last_over_time(gpu_hpc_process_library_info{{{JOBS}}}[{RANGE}])"
    panel = table(
        "Libraries of the jobs",
        "What the processes of each job have loaded, and on how many GPUs. Two versions of one library in a job are "
        "worth a look. Known with or without an agent.",
        [
            column("job", "Job", links=[TO_JOB]),
            column("library", "Library"),
            column("version", "Version"),
            column("Value", "GPUs", decimals=0),
        ],
        "Job",
        now(f"count by(job,library,version) (max by({PAIR},library,version) ({last}))"),
        ascending=True,
    )
    panel["fieldConfig"]["defaults"]["noValue"] = (
        "The exporter may not read these processes' files: it needs their user, or CAP_SYS_PTRACE."
    )
    return panel


def _agents() -> Json:
    return timeseries(
        "Agents of the node",
        "Processes by the state of their agent (tracing and waiting are well), and those that have none, as where only "
        "their launcher has one; beside all that use a GPU. A process counts on each of its GPUs, an agent once.",
        "short",
        query(f"sum by(state) (avg_over_time(gpu_hpc_agents{{{NODES}}}[{INTERVAL}]))", "{{state}}"),
        query(f"sum(gpu_hpc_processes_without_agent{{{NODES}}})", "without"),
        query(f"sum(gpu_hpc_gpu_processes{{{NODES}}})", "GPU processes"),
        stack=True,
        decimals=0,
        noValue="No agent has told the exporter anything: see agent.directory in its configuration.",
        overrides=[
            *colored({**AGENT_STATES, "without": "#e0b400"}),
            override(
                "GPU processes",
                color={"mode": "fixed", "fixedColor": "text"},
                custom__stacking={"mode": "none", "group": "A"},
                custom__lineWidth=1,
                custom__fillOpacity=0,
                custom__lineStyle={"fill": "dash", "dash": [8, 8]},
            ),
        ],
    )


def _reasons() -> Json:
    return state_timeline(
        "Why agents do not trace",
        "Or trace less. Normal: no_context (CUDA has not begun), profiler, budget, configured, stopped. The runbook "
        "of GpuHpcAgentPaused says what to do about the others.",
        "none",
        query(f"max by(instance,reason) (gpu_hpc_agent_pause_info{{{NODES}}})", "{{instance}} {{reason}}"),
        mappings=texts({"1": ("yes", "orange")}),
        noValue="No agent has a reason: all trace as they were told, or there is none.",
    )


def _records() -> Json:
    records = f"rate(gpu_hpc_agent_records_total{{{NODES}}}[{INTERVAL}])"
    lost = f'rate(gpu_hpc_agent_records_total{{{NODES},result!="kept"}}[{INTERVAL}])'
    return _said(
        timeseries(
            "Records that agents could not use",
            "As a share of all. dropped: lost, sums are too small, or of no use. invalid: impossible times. "
            "unmatched: a launch or a kernel without the other half, which only launch to start misses.",
            "percentunit",
            query(f"sum by(result) ({lost}) / on() group_left() (sum ({records}) > 0)", "{{result}}"),
            overrides=colored({"dropped": "#f2495c", "invalid": "#c4162a", "unmatched": "#fade2a"}),
        )
    )


def _costs() -> Json:
    return _said(
        timeseries(
            "What agents cost",
            "Overhead: the largest share of a process's time, by the agent's own model of its calls. Slowdown: what a "
            "GPU gets less done while an agent traces there, as measured, the worst of those chosen (0 where it seems "
            "faster).",
            "percentunit",
            query(f"max(gpu_hpc_agent_overhead_ratio{{{NODES}}})", "overhead"),
            query(f"clamp_min(max(gpu_hpc_kernel_agent_slowdown_ratio{{{GPU}}}), 0)", "slowdown"),
            decimals=2,
        )
    )
