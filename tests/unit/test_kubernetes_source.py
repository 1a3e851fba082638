"""Kubelet and API server together: who holds which GPU, kept up to date by threads that nobody waits for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fake_apiserver import Answer, FakeApiServer, pod, slice_of
from fake_apiserver import running as running_api
from fake_kubelet import Claim, Container, FakeKubelet, Pod
from fake_kubelet import running as running_kubelet
from gpu_hpc_exporter import config
from gpu_hpc_exporter.jobs.lookups import Allocation
from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes.client import Server
from gpu_hpc_exporter.sources.kubernetes.devices import DeviceNames
from gpu_hpc_exporter.sources.kubernetes.objects import PodRecord, Wanted, read_pod
from gpu_hpc_exporter.sources.kubernetes.refresh import RefreshPlan
from gpu_hpc_exporter.sources.kubernetes.settings import ApiSettings, KubernetesSettings, settings_of
from gpu_hpc_exporter.sources.kubernetes.source import KubernetesSource
from gpu_hpc_exporter.sources.kubernetes.view import KubernetesLookups, Part, Told, build
from unit.objects import G0, G1, M1

GPU = "nvidia.com/gpu"
CID = 64 * "a"
GPUS, MINORS = (G0, G1, M1), {G0.uuid: 0, G1.uuid: 1}
NAMES = DeviceNames(GPUS, MINORS)
TRAIN = Pod("train-0", [Container("main", [(GPU, [G0.uuid])])])


class Running:
    """A source with what it has told of its state."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.states: list[tuple[Part, State, str]] = []
        self.changed = threading.Condition()
        self.source = KubernetesSource(settings, self._take_state)
        self.source.set_gpus(GPUS, MINORS)
        self.source.start()

    def _take_state(self, part: Part, state: State, reason: str) -> None:
        with self.changed:
            self.states.append((part, state, reason))
            self.changed.notify_all()

    @property
    def view(self) -> KubernetesLookups:
        """What is known."""
        return self.source.view

    def wait_for_state(self, part: Part, state: State) -> str:
        """Until this is the state; the reason."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._state_of(part)[0] == state, 20), self.states
            return self._state_of(part)[1]

    def _state_of(self, part: Part) -> tuple[str, str]:
        return next(((state, why) for one, state, why in reversed(self.states) if one == part), ("", ""))

    def wait_for(self, predicate: Callable[[KubernetesLookups], object]) -> None:
        """Until it holds of the view, which is looked at again and again."""
        deadline = time.monotonic() + 60
        while not predicate(self.view):
            assert time.monotonic() < deadline, self.view
            time.sleep(0.002)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    """A kubelet with one pod that holds a GPU."""
    with running_kubelet(tmp_path / "kubelet.sock", [TRAIN]) as fake:
        yield fake


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    """An API server that knows that pod."""
    with running_api() as server:
        statuses = [{"name": "main", "containerID": f"containerd://{CID}"}]
        server.put(pod("u1", "train-0", labels={"job-name": "train"}, containerStatuses=statuses))
        yield server


@pytest.fixture
def run() -> Iterator[Callable[[KubernetesSettings], Running]]:
    """Starts sources and stops them."""
    started: list[Running] = []

    def start(settings: KubernetesSettings) -> Running:
        started.append(Running(settings))
        return started[-1]

    yield start
    for one in started:
        one.source.stop()


Run = Callable[[KubernetesSettings], Running]


def both(
    kubelet: FakeKubelet, api: FakeApiServer, *, refresh_s: float = 60.0, gap_s: float = 0.01
) -> KubernetesSettings:
    """Settings for both fakes."""
    settings = ApiSettings(Server(api.url), "node-1", Wanted(("job-name",)))
    return KubernetesSettings(kubelet.socket, settings, refresh_s=refresh_s, gap_s=gap_s)


def alone(kubelet: FakeKubelet, *, refresh_s: float = 60.0, keep_s: float = 120.0) -> KubernetesSettings:
    """Settings without an API server."""
    return KubernetesSettings(kubelet.socket, refresh_s=refresh_s, gap_s=0.01, keep_s=keep_s)


def test_everything_that_both_know(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """Allocation by GPU, pod by UID and name, container by id."""
    running = run(both(kubelet, api))
    running.wait_for(lambda view: view.allocations and view.pods)
    view = running.view
    assert view.allocations_of(G0.uuid) == (Allocation(G0.uuid, "default", "train-0", "main", "u1"),)
    assert view.allocations_of(G1.uuid) == ()
    told = view.pod("u1")
    assert told is not None
    assert told == view.pod_of("default", "train-0")
    assert told.labels == {"job-name": "train"}
    assert view.container_name(CID) == "main"
    assert (view.pod("u2"), view.pod_of("ml", "train-0"), view.container_name(64 * "b")) == (None, None, "")
    assert running.wait_for_state("kubelet", "active") == ""
    assert running.wait_for_state("apiserver", "active") == ""
    for part in ("kubelet", "apiserver"):
        age = running.view.age_seconds(part, time.monotonic())
        assert age is not None
        assert 0 <= age < 20


def test_the_kubelet_alone_suffices(kubelet: FakeKubelet, run: Run) -> None:
    """Names without UIDs; the other part says why it tells nothing."""
    running = run(alone(kubelet))
    running.wait_for(lambda view: view.allocations)
    assert running.view.allocations_of(G0.uuid) == (Allocation(G0.uuid, "default", "train-0", "main"),)
    assert running.wait_for_state("apiserver", "unsupported") == "not configured"
    assert running.view.age_seconds("apiserver", 1.0) is None


def test_f01_a_gpu_has_a_set_of_containers(kubelet: FakeKubelet, run: Run) -> None:
    """F01: two pods share it, one of them twice."""
    kubelet.pods = [
        Pod("a", [Container("x", [("nvidia.com/gpu.shared", [f"{G0.uuid}::0", f"{G0.uuid}::7"])])]),
        Pod("b", [Container("x", [(GPU, [f"{G0.uuid}-1"])]), Container("y", [(GPU, ["nvidia0/vgpu2"])])]),
        Pod("c", [Container("x", [("nvidia.com/mig-1g.10gb.shared", [f"{M1.uuid}::1"])])]),
    ]
    running = run(alone(kubelet))
    running.wait_for(lambda view: view.allocations)
    assert [(one.pod, one.container) for one in running.view.allocations_of(G0.uuid)] == [
        ("a", "x"),
        ("b", "x"),
        ("b", "y"),
    ]
    assert [one.pod for one in running.view.allocations_of(M1.uuid)] == ["c"]
    assert not running.view.unknown_devices


def test_a_device_that_nobody_knows(kubelet: FakeKubelet, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """It is shown and told once; devices of other plugins are not."""
    kubelet.pods = [Pod("a", [Container("x", [(GPU, ["GPU-gone", "nvidia7"]), ("rdma/hca", ["nvidia0"])])])]
    running = run(alone(kubelet, refresh_s=0.01))
    assert kubelet.wait_for_calls(5)
    assert running.view.unknown_devices == {f"{GPU} GPU-gone", f"{GPU} nvidia7"}
    assert not running.view.allocations
    assert sum("GPU-gone" in record.message for record in caplog.records) == 1


def test_devices_are_not_unknown_before_the_driver_has_told(
    kubelet: FakeKubelet, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet often answers first: that is no news to anybody."""
    running = run(alone(kubelet))
    running.source.set_gpus((), {})
    running.wait_for(lambda view: view.unknown_devices)
    assert G0.uuid not in caplog.text
    running.source.set_gpus((G1,), MINORS)
    assert caplog.text.count(G0.uuid) == 1


def test_a_new_inventory_is_used_at_once(kubelet: FakeKubelet, run: Run) -> None:
    """Without asking the kubelet."""
    running = run(alone(kubelet))
    running.wait_for(lambda view: view.allocations)
    running.source.set_gpus((), {})
    assert not running.view.allocations
    assert running.view.unknown_devices == {f"{GPU} {G0.uuid}"}
    running.source.set_gpus(GPUS, MINORS)
    assert running.view.allocations_of(G0.uuid)
    assert kubelet.calls == 1


def test_a_pod_that_has_ended_holds_nothing(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """The kubelet lists a finished pod until somebody deletes it; the API server knows better."""
    running = run(both(kubelet, api))
    running.wait_for(lambda view: view.allocations and view.pods)
    api.wait_for(lambda: api.watches == 1)
    api.put(pod("u1", "train-0", phase="Succeeded"))
    running.wait_for(lambda view: not view.allocations)
    assert running.view.pod("u1")


@pytest.mark.parametrize("has_slice", [True, False])
def test_f07_dynamic_devices(kubelet: FakeKubelet, api: FakeApiServer, run: Run, has_slice: bool) -> None:  # noqa: FBT001
    """F07: the allocation has all that one by a device plugin has, UID included; slices are read for it alone."""
    kubelet.pods = [Pod("train-0", [Container("main", claims=[Claim("gpu-0")])])]
    if has_slice:
        api.slices = [slice_of({"gpu-0": {"uuid": {"string": G1.uuid}}})]
    running = run(both(kubelet, api, refresh_s=0.05))
    expected = G1.uuid if has_slice else G0.uuid
    running.wait_for(lambda view: view.allocations_of(expected) and view.pods)
    assert running.view.allocations == {expected: (Allocation(expected, "default", "train-0", "main", "u1"),)}
    api.wait_for(lambda: api.count("slices") > 0)
    assert api.count("slices") == 1


def test_without_dynamic_devices_no_slices_are_read(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """Most clusters have none, and no right to read them."""
    running = run(both(kubelet, api, refresh_s=0.01))
    running.wait_for(lambda view: view.allocations and view.pods)
    assert kubelet.wait_for_calls(10)
    assert api.count("slices") == 0


def test_f05_many_pods_with_an_unknown_instance(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """F05: 60 pods, an unknown MIG id, an API server that answers 429: what is asked does not grow with them."""
    api.always["list"] = Answer(429, headers={"Retry-After": "60"})
    unknown = "MIG-99999999-aaaa-bbbb-cccc-000000000000"
    kubelet.pods = [Pod(f"p{number}", [Container("x", [(GPU, [unknown])])]) for number in range(60)]
    running = run(both(kubelet, api))
    running.wait_for_state("kubelet", "active")
    for _ in range(100):
        for number in range(60):
            running.source.poke(f"container-{number % 3}")
    assert kubelet.wait_for_calls(2)
    running.wait_for_state("apiserver", "failed")
    assert kubelet.calls <= 4
    assert len(api.requests) == 1


def test_f05_look_ups_per_minute_are_constant() -> None:
    """F05: new containers all the time make as many look-ups as one that nobody knows in each gap."""
    plan = RefreshPlan(10.0, 2.0)
    now_s, begun = 0.0, []
    while now_s < 600:
        for number in range(60):
            plan.ask(f"{now_s} {number}", now_s)
        if plan.wait_s(now_s) == 0:
            plan.begin(now_s)
            begun.append(now_s)
        now_s += 0.25
    assert len(begun) == 300
    known = RefreshPlan(10.0, 2.0)
    assert [known.ask("same", second) for second in range(0, 1_300, 100)].count(True) == 3


def test_an_unknown_container_is_asked_for_at_once(kubelet: FakeKubelet, run: Run) -> None:
    """Once, not at each beat."""
    running = run(alone(kubelet))
    running.wait_for_state("kubelet", "active")
    kubelet.pods = [TRAIN, Pod("new", [Container("x", [(GPU, [G1.uuid])])])]
    running.source.poke(CID)
    running.wait_for(lambda view: view.allocations_of(G1.uuid))
    running.source.poke(CID)
    assert kubelet.calls == 2


def test_a_kubelet_that_hangs_blocks_nobody(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """The pods are known, the view is at hand, and stopping takes no longer than the deadline."""
    kubelet.hangs = True
    running = run(replace(both(kubelet, api), deadline_s=60))
    running.wait_for(lambda view: view.pods)
    assert kubelet.wait_for_calls(1)
    running.source.poke("x")
    running.source.set_gpus(GPUS, MINORS)
    assert running.view.pod("u1")
    running.source.stop()
    assert "kubelet" not in {thread.name for thread in threading.enumerate()}
    assert ("kubelet", "failed") not in [state[:2] for state in running.states]


def test_what_a_silent_kubelet_told_is_forgotten(kubelet: FakeKubelet, run: Run) -> None:
    """After a restart's time, so that no job stays that nobody vouches for."""
    running = run(alone(kubelet, refresh_s=0.02, keep_s=0.2))
    running.wait_for(lambda view: view.allocations)
    kubelet.stop()
    running.wait_for_state("kubelet", "unsupported")
    running.wait_for(lambda view: not view.allocations)
    kubelet.start()
    running.wait_for_state("kubelet", "active")
    assert running.view.allocations


def test_an_open_watch_is_ended_by_stopping(kubelet: FakeKubelet, api: FakeApiServer, run: Run) -> None:
    """And no thread is left."""
    running = run(both(kubelet, api))
    api.wait_for(lambda: api.watches == 1)
    running.source.stop()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"kubelet", "apiserver"}


def test_names_of_an_api_server_that_has_long_been_silent_do_not_hold() -> None:
    """A pod of the same name may have come since; by its UID the old one is still known."""
    raw = {"u1": _record("u1", "train-0")}
    view = build(Told(records=raw, names_hold=False), NAMES, {})
    assert view.pod("u1")
    assert view.pod_of("default", "train-0") is None


def test_of_two_pods_of_one_name_the_living_counts() -> None:
    """In whichever order they are told."""
    old, new = _record("u1", "train-0", "Failed"), _record("u2", "train-0")
    for records in ({"u1": old, "u2": new}, {"u2": new, "u1": old}):
        found = build(Told(records=records), NAMES, {}).pod_of("default", "train-0")
        assert found
        assert found.uid == "u2"


def _record(uid: str, name: str, phase: str = "Running") -> PodRecord:
    record = read_pod(json.dumps(pod(uid, name, phase=phase)).encode(), Wanted())
    assert record
    return record


CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443", "NODE_NAME": "node-1"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's directory."""
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("c")
    return tmp_path


def test_settings_in_a_cluster(account: Path) -> None:
    """The pod's own API server, token and authority; the labels that the configuration asks for."""
    settings = settings_of(config.Kubernetes(labels=("a",), annotations=("b",)), CLUSTER, "Host", account)
    server = Server("https://10.0.0.1:443", account / "token", account / "ca.crt")
    assert settings.api == ApiSettings(server, "node-1", Wanted(("a",), ("b",)))
    assert settings.socket == Path("/var/lib/kubelet/pod-resources/kubelet.sock")


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        (config.Kubernetes(api="off"), CLUSTER, "switched off"),
        (config.Kubernetes(), {}, "not in a pod"),
        (config.Kubernetes(node_name="a,spec.x=y"), CLUSTER, "is no node's name"),
        (config.Kubernetes(node_name="\n" * 999), CLUSTER, "is no node's name"),
    ],
)
def test_settings_without_an_api_server(
    configured: config.Kubernetes, environ: dict[str, str], expected: str, account: Path
) -> None:
    """The reason says which of the ways it is."""
    settings = settings_of(configured, environ, "host", account)
    assert settings.api is None
    assert expected in settings.no_api_reason
    assert len(settings.no_api_reason) < 400


def test_settings_without_a_service_account(tmp_path: Path) -> None:
    """As with automountServiceAccountToken: false."""
    assert "automount" in settings_of(config.Kubernetes(), CLUSTER, "host", tmp_path).no_api_reason


@pytest.mark.parametrize(
    ("api", "url", "has_token"),
    [
        ("https://k.example.com:6443/", "https://k.example.com:6443", True),
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001", False),
    ],
)
def test_settings_for_a_configured_server(api: str, url: str, has_token: bool, account: Path) -> None:  # noqa: FBT001
    """The token goes over no connection that others can read."""
    settings = settings_of(config.Kubernetes(api=api), {}, "Host-1", account)
    assert settings.api
    assert settings.api.node == "host-1"
    assert settings.api.server.url == url
    assert (settings.api.server.token_file is not None) == has_token


def test_settings_outside_of_a_cluster(tmp_path: Path) -> None:
    """As for a systemd unit: each file is configured; over plain HTTP a token goes only where somebody says so."""
    configured = config.Kubernetes(
        api="http://127.0.0.1:8001",
        token_file="/t",  # noqa: S106
        ca_file="/c",
        gpu_resources=("example.com/gpu",),
    )
    settings = settings_of(configured, {}, "host-1", tmp_path)
    assert settings.api
    assert settings.api.server == Server("http://127.0.0.1:8001", Path("/t"), Path("/c"))
    assert settings.gpu_resources == ("example.com/gpu",)


def test_settings_with_an_address_of_version_6(account: Path) -> None:
    """Its colons are no port's."""
    settings = settings_of(config.Kubernetes(), {**CLUSTER, "KUBERNETES_SERVICE_HOST": "fd00::1"}, "h", account)
    assert settings.api
    assert settings.api.server.url == "https://[fd00::1]:443"
