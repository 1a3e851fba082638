"""What a mistake in a file is told as, for forms of sections that no file of ours has all of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from gpu_hpc_exporter.yaml_file import ConfigError, read_yaml

Url = Annotated[str, msgspec.Meta(pattern="^https?://", description="a URL of http or https")]


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section. url: of a form that its type describes; the names are such texts themselves."""

    url: Url = "http://x"
    names: tuple[Url, ...] = ()
    spare: Url | None = None


class Renamed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"server": "the-server"}):
    """A section whose key in the file is not the field's name."""

    server: Server = Server()


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same section in every place that one may have."""

    plain: Server = Server()
    optional: Server | None = None
    listed: tuple[Server, ...] = ()
    optional_list: tuple[Server, ...] | None = None
    named: dict[str, Server] = {}
    renamed: Renamed = Renamed()


PLACES = {
    "plain": "plain: {{{}}}",
    "optional": "optional: {{{}}}",
    "listed": "listed: [{{}}, {{{}}}]",
    "optional_list": "optional_list: [{{{}}}]",
    "named": "named: {{x: {{{}}}}}",
    "renamed.the-server": "renamed: {{the-server: {{{}}}}}",
}


def problem_of(tmp_path: Path, text: str) -> str:
    """What is said of a file with one mistake, after its name and line."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, File)
    return str(caught.value).removeprefix(f"{path}: line 1: ")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("url: ftp", ".url: expected a URL of http or https"),
        ("names: [ftp]", ".names: expected a URL of http or https"),
        ("spare: ftp", ".spare: expected a URL of http or https"),
    ],
)
def test_a_form_is_told_in_words_wherever_it_stands(tmp_path: Path, place: str, mistake: str, expected: str) -> None:
    """Also in lists, in what may be absent and under renamed keys: never as a regular expression."""
    assert problem_of(tmp_path, PLACES[place].format(mistake)) == place + expected


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_key_has_a_likely_one_wherever_it_stands(tmp_path: Path, place: str) -> None:
    """In the same places."""
    assert problem_of(tmp_path, PLACES[place].format("ur: x")) == f"unknown key `{place}.ur`; did you mean `url`?"
