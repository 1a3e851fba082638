"""The file as the tests (and the exporter) read it is the file as the agent writes it; CUPTI's records as NVIDIA's."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from cupti_host import wheel_file
from fake_activity import AGENT_SOURCE, agent_file, compile_c
from fake_activity.agent_file import Copies, Device, File, Header, Interval, Kernel

MIRRORS: Final[dict[str, type[ctypes.Structure]]] = {
    "agent_interval": Interval,
    "agent_copies": Copies,
    "agent_device": Device,
    "agent_kernel": Kernel,
    "agent_header": Header,
    "agent_file": File,
}


def probe(folder: Path, text: str, *flags: str) -> dict[str, int]:
    """What a C program of these lines prints: names and numbers."""
    source, program = folder / "probe.c", folder / "probe"
    source.write_text(text, "utf-8")
    compile_c(program, str(source), "-std=c11", "-Wall", *flags)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: int(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_every_field_lies_where_the_header_says(tmp_path: Path) -> None:
    """Sizes and offsets of all structures."""
    expected: dict[str, int] = {}
    for name, mirror in MIRRORS.items():
        expected[f"struct {name}"] = ctypes.sizeof(mirror)
        fields: Any = mirror._fields_
        expected |= {f"{name}.{field}": getattr(mirror, field).offset for field, *_ in fields}
    lines = [
        f'printf("%s %zu\\n", "{name}", sizeof({name}));'
        if name.startswith("struct ")
        else 'printf("{0}.{1} %zu\\n", offsetof(struct {0}, {1}));'.format(*name.split("."))
        for name in expected
    ]
    text = '#include <stdio.h>\n#include "layout.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n"
    assert probe(tmp_path, text, f"-I{AGENT_SOURCE}") == expected


def test_states_and_reasons_have_the_header_s_numbers() -> None:
    """The names are the header's, in lower case."""
    text = (AGENT_SOURCE / "layout.h").read_text("utf-8")
    reasons = {name: int(value) for name, value in re.findall(r"AGENT_REASON_(\w+) = (\d+)", text)}
    states = dict(re.findall(r"AGENT_(WAITING|TRACING|PAUSED|OFF) = (\d)", text))
    assert reasons == {reason.name: reason.value for reason in agent_file.Reason}
    assert {name: int(value) for name, value in states.items()} == {s.name: s.value for s in agent_file.State}


RECORDS: Final = {
    "KERNEL": (
        "CUpti_ActivityKernel9",
        {
            "START": "start",
            "END": "end",
            "DEVICE": "deviceId",
            "CONTEXT": "contextId",
            "STREAM": "streamId",
            "GRID": "gridX",
            "BLOCK": "blockX",
            "CORRELATION": "correlationId",
            "NAME": "name",
            "GRAPH_NODE": "graphNodeId",
        },
    ),
    "MEMCPY": (
        "CUpti_ActivityMemcpy5",
        {
            "COPY_KIND": "copyKind",
            "SOURCE": "srcKind",
            "DESTINATION": "dstKind",
            "BYTES": "bytes",
            "START": "start",
            "END": "end",
            "DEVICE": "deviceId",
            "CORRELATION": "correlationId",
            "GRAPH_NODE": "graphNodeId",
        },
    ),
    "MEMCPY2": ("CUpti_ActivityMemcpyPtoP4", {"CORRELATION": "correlationId", "GRAPH_NODE": "graphNodeId"}),
    "MEMSET": (
        "CUpti_ActivityMemset4",
        {"BYTES": "bytes", "START": "start", "END": "end", "DEVICE": "deviceId", "GRAPH_NODE": "graphNodeId"},
    ),
    "SYNC": (
        "CUpti_ActivitySynchronization",
        {"TYPE": "type", "START": "start", "END": "end", "CONTEXT": "contextId"},
    ),
    "API": (
        "CUpti_ActivityAPI",
        {"CBID": "cbid", "START": "start", "END": "end", "THREAD": "threadId", "CORRELATION": "correlationId"}
        | {"RESULT": "returnValue"},
    ),
}
"""The oldest structure of each kind whose fields we read; a prefix of all later ones."""
SAME_PREFIX: Final = {"MEMCPY2": {"COPY_KIND", "SOURCE", "DESTINATION", "BYTES", "START", "END", "DEVICE"}}
NEWEST: Final = {
    "CUpti_ActivityKernel9": "CUpti_ActivityKernel11",
    "CUpti_ActivityMemcpy5": "CUpti_ActivityMemcpy6",
    "CUpti_ActivitySynchronization": "CUpti_ActivitySynchronization2",
}
CONSTANTS: Final = {
    "CUPTI_SUBSCRIBER_TAKEN": "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    "ATTRIBUTE_HOST_PINNED": "CUPTI_ACTIVITY_ATTR_MEM_ALLOCATION_TYPE_HOST_PINNED",
    "MEMORY_KIND_PINNED": "CUPTI_ACTIVITY_MEMORY_KIND_PINNED",
    "AGENT_SYNC_EVENT": "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE",
    "AGENT_SYNC_STREAM_WAIT_EVENT": "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT",
    "AGENT_SYNC_STREAM": "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE",
    "AGENT_SYNC_CONTEXT": "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE",
    **{
        f"KIND_{name}": f"CUPTI_ACTIVITY_KIND_{name}"
        for name in ("MEMCPY", "MEMSET", "DRIVER", "RUNTIME", "CONCURRENT_KERNEL", "MEMCPY2", "SYNCHRONIZATION")
    },
    **{
        f"MEMCPY_{name}": f"CUPTI_ACTIVITY_MEMCPY_KIND_{name}"
        for name in ("HTOD", "DTOH", "HTOA", "ATOH", "ATOA", "ATOD", "DTOA", "DTOD", "PTOP")
    },
}
CALLS: Final = {
    "CALL_LAUNCH": {
        *("cudaLaunchKernel_v7000", "cudaLaunchKernel_ptsz_v7000", "cudaLaunchCooperativeKernel_v9000"),
        *("cudaLaunchCooperativeKernel_ptsz_v9000", "cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC_ptsz_v11060"),
        *("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz"),
        *("cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"),
    },
    "CALL_GRAPH": {"cudaGraphLaunch_v10000", "cudaGraphLaunch_ptsz_v10000", "cuGraphLaunch", "cuGraphLaunch_ptsz"},
    "CALL_CAPTURE": {
        *("cudaStreamBeginCapture_v10000", "cudaStreamBeginCapture_ptsz_v10000", "cudaStreamEndCapture_v10000"),
        *("cudaStreamEndCapture_ptsz_v10000", "cuStreamBeginCapture", "cuStreamBeginCapture_ptsz"),
        *("cuStreamBeginCapture_v2", "cuStreamBeginCapture_v2_ptsz", "cuStreamEndCapture", "cuStreamEndCapture_ptsz"),
    },
    "CALL_COPY": {
        *("cudaMemcpy_v3020", "cudaMemcpy_ptds_v7000", "cudaMemcpyAsync_v3020", "cudaMemcpyAsync_ptsz_v7000"),
        *("cuMemcpyHtoD_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2"),
    },
    "CALL_SYNC_EVENT": {"cudaEventSynchronize_v3020", "cuEventSynchronize"},
    "CALL_SYNC_STREAM": {
        *("cudaStreamSynchronize_v3020", "cudaStreamSynchronize_ptsz_v7000"),
        *("cuStreamSynchronize", "cuStreamSynchronize_ptsz"),
    },
    "CALL_SYNC_CONTEXT": {
        *("cudaThreadSynchronize_v3020", "cudaDeviceSynchronize_v3020", "cudaExecutionCtxSynchronize_v13010"),
        *("cuCtxSynchronize", "cuCtxSynchronize_v2"),
    },
}


def test_the_mirror_is_nvidia_s(tmp_path: Path, cupti_headers: tuple[str, list[str]]) -> None:
    """Offsets, constants and function ids against the headers of the oldest and the newest proven version."""
    distribution, flags = cupti_headers
    lines, names = [], set()
    for kind, (record, fields) in RECORDS.items():
        newest = NEWEST.get(record, record) if distribution == "nvidia-cuda-cupti" else record
        for ours, theirs in fields.items():
            names.add(f"{kind}_{ours}")
            lines += [f"SAME({kind}_{ours}, offsetof({version}, {theirs}))" for version in {record, newest}]
            lines.append(f"CHECK(offsetof({record}, {theirs}) + sizeof((({record} *)0)->{theirs}) <= {kind}_NEEDS)")
        lines.append(f"CHECK({kind}_NEEDS <= sizeof({record}))")
    for ours in SAME_PREFIX["MEMCPY2"]:
        theirs = RECORDS["MEMCPY"][1][ours]
        lines.append(f"SAME(MEMCPY_{ours}, offsetof(CUpti_ActivityMemcpyPtoP4, {theirs}))")
    lines += [f"SAME({ours}, {theirs})" for ours, theirs in CONSTANTS.items()]
    for domain, kind in (("RUNTIME", "KIND_RUNTIME"), ("DRIVER", "KIND_DRIVER")):
        header = next(Path(flag[2:]) for flag in flags if (Path(flag[2:]) / "cupti.h").exists())
        text = (header / f"cupti_{domain.lower()}_cbid.h").read_text("utf-8")
        for name, number in re.findall(rf"CUPTI_{domain}_TRACE_CBID_(\w+?) += (\d+),", text):
            call = next((call for call, members in CALLS.items() if name in members), "CALL_OTHER")
            lines.append(f"SAME(api_call_of({kind}, {number}), {call})")
    source = f"""
    #include <stddef.h>
    #include <stdio.h>
    #include <cuda.h>
    #include <cupti_activity.h>
    #include "cupti.h"
    static int wrong;
    #define SAME(ours, theirs) if ((long)(ours) != (long)(theirs)) wrong++, puts(#ours " " #theirs);
    #define CHECK(condition) if (!(condition)) wrong++, puts(#condition);
    uint64_t realtime_ns(void) {{ return 0; }}
    int main(void) {{ {" ".join(lines)} printf("wrong %d\\n", wrong); }}
    """
    file, program = tmp_path / "probe.c", tmp_path / "probe"
    file.write_text(source, "utf-8")
    mirror = tmp_path / "ours"
    mirror.mkdir()
    # Our cupti.h and theirs have one name: theirs is never included, only what is inside.
    (mirror / "cupti.h").write_text((AGENT_SOURCE / "cupti.h").read_text("utf-8"), "utf-8")
    (mirror / "layout.h").write_text((AGENT_SOURCE / "layout.h").read_text("utf-8"), "utf-8")
    (mirror / "agent.h").write_text((AGENT_SOURCE / "agent.h").read_text("utf-8"), "utf-8")
    compile_c(program, "-std=c11", f"-I{mirror}", *flags, str(file), str(AGENT_SOURCE / "cupti.c"), "-ldl")
    result = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert result == "wrong 0\n"
    defined = set(re.findall(r"\b((?:KERNEL|MEMCPY2?|MEMSET|SYNC|API)_\w+) = ", (mirror / "cupti.h").read_text()))
    constants = {name for name in CONSTANTS if name.startswith("MEMCPY_")}
    needs = {f"{kind}_NEEDS" for kind in RECORDS}
    assert defined - constants - needs == names


@pytest.fixture(params=["nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti"])
def cupti_headers(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[str]]:
    """The distribution, and compiler flags that find its headers without the rest of the CUDA toolkit."""
    stub = tmp_path / "stub"
    stub.mkdir()
    types = "typedef struct stream *cudaStream_t; typedef struct event *cudaEvent_t; typedef int cudaError_t;"
    (stub / "builtin_types.h").write_text(types + " typedef struct { unsigned x, y, z; } dim3;\n", "utf-8")
    folders = [
        stub,
        wheel_file(request.param, "cupti.h").parent,
        wheel_file("nvidia-cuda-runtime-cu12", "cuda.h").parent,
    ]
    return request.param, [f"-I{folder}" for folder in folders]
