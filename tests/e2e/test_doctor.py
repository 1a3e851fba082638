"""`doctor` as a user types it, on machines of the tests' own making: a root, the fake libraries, real processes.

pytest tests/e2e/test_doctor.py --update-golden
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

import fake_cupti
import fake_nvml
from agent_files import AgentWriter
from doctor_machine import CUPTI, DoctorMachine
from exporter_process import run_exporter
from fake_kubelet import Container, FakeKubelet, Pod
from gpu_hpc_exporter.sources.kernels import layout
from proc_tree import ProcTree
from web_files import PASSWORD, WITH_CLIENTS, WITH_TLS, basic, make_site, with_users

GOLDEN = Path(__file__).parent.parent / "golden/doctor"
NVML = "device 0 sm 0.5 dram 0.25\n"
UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
UNPRIVILEGED = (
    ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"] if os.geteuid() == 0 else []
)
"""Even root may then open no more than its files' modes allow."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both fakes in one directory, as drivers have it."""
    return fake_cupti.build(fake_nvml.build(tmp_path_factory.mktemp("fakes")))


@pytest.fixture
def machine(tmp_path: Path) -> DoctorMachine:
    """A Linux host without a GPU."""
    return DoctorMachine(tmp_path / "root")


def healthy(machine: DoctorMachine, libraries: Path) -> None:
    """An H200."""
    machine.add_driver()
    machine.boot(libraries, NVML)


def no_gpu(_: DoctorMachine, __: Path) -> None:
    """A laptop."""


def broken_driver(machine: DoctorMachine, libraries: Path) -> None:
    """An unattended upgrade without a reboot, and a container's rights."""
    machine.add_driver()
    machine.boot(libraries, "device 0\nfault nvmlInit* 18\n", version="580.173.02")
    machine.write("proc/self/status", "CapEff:\t0000000000000000\n")


MACHINES: dict[str, tuple[Callable[[DoctorMachine, Path], None], int]] = {
    "h200": (healthy, 0),
    "no-gpu": (no_gpu, 2),
    "broken-driver": (broken_driver, 2),
}


@pytest.mark.parametrize("name", MACHINES)
def test_output_is_the_golden_one(
    name: str, machine: DoctorMachine, libraries: Path, request: pytest.FixtureRequest
) -> None:
    """A01, D05: the whole output of three machines, as docs/troubleshooting.md shows it, and the exit status."""
    prepare, status = MACHINES[name]
    prepare(machine, libraries)
    result = machine.run()
    assert (result.returncode, result.stderr) == (status, "")
    shown = machine.shown(result.stdout)
    file = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")
    page = (GOLDEN.parents[2] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert f"```\n{shown}```\n" in page


def test_json_says_the_same(machine: DoctorMachine) -> None:
    """The documented keys; the status is the worst of all and the exit status is its number."""
    examined = machine.examine()
    assert examined.told.keys() == {"version", "user", "status", "checks"}
    assert (examined.status, examined.told["status"]) == (2, "broken")
    assert all(check.keys() == {"group", "name", "status", "finding", "remedy"} for check in examined.told["checks"])
    assert {check["group"] for check in examined.told["checks"]} == {
        *("exporter", "driver and GPUs", "jobs", "kernel agent", "host"),
    }
    assert "--source=replay" in examined.line("PCI bus")[2]


# The driver


def test_init_that_never_returns(machine: DoctorMachine, libraries: Path) -> None:
    """A12: the call is named, and all other checks are made."""
    machine.add_driver()
    machine.boot(libraries, f"{NVML}fault nvmlInit* hang\n")
    began = time.monotonic()
    examined = machine.examine("--timeout=2s")
    assert time.monotonic() - began < 30  # what is waited by default
    status, finding, remedy = examined.line("driver call")
    assert (status, "`nvmlInit`" in finding) == ("broken", True)
    assert remedy == "Drain the node and reboot it; processes that are stuck in the driver cannot be killed."
    assert examined.line("clock")[0] == "ok"
    assert examined.status == 2


@pytest.mark.parametrize(
    ("code", "finding", "remedy"),
    [
        (999, "unknown", "no-cgroups=true"),
        (9, "driver_not_loaded", "modprobe nvidia"),
        (10, "timeout", "NVML answers timeout"),
    ],
)
def test_init_that_fails(machine: DoctorMachine, libraries: Path, code: int, finding: str, remedy: str) -> None:
    """A02, M06: NVML's name of the code, and what the exporter's log says of it."""
    machine.add_driver()
    machine.boot(libraries, f"device 0\nfault nvmlInit* {code}\n")
    line = machine.examine().line("NVML")
    assert line[:2] == ("broken", finding)
    assert remedy in line[2]


def test_one_gpu_of_two_hangs(machine: DoctorMachine, libraries: Path) -> None:
    """A12: of the other one everything is known."""
    machine.add_driver(2)
    machine.boot(libraries, "device 0\ndevice 1\nfault nvmlDeviceGetTemperature device 1 hang\n", f"{CUPTI}device 1\n")
    examined = machine.examine("--timeout=8s")
    (line,) = examined.lines("driver call")
    assert "`temperature` of GPU 1" in line[1]
    assert examined.line("GPU 0")[0] == "ok"
    assert examined.line("GPM GPU 0")[:2] == ("ok", "windows of 100 ms")
    assert examined.line("PM sampling GPU 0")[:2] == ("ok", "windows of 100 ms")
    assert examined.line("GPU 1")[0] == "broken"


def test_a_library_that_crashes(machine: DoctorMachine, libraries: Path) -> None:
    """K10: it ends the probe, not us."""
    machine.add_driver()
    machine.boot(libraries, f"{NVML}fault nvmlInit* crash\n")
    status, finding, remedy = machine.examine().line("driver")
    assert (status, finding) == (
        "broken",
        "the probe was ended by signal 6 in nvmlInitWithFlags, about to ask the driver",
    )
    assert remedy.startswith("the driver's library is broken or foreign")


def test_a_file_that_is_no_library(machine: DoctorMachine) -> None:
    """K10, M07: what the loader refuses is named in its words."""
    machine.add_driver()
    machine.write("usr/lib64/libnvidia-ml.so.1", "no ELF\n")
    examined = machine.examine()
    status, finding, remedy = examined.line("driver library")
    assert (status, finding.rpartition("/")[2]) == ("broken", "libnvidia-ml.so.1: file too short")
    assert remedy.startswith("the file is damaged")
    assert examined.line("NVML")[:2] == ("broken", "library_not_found")


def test_a_library_of_somebody_else(machine: DoctorMachine, tmp_path: Path) -> None:
    """K10: it loads, and is not NVML."""
    machine.add_driver()
    (folder := tmp_path / "other").mkdir()
    command = ["cc", "-shared", "-x", "c", "-", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(command, input=b"int other(void) { return 1; }", check=True)
    machine.write("usr/lib64/libnvidia-ml.so.1", "").write_bytes((folder / "libnvidia-ml.so.1").read_bytes())
    examined = machine.examine()
    status, finding, remedy = examined.line("driver library")
    assert status == "broken"
    assert finding.endswith("libnvidia-ml.so.1: it has no nvmlInitWithFlags")
    assert remedy.startswith("the file is damaged")


def test_a_fault_of_our_own_is_not_the_drivers(machine: DoctorMachine, tmp_path: Path) -> None:
    """The probe ends with an exception: nobody is to install a driver anew for it."""
    machine.add_driver()
    module = "import os, sys\nif 'gpu_hpc_exporter.doctor.probe' in sys.orig_argv:\n    os._exit(1)\n"
    (tmp_path / "sitecustomize.py").write_text(module)
    machine.environment["PYTHONPATH"] = str(tmp_path)
    status, finding, remedy = machine.examine().line("driver")
    assert (status, finding) == ("broken", "the probe ended with status 1, about to start the probe")
    assert remedy.startswith("a fault of this exporter")


def test_a_library_that_is_too_old(machine: DoctorMachine, tmp_path: Path) -> None:
    """Functions that it lacks are named; what needs them not is there."""
    machine.add_driver()
    folder = fake_cupti.build(fake_nvml.build(tmp_path / "old", missing=["nvmlGpmMigSampleGet"]))
    machine.boot(folder, NVML)
    examined = machine.examine()
    status, finding, remedy = examined.line("driver library")
    assert (status, finding.partition(" lacks ")[2]) == ("degraded", "nvmlGpmMigSampleGet")
    assert remedy.startswith("update the driver")
    assert examined.line("GPU 0")[0] == "ok"


def test_no_module(machine: DoctorMachine) -> None:
    """A card in the machine, and nothing that drives it."""
    machine.add_card()
    examined = machine.examine()
    assert examined.line("PCI bus")[1] == "1 NVIDIA GPU"
    assert "modprobe nvidia" in examined.line("kernel module")[2]
    assert "install the NVIDIA driver" in examined.line("driver library")[2]


def test_device_files_that_are_missing(machine: DoctorMachine, libraries: Path) -> None:
    """M03: the one that is missing is named, and so is what hides it."""
    machine.add_driver()
    machine.boot(libraries, "device 0\nfault nvmlInit* 4\n")
    (machine.root / "dev/nvidiactl").unlink()
    examined = machine.examine()
    status, finding, remedy = examined.line("device files")
    assert (status, finding) == ("broken", "/dev/nvidiactl is not there")
    assert "PrivateDevices=no" in remedy
    assert examined.line("NVML")[1] == "no_permission"


def test_files_that_may_not_be_opened(machine: DoctorMachine, libraries: Path) -> None:
    """M05: without privileges each thing that is denied is named with what would allow it."""
    healthy(machine, libraries)
    machine.write("proc/self/status", "CapEff:\t0000000000000000\n")
    for denied in ("dev/nvidia0", "dev/kmsg"):
        (machine.root / denied).chmod(0)
    machine.agents.chmod(0o333 | 0o3000)
    examined = machine.examine(before=UNPRIVILEGED)
    status, finding, remedy = examined.line("device files")
    assert (status, finding) == ("broken", f"{machine.root}/dev/nvidia0: Permission denied")
    assert remedy == "the device nodes /dev/nvidia* cannot be opened: check their mode and the device cgroup"
    assert "CAP_SYSLOG or kernel.dmesg_restrict=0" in examined.line("kernel log")[2]
    assert "CAP_SYS_PTRACE" in examined.line("CAP_SYS_PTRACE")[2]
    assert examined.line("agents")[:2] == ("degraded", f"no_permission: {machine.agents} cannot be read")


def test_a_gpu_is_lost(machine: DoctorMachine, libraries: Path) -> None:
    """A04: seven of eight answer."""
    machine.add_driver(8)
    scenario = (Path(__file__).parent.parent / "scenarios/one_dead_of_eight.txt").read_text()
    machine.boot(libraries, scenario, CUPTI + "".join(f"device {number}\n" for number in range(1, 8)))
    examined = machine.examine()
    assert examined.line("GPUs")[:2] == ("degraded", "7 answer, 8 the driver counts")
    assert examined.line("GPU 7")[0] == "ok"
    assert examined.lines("GPU 3") == []


def test_gpus_that_are_expected(machine: DoctorMachine, libraries: Path) -> None:
    """A04: the configuration knows of one that nobody shows."""
    healthy(machine, libraries)
    machine.configure(f"expected_gpus: 2\npm_sampling: {{library: {machine.root}/usr/lib64/libcupti.so.12}}\n")
    status, finding, remedy = machine.examine().line("GPUs")
    assert (status, finding) == ("degraded", "1 answer, 2 are expected")
    assert "Xid" in remedy


def test_mig_and_old_chips_are_no_fault(machine: DoctorMachine, libraries: Path) -> None:
    """What the hardware cannot is ok, and said."""
    machine.add_driver()
    machine.boot(libraries, (Path(__file__).parent.parent / "scenarios/mig.txt").read_text())
    examined = machine.examine()
    assert examined.line("PM sampling GPU 0")[:2] == (
        "ok",
        "unsupported: MIG is enabled: PM sampling needs the whole GPU",
    )
    assert examined.line("GPM GPU 0 MIG 1")[:2] == ("ok", "windows of 100 ms")
    assert examined.told["status"] == "ok"


# PM sampling


def test_counters_for_administrators_only(machine: DoctorMachine, libraries: Path) -> None:
    """J02: the module's parameter, and the sentence that the exporter's own log has."""
    machine.add_driver(admin_only=1)
    machine.boot(libraries, NVML, f"{CUPTI}fault cuptiPmSampling* 35\n")
    examined = machine.examine()
    status, finding, remedy = examined.line("counter permission")
    assert (status, "RmProfilingAdminOnly: 1" in finding) == ("degraded", True)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in remedy
    assert examined.line("PM sampling GPU 0") == ("degraded", "no_permission", remedy)
    assert examined.line("GPM GPU 0")[0] == "ok"
    assert examined.status == 1


def test_counters_that_somebody_holds(machine: DoctorMachine, libraries: Path) -> None:
    """J01: busy, and nothing is taken away."""
    machine.add_driver()
    scenario = machine.boot(libraries, NVML)
    with scenario.other_owner(device=0):
        status, finding, remedy = machine.examine().line("PM sampling GPU 0")
    assert (status, finding) == ("degraded", "busy: another process holds the GPU's counters")
    assert remedy.startswith("end the other profiler")


def test_cuda_that_never_starts(machine: DoctorMachine, libraries: Path) -> None:
    """A12: the helper process hangs in it, and is gone afterwards."""
    machine.add_driver()
    machine.boot(libraries, NVML, f"{CUPTI}fault cuInit hang\n")
    status, finding, _ = machine.examine("--timeout=3s").line("PM sampling GPU 0")
    assert (status, finding) == ("degraded", "failed: the helper process hangs (start CUDA)")
    assert str(machine.root) not in "".join(
        _text(folder / "environ") for folder in Path("/proc").glob("[0-9]*") if "pm_helper" in _text(folder / "cmdline")
    )


def _text(file: Path) -> str:
    """Of a process that may end meanwhile, since helpers of other tests come and go beside this one."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def test_a_profiler_of_the_hosts(machine: DoctorMachine, libraries: Path) -> None:
    """J01: it is looked for where `--path.procfs` says, as by the exporter, and giving way to it is no fault."""
    healthy(machine, libraries)
    ProcTree(machine.proc).add(4711, comm=b"ncu")
    examined = machine.examine()
    assert examined.line("PM sampling GPU 0") == ("ok", "paused: ncu runs", "")
    assert examined.status == 0


def test_no_cupti(machine: DoctorMachine, libraries: Path) -> None:
    """K10: what is named is no library; the reason is the helper's own."""
    machine.add_driver()
    machine.boot(libraries, NVML)
    machine.configure("pm_sampling: {library: /nonexistent/libcupti.so.12}\n")
    examined = machine.examine()
    status, _, remedy = examined.line("CUPTI")
    assert status == "degraded"
    assert "/nonexistent/libcupti.so.12" in remedy
    assert examined.line("GPM GPU 0")[0] == "ok"


# The exporter


def test_each_mistake_of_a_configuration(machine: DoctorMachine) -> None:
    """Each on its own line, and the checks go on with the defaults."""
    machine.write(
        "etc/config.yaml", "sampling_interval_ms: 5000\nexpected_gpu: 8\npm_sampling:\n  mode: on\n  libary: x\n"
    )
    lines = machine.examine().lines("configuration")
    assert [status for status, _, _ in lines] == ["broken"] * 4
    findings = " | ".join(finding for _, finding, _ in lines)
    for part in ("line 1: sampling_interval_ms", "did you mean `expected_gpus`?", "line 4: pm_sampling.mode", "line 5"):
        assert part in findings


def test_a_rule_that_cannot_be_used(machine: DoctorMachine) -> None:
    """What only the exporter's start would tell."""
    machine.write("etc/config.yaml", "jobs: {rules: [{command_line: '(?P<job>a)(?=b)'}]}\n")
    ((status, finding, _),) = machine.examine().lines("configuration")
    assert (status, finding.startswith("jobs.rules")) == ("broken", True)


def test_an_exporter_that_runs(machine: DoctorMachine, libraries: Path, tmp_path: Path) -> None:
    """It is asked for its states; PM sampling, whose counters it holds, is not tried beside it."""
    machine.add_driver()
    scenario = machine.boot(libraries, NVML)
    flags = (f"--config.file={machine.config}", f"--path.kmsg={machine.root}/none")
    with run_exporter(tmp_path, *flags, env=machine.environment) as exporter:
        machine.port = int(exporter.url.rpartition(":")[2])
        exporter.wait_for(lambda s: bool(s.get("gpu_hpc_source_state", source="pm_sampling", state="active")))
        sessions = scenario.calls().get("cuptiPmSamplingEnable", 0)
        examined = machine.examine()
        assert scenario.calls()["cuptiPmSamplingEnable"] == sessions
        assert exporter.stop() == 0
    assert "is served by gpu-hpc-exporter" in examined.line("port")[1]
    assert examined.line("exporter")[0] == "ok"
    assert examined.line("its kmsg")[0] == "ok"
    assert examined.lines("PM sampling GPU 0") == []
    assert examined.line("GPM GPU 0")[0] == "ok"


def test_an_exporter_that_plays(machine: DoctorMachine, tmp_path: Path) -> None:
    """A recording on a machine is no measurement of it."""
    with run_exporter(tmp_path, "--source=replay") as exporter:
        machine.port = int(exporter.url.rpartition(":")[2])
        examined = machine.examine()
    assert examined.line("exporter")[:2] == ("degraded", "it plays a recording")


@pytest.mark.parametrize("clients", ["", WITH_CLIENTS])
def test_an_exporter_that_wants_to_know_who_asks(machine: DoctorMachine, tmp_path: Path, clients: str) -> None:
    """By TLS and password or certificate: without them it is no stranger, with them it is read."""
    site = make_site(tmp_path, clients or WITH_TLS + with_users())
    site.issue("me")
    (tmp_path / "password").write_text(PASSWORD, encoding="utf-8")
    http_file = tmp_path / "http.yml"
    who = "" if clients else "basic_auth: {username: scraper, password_file: password}\n"
    http_file.write_text(
        f"{who}tls_config: {{ca_file: ca.pem, cert_file: me.pem, key_file: me.key}}\n", encoding="utf-8"
    )
    context = site.client(site.issue("tester"))
    with run_exporter(tmp_path, "--source=replay", site.flag, tls=context, authorization=basic()) as exporter:
        machine.port = int(exporter.url.rpartition(":")[2])
        status, finding, _ = machine.examine().line("port")
        assert status == "ok"
        assert "--http.config.file names" in finding
        assert machine.examine(f"--http.config.file={http_file}").line("exporter")[1] == "it plays a recording"
    machine.flags = (site.flag,)
    assert machine.examine().line("web configuration")[0] == "ok"
    site.write("tls_server_config: {cert_file: none.pem, key_file: server.key}\n")
    status, finding, _ = machine.examine().line("web configuration")
    assert (status, "none.pem" in finding) == ("broken", True)


class _Stranger(http.server.BaseHTTPRequestHandler):
    """Serves a page, or asks who is there."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def stranger(status: int) -> Iterator[int]:
    """Another server; its port."""
    handler = type("Stranger", (_Stranger,), {"status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_port_that_is_taken(machine: DoctorMachine) -> None:
    """By what is no exporter: a page, a silent listener. What asks for a password may be one."""
    with stranger(200) as machine.port:
        assert machine.examine().line("port")[0] == "broken"
    with stranger(401) as machine.port:
        assert machine.examine().line("port")[0] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        machine.port = silent.getsockname()[1]
        status, finding, remedy = machine.examine().line("port")
    assert status == "broken"
    assert "does not answer HTTP" in finding
    assert "--web.listen-address" in remedy


class _Dripping(http.server.BaseHTTPRequestHandler):
    """A byte now and then, for ever."""

    ended = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.ended.wait(0.5):
                self.wfile.write(b"#")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_server_that_never_ends_its_answer(machine: DoctorMachine) -> None:
    """Each byte comes in time, and the whole does not."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Dripping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        machine.port = server.server_port
        status, finding, _ = machine.examine().line("port")
        _Dripping.ended.set()
        server.shutdown()
    assert (status, "has not answered within 12 s" in finding) == ("broken", True)


# Jobs


def test_a_kubelet(machine: DoctorMachine) -> None:
    """It answers; it refuses; it hangs, which is told within its deadline."""
    socket_path = machine.root / "k.sock"
    machine.configure(f"jobs: {{kubernetes: {{socket: {socket_path}, api: 'off'}}}}\n")
    pod = Pod("train", [Container("main", [("nvidia.com/gpu", [UUID])])])
    kubelet = FakeKubelet(socket_path, [pod])
    kubelet.start()
    try:
        assert machine.examine().line("kubelet")[:2] == ("ok", "answers: 1 pods or devices hold GPUs")
        kubelet.code = grpc.StatusCode.PERMISSION_DENIED
        status, finding, remedy = machine.examine().line("kubelet")
        assert (status, finding) == ("degraded", "no_permission: pods are not named")
        assert "refuses" in remedy
        kubelet.code, kubelet.hangs = None, True
        status, finding, remedy = machine.examine().line("kubelet")
        assert (status, finding) == ("degraded", "failed: pods are not named")
        assert "has not answered within 5 s" in remedy
    finally:
        kubelet.stop()


def test_a_pod_without_the_kubelets_directory(machine: DoctorMachine) -> None:
    """What is missing is the mount; the API server's reason is its own."""
    examined = machine.examine(env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    status, _, remedy = examined.line("kubelet")
    assert status == "degraded"
    assert "its directory is not mounted" in remedy


def test_slurm(machine: DoctorMachine) -> None:
    """A map directory that is not there, then one; a controller that is not there."""
    maps = machine.root / "map"
    machine.configure(f"jobs: {{slurm: {{map_directory: {maps}, scontrol: /nonexistent/scontrol}}}}\n")
    examined = machine.examine()
    assert examined.line("Slurm map")[0] == "degraded"
    assert examined.line("Slurm scontrol")[:2] == ("degraded", "/nonexistent/scontrol: no such program")
    maps.mkdir()
    (maps / "0").write_text("4711\n")
    assert machine.examine().line("Slurm map")[:2] == ("ok", f"{maps} tells of 1 jobs")


def test_own_pid_namespace(machine: DoctorMachine) -> None:
    """A /proc that shows no processes."""
    (machine.proc / "1/comm").unlink()
    (machine.proc / "1").rmdir()
    status, _, remedy = machine.examine().line("pid namespace")
    assert (status, remedy) == ("degraded", "no processes there: is it a /proc?")


# Kernel agents


@contextmanager
def beating(*agents: AgentWriter) -> Iterator[None]:
    """Agents whose threads run."""
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            for agent in agents:
                agent.beat()
            over.wait(0.2)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_agents(machine: DoctorMachine) -> None:
    """K09: how many trace, why others do not, and what to do about those that cannot."""
    tracing, paused, late = (AgentWriter(machine.agents, pid=pid) for pid in (101, 102, 103))
    tracing.state = late.state = "tracing"
    paused.state, paused.reason = "off", "no_cupti"
    paused.flags = late.flags = layout.FLAG_NO_COPIES | layout.FLAG_NO_WAITS
    (machine.agents / "1-1-a.shm").write_text("no file of an agent's")
    with beating(tracing, paused, late):
        examined = machine.examine()
    assert examined.lines("agents")[0][:2] == (
        "ok",
        "1 off (no_cupti), 1 tracing, 1 tracing (records no copies, launches, waits)",
    )
    status, finding, remedy = examined.lines("agents")[1]
    assert (status, finding) == ("degraded", "an agent does not trace: no_cupti")
    assert "nvidia-cuda-cupti" in remedy
    assert examined.line("agent files")[1] == "rejected: 1 unknown_magic"


@pytest.mark.parametrize(("mode", "wanted"), [(0o755, "chmod 3733"), (None, "install -d -m 3733")])
def test_the_agents_directory(machine: DoctorMachine, mode: int | None, wanted: str) -> None:
    """One that others cannot write to, and none."""
    if mode is None:
        machine.agents.rmdir()
    else:
        machine.agents.chmod(mode)
    status, _, remedy = machine.examine().line("agent directory")
    assert status == "degraded"
    assert wanted in remedy


# Flags


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--timeout=0s", "--timeout `0s`"),
        ("--prometheus=ftp://x", "expected a URL like http://prometheus:9090"),
        ("--prometheus=http://ann:s3cret@prometheus:9090", "--prometheus.http.config.file"),
    ],
)
def test_flags_that_cannot_be_used(machine: DoctorMachine, flag: str, told: str) -> None:
    """One line, status 2, and no password in it."""
    result = machine.run(flag)
    assert (result.returncode, result.stdout) == (2, "")
    assert told in result.stderr
    assert "s3cret" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_help(machine: DoctorMachine) -> None:
    """What it is for, and what its status means."""
    result = machine.run("--help")
    assert result.returncode == 0
    assert "0 all ok, 1 degraded, 2 broken" in " ".join(result.stdout.split())
