"""The configuration file and the two forms on the command line: what is wrong is told with its line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.config import (
    Agent,
    Config,
    ConfigError,
    JobRule,
    Jobs,
    Kubernetes,
    PmSampling,
    Slurm,
    Slurmrestd,
    load_config,
    parse_address,
    parse_duration,
    parse_telemetry_path,
)


def write(tmp_path: Path, raw: bytes) -> Path:
    """A configuration file of these bytes."""
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Config()),
        ("# nothing but a comment\n", Config()),
        ("{}", Config()),
        ("sampling_interval_ms: 250", Config(sampling_interval_ms=250)),
        ("gauge_window_seconds: 7.5\n", Config(gauge_window_seconds=7.5)),
        ("sampling_interval_ms: 1\ngauge_window_seconds: 3600", Config(1, 3600)),
        ("sampling_interval_ms: 4000\ngauge_window_seconds: 1", Config(4_000, 1)),
        ("expected_gpus: 8", Config(expected_gpus=8)),
        ("expected_gpus: null", Config()),
        ("exit_after_lost_minutes: 0.5", Config(exit_after_lost_minutes=0.5)),
        ("series_limit: 100", Config(series_limit=100)),
        ("pm_sampling: {}", Config()),
        ("pm_sampling: {mode: off}", Config(pm_sampling=PmSampling("off"))),  # YAML 1.1 would read False
        ("pm_sampling: {mode: required, library: /l}", Config(pm_sampling=PmSampling("required", library="/l"))),
        ("pm_sampling: {helper: [sudo, -n, /h]}", Config(pm_sampling=PmSampling(helper=("sudo", "-n", "/h")))),
        ("pm_sampling:\n  yield_to: [ncu, no]", Config(pm_sampling=PmSampling(yield_to=("ncu", "no")))),
        ("agent: {resume_after_profiler: never}", Config()),
        ("agent: {resume_after_profiler: 10}", Config(agent=Agent(resume_after_profiler=10))),
        ("agent: {directory: 2024-01-01, top_k: 3}", Config(agent=Agent("2024-01-01", top_k=3))),
        ("jobs: {slurm: {map_directory: /j}}", Config(jobs=Jobs(slurm=Slurm("/j")))),
        ("jobs: {rules: [{user: 010, kind: batch}]}", Config(jobs=Jobs(rules=(JobRule(user="010", kind="batch"),)))),
        (
            "jobs:\n  rules:\n  - command_line: --run=(?P<job>\\S+)",
            Config(jobs=Jobs(rules=(JobRule(r"--run=(?P<job>\S+)"),))),
        ),
        ("jobs: {environment: [RUN]}", Config(jobs=Jobs(environment=("RUN",)))),
        ("jobs: {kubernetes: {labels: [a, b]}}", Config(jobs=Jobs(kubernetes=Kubernetes(labels=("a", "b"))))),
        ("jobs: {kubernetes: {enabled: off, api: off}}", Config(jobs=Jobs(kubernetes=Kubernetes("off", api="off")))),
        ("jobs: {kubernetes: {api: 'https://k:6443'}}", Config(jobs=Jobs(kubernetes=Kubernetes(api="https://k:6443")))),
        ("jobs: {slurm: {scontrol: true}}", Config(jobs=Jobs(slurm=Slurm(scontrol="true")))),
        (
            "jobs: {slurm: {scontrol: /s, slurmrestd: {url: 'http://r', token_file: /t}}}",
            Config(jobs=Jobs(slurm=Slurm(scontrol="/s", slurmrestd=Slurmrestd("http://r", "/t")))),
        ),
        ("\N{BYTE ORDER MARK}sampling_interval_ms: 250\r\n", Config(sampling_interval_ms=250)),
    ],
)
def test_a_valid_file(tmp_path: Path, text: str, expected: Config) -> None:
    """What is named is taken, edges of the ranges included; the rest has its default."""
    assert load_config(write(tmp_path, text.encode())) == expected


def test_defaults() -> None:
    """Windows of 100 ms, gauges over 15 s, as many GPUs as there are, no end of its own accord."""
    config = Config()
    assert (config.sampling_interval_ms, config.gauge_window_seconds, config.series_limit) == (100, 15, 20_000)
    assert (config.expected_gpus, config.exit_after_lost_minutes) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nsamping_interval_ms: 3", "line 2: unknown key `samping_interval_ms`; did you mean `sampling_interval_ms`?"),
        ("zzz: 3", "line 1: unknown key `zzz`; known keys: sampling_interval_ms, gauge_window_seconds"),
        ("sampling_interval_ms: fast", "line 1: sampling_interval_ms: Expected `float`, got `str`"),
        ("#\n#\ngauge_window_seconds: [1]", "line 3: gauge_window_seconds: Expected `float`, got `array`"),
        ("sampling_interval_ms: yes", "line 1: sampling_interval_ms: Expected `float`, got `str`"),
        ("sampling_interval_ms: 0.9", "line 1: sampling_interval_ms: Expected `float` >= 1.0"),
        ("sampling_interval_ms: 4001", "line 1: sampling_interval_ms: Expected `float` <= 4000.0"),
        ('jobs: {environment: ["\\ud800"]}', "line 1: text with a NUL or half a surrogate pair cannot be used"),
        ('pm_sampling:\n  library: "a\\0b"', "line 2: text with a NUL or half a surrogate pair cannot be used"),
        ('"\\0": 1', "line 1: text with a NUL or half a surrogate pair cannot be used"),
        ("#" * ((1 << 20) + 1), "longer than 1 MiB: this is no configuration"),
        ("sampling_interval_ms: .nan", "line 1: sampling_interval_ms: "),
        ("sampling_interval_ms: .inf", "line 1: sampling_interval_ms: "),
        ("sampling_interval_ms: 1" + "0" * 400, "line 1: sampling_interval_ms: "),
        ("gauge_window_seconds: 0", "line 1: gauge_window_seconds: Expected `float` >= 1.0"),
        ("sampling_interval_ms: 5\ngauge_window_seconds: 3601", "line 2: gauge_window_seconds: "),
        ("pm_sampling: {mod: off}", "line 1: unknown key `pm_sampling.mod`; did you mean `mode`?"),
        ("\npm_sampling:\n  mod: off", "line 3: unknown key `pm_sampling.mod`; did you mean `mode`?"),
        ("agent: {q: 1}", "line 1: unknown key `agent.q`; known keys: directory, resume_after_profiler, top_k"),
        ("jobs:\n  slurm:\n    map: 1", "line 3: unknown key `jobs.slurm.map`; "),
        ("\npm_sampling: {mode: sometimes}", "line 2: pm_sampling.mode: Invalid enum value 'sometimes'"),
        ("agent: {resume_after_profiler: soon}", "line 1: agent.resume_after_profiler: Invalid enum value 'soon'"),
        ("agent: {top_k: 25}", "line 1: agent.top_k: Expected `int` <= 24"),
        ("agent: {resume_after_profiler: 0}", "line 1: agent.resume_after_profiler: Expected `int` >= 1"),
        ("pm_sampling: {yield_to: ncu}", "line 1: pm_sampling.yield_to: Expected `array`, got `str`"),
        ("\njobs: {rules: [{user: [1]}]}", "line 2: jobs.rules.user: Expected `str`, got `array`"),
        ("jobs:\n  rules:\n  - usr: a", "line 2: unknown key `jobs.rules.usr`; did you mean `user`?"),
        ("jobs: {rules: [{kind: batch}]}", "line 1: jobs.rules: a rule needs at least one of command_line, user and"),
        ("jobs: {rules: [{user: root}]}", "line 1: jobs.rules: a rule needs a named group, such as (?P<job>...), or a"),
        ("jobs: {rules: [{user: '(?P<jb>a)'}]}", "line 1: jobs.rules: named group `jb`: expected one of job, job_id, "),
        ("jobs: {rules: [{user: '(a'}]}", "line 1: jobs.rules: regular expression `(a`: missing ), unterminated"),
        ("jobs: {rules: [{user: a, kind: b}]}", "line 1: jobs.rules.kind: Invalid enum value 'b'"),
        ("jobs: {kubernetes: {api: maybe}}", "line 1: jobs.kubernetes.api: expected auto, off, or a URL of http or h"),
        ("jobs: {kubernetes: {label: [a]}}", "line 1: unknown key `jobs.kubernetes.label`; did you mean `labels`?"),
        ("jobs: {slurm: {scontrol: yes}}", "line 1: jobs.slurm.scontrol: expected true, false, or a path that begins "),
        (
            "jobs:\n slurm:\n  scontrol: s",
            "line 3: jobs.slurm.scontrol: expected true, false, or a path that begins with /",
        ),
        ("jobs: {slurm: {slurmrestd: {url: x}}}", "line 1: jobs.slurm.slurmrestd.url: expected a URL of http or https"),
        ("jobs: {slurm: {slurmrestd: {version: 1}}}", "line 1: jobs.slurm.slurmrestd.version: expected a version like"),
        ("jobs:\n  slurm:\n    map_directory: [1]", "line 3: jobs.slurm.map_directory: Expected `str`"),
        ("expected_gpus: -1", "line 1: expected_gpus: Expected `int` >= 0"),
        ("expected_gpus: eight", "line 1: expected_gpus: "),
        ("exit_after_lost_minutes: 0", "line 1: exit_after_lost_minutes: Expected `float` > 0.0"),
        ("series_limit: 99", "line 1: series_limit: Expected `int` >= 100"),
        ("&a {x: *a}", "line 1: found unconstructable recursive node"),
        ("- 1", "line 1: expected lines `key: value`; known keys: "),
        ("7", "line 1: expected lines `key: value`; known keys: "),
        ("null", "line 1: expected lines `key: value`; known keys: "),
        ("1: 2", "line 1: "),
        ("a: 1\n b: 2", "line 2: mapping values are not allowed here"),
        ("a: 'unfinished\n", "line 2: "),
        ("a: 1\n---\nb: 1", "line 2: "),
        ("? [1]\n: 2", "line 1: found unhashable key"),
        ("a: !!python/object:os.system x", "line 1: unknown key `a`"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    """One line names file, line, key and what was expected, for an unknown key also the likely one."""
    path = write(tmp_path, text.encode())
    assert problem_of_file(path).startswith(f"{path}: {expected}")


def problem_of_file(path: Path) -> str:
    """What load_config says, which has to be one short line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    problem = str(caught.value)
    assert problem.splitlines() == [problem]
    assert len(problem.replace(str(path), "")) < 500
    return problem


@pytest.mark.parametrize(
    "raw",
    [
        b"sampling_interval_ms: \xff",
        b"a\x00b",
        b"a: \x1b[31m",
        b"sampling_interval_ms: 2020-13-45",
        b"sampling_interval_ms: 0b_",
        pytest.param(b"a: 1" + b"0" * 5000, id="5,001 digits"),
        b"sampling_interval_ms: !!bool maybe",
        pytest.param(b"[" * 3000, id="3,000 brackets"),
        b'"a\\nb": 1',
    ],
)
def test_a_file_that_is_no_configuration_at_all(tmp_path: Path, raw: bytes) -> None:
    """Bytes that no editor would write are told like any other mistake, on one short line."""
    path = write(tmp_path, raw)
    assert problem_of_file(path).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("sampling_interval_ms: 100\nsampling_interval_ms: 200", 2, "sampling_interval_ms"),
        ("sampling_interval_ms: 100\n'sampling_interval_ms': 100", 2, "sampling_interval_ms"),
        ("agent:\n  top_k: 1\n  top_k: 2", 3, "top_k"),
        ("jobs: {}\nagent: {}\njobs: {}", 3, "jobs"),
        pytest.param("jobs:\n  rules:\n  - a: b\n    a: c", 4, "a"),
    ],
)
def test_a_key_that_stands_there_twice_is_a_mistake(tmp_path: Path, text: str, line: int, key: str) -> None:
    """Of two lines for one key nobody can know which one was meant."""
    path = write(tmp_path, text.encode())
    assert problem_of_file(path) == f"{path}: line {line}: key `{key}` stands here twice"


@pytest.mark.parametrize("text", ["pm_sampling:\n", "jobs:\n  # rules: []\n", "expected_gpus:\n"])
def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path: Path, text: str) -> None:
    """A heading left alone, as in every example file, is the defaults, not a mistake."""
    assert load_config(write(tmp_path, text.encode())) == Config()


@pytest.mark.parametrize("text", ["[]", "''"])
def test_an_empty_list_is_no_configuration(tmp_path: Path, text: str) -> None:
    """Only a file without content has defaults; one of another shape is a mistake."""
    problem_of_file(write(tmp_path, text.encode()))


def test_a_long_key_makes_no_long_message(tmp_path: Path) -> None:
    """A log line and a reload's answer stay short whatever the file is."""
    problem_of_file(write(tmp_path, b"? " + b"k" * 5000 + b"\n: 1"))


@pytest.mark.parametrize("text", ["/metrics", "/m", "/a/b", "/gpu-1/metrics_v1.0", "/x/-/y"])
def test_telemetry_path(text: str) -> None:
    """Any path of plain words."""
    assert parse_telemetry_path(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", "//", "metrics", "/a/", "/a//b", "/-", "/-/healthy", "/-/x", "/a b", "/{x}", "/a?b", "/a#b"),
        *("/%41", "/metrics\n", "/a\\b", "http://h/m"),
        *(pytest.param(path) for path in ("/.", "/..", "/a/../b")),
    ],
)
def test_no_telemetry_path(text: str) -> None:
    """The root and the control paths are taken, and nothing is a pattern, a query or relative."""
    with pytest.raises(ConfigError, match="expected a path like /metrics") as caught:
        parse_telemetry_path(text)
    assert f"`{text}`" in str(caught.value)


@pytest.mark.parametrize(("name", "why"), [("missing.yaml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, why: str) -> None:
    """A missing file and a directory are named with the system's reason."""
    assert problem_of_file(tmp_path / name) == f"{tmp_path / name}: {why}"


@pytest.fixture(scope="module")
def fuzz_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples."""
    return tmp_path_factory.mktemp("fuzz") / "config.yaml"


_YAML_LIKE = st.text("[]{}:,-?&*|>!'\"%@`# \n\tabn~01_.", max_size=40).map(str.encode)
_KEYED = st.sampled_from([b"sampling_interval_ms: ", b"gauge_window_seconds: "])


@given(st.binary(max_size=100) | _YAML_LIKE | st.builds(bytes.__add__, _KEYED, _YAML_LIKE))
@settings(max_examples=200)
def test_arbitrary_bytes_are_a_configuration_or_a_config_error(fuzz_file: Path, raw: bytes) -> None:
    """No file whatever makes anything but a ConfigError come out."""
    fuzz_file.write_bytes(raw)
    try:
        config = load_config(fuzz_file)
    except ConfigError:
        return
    assert 1 <= config.sampling_interval_ms <= 4_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9836", (None, 9836)),
        ("127.0.0.1:9836", ("127.0.0.1", 9836)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),  # noqa: S104 - parsed, not bound
        ("gpu-node-1.example.org:80", ("gpu-node-1.example.org", 80)),
        ("[::1]:9836", ("::1", 9836)),
        ("[::]:9836", ("::", 9836)),
        ("[fe80::1%eth0]:9836", ("fe80::1%eth0", 9836)),
    ],
)
def test_listen_address(text: str, expected: tuple[str | None, int]) -> None:
    """Host and port; no host means all addresses."""
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9836",
        "localhost",
        "localhost:",
        "localhost:http",
        ":65536",
        ":-1",
        ":123456",
        "::1:9836",
        "[::1]",
        "[]:9836",
        "a:b:1",
        "[::1:9836",
        "http://localhost:1",
        ":1\n",
        "a b:1",
        "[zz]:1",
        ":٣",
    ],
)
def test_no_listen_address(text: str) -> None:
    """Anything else is a ConfigError that quotes what was given and says what was expected."""
    with pytest.raises(ConfigError, match=r"expected HOST:PORT, :PORT or \[IPV6\]:PORT") as caught:
        parse_address(text)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("3m", 180),
        ("1h30m", 5400),
        ("2h", 7200),
        ("1h1m1s", 3661),
        ("1h5s", 3605),
        ("1m30", 90),
        ("0.5s", 0.5),
        ("1.5", 1.5),
        ("0", 0),
    ],
)
def test_duration(text: str, seconds: float) -> None:
    """Hours, minutes and seconds, in this order, each at most once."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "m", "-1", "1.5m", "30m1h", "1 s", "1S", "1d", "inf", "nan", "1e3", ".5s"])
def test_no_duration(text: str) -> None:
    """Anything else is a ConfigError that quotes what was given and shows the form."""
    with pytest.raises(ConfigError, match="expected a form like 90s, 3m or 1h30m") as caught:
        parse_duration(text)
    assert f"`{text}`" in str(caught.value)


def test_no_duration_is_infinite() -> None:
    """A duration that no clock reaches is a mistake."""
    with pytest.raises(ConfigError):
        parse_duration("9" * 400)


_FORMS = st.text("0123456789hms.:[]% -a", max_size=12) | st.text(max_size=12)


@given(_FORMS)
@settings(max_examples=200)
@example("[::1]:99999")
def test_arbitrary_text_is_a_form_or_a_config_error(text: str) -> None:
    """No text whatever makes anything but a ConfigError come out."""
    try:
        host, port = parse_address(text)
    except ConfigError:
        pass
    else:
        assert host != ""
        assert 0 <= port <= 65535
    with contextlib.suppress(ConfigError):
        assert parse_telemetry_path(text) == text
    try:
        seconds = parse_duration(text)
    except ConfigError:
        pass
    else:
        assert seconds >= 0
