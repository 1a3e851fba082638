"""One YAML file as one frozen struct; every mistake is told with its file and line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec
import yaml

_MAX_PROBLEM: Final = 400
_MAX_FILE: Final = 1 << 20
_MAX_MISTAKES: Final = 20
_MAX_NODES: Final = 50_000

T = TypeVar("T", bound=msgspec.Struct)


class ConfigError(Exception):
    """The configuration cannot be used; the text names place, mistake and remedy in one line."""


@dataclass(frozen=True, slots=True)
class YamlFile(Generic[T]):
    """What a file says, and where it says it."""

    path: Path
    value: T
    tree: yaml.Node | None

    def mistake(self, keys: Sequence[str], problem: str) -> ConfigError:
        """The error for what stands at a key and no type can tell."""
        return _error(self.path, f"{'.'.join(keys)}: {problem}", _line_of(self.tree, keys))


def _error(path: Path, problem: str, line: int = 0) -> ConfigError:
    """In one line, however many or long the file's own words in it are."""
    place = f"{path}: line {line}" if line else f"{path}"
    return ConfigError(f"{place}: {' '.join(problem.split())[:_MAX_PROBLEM]}")


def read_small_file(path: Path) -> bytes:
    """The bytes of a regular file of at most 1 MiB. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A FIFO or a device could block for ever, and with it every later reload.
            raise ConfigError(f"{path}: is no regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(content) > _MAX_FILE:
        raise ConfigError(f"{path}: longer than {_MAX_FILE >> 20} MiB: this is no configuration")
    return content


def read_yaml(path: Path, kind: type[T], *, empty_is_absent: bool = True) -> YamlFile[T]:
    """Read and check a file.

    empty_is_absent: keys without a value are as good as none at any depth, else only sections of the file itself.
    Raises ConfigError.
    """
    tree, data = _parse(path, kind)
    try:
        known = _without_empty(data, is_deep=empty_is_absent)
        return YamlFile(path, msgspec.convert(known, kind, strict=False), tree)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, tree, kind, str(error))) from error


def list_mistakes(path: Path, kind: type[msgspec.Struct]) -> list[str]:
    """Every mistake of a file, as `read_yaml` tells the first; what stands in a list counts as one."""
    try:
        tree, data = _parse(path, kind)
    except ConfigError as error:
        return [str(error)]
    known = _without_empty(data, is_deep=True)
    mistakes: list[str] = []
    while len(mistakes) < _MAX_MISTAKES:
        try:
            msgspec.convert(known, kind, strict=False)
            break
        except msgspec.ValidationError as error:
            mistakes.append(_explain(path, tree, kind, str(error)))
            keys, unknown = _place(str(error))
            if not _remove(known, [*keys, *unknown]):
                break
    return mistakes


def _remove(data: object, keys: Sequence[str]) -> bool:
    """Take the last of these nested keys out, or the list that it is in; whether there was one."""
    for position, key in enumerate(keys):
        if not isinstance(data, dict) or key not in data:
            return False
        if position == len(keys) - 1 or not isinstance(data[key], dict):
            del data[key]
            return True
        data = data[key]
    return False


def _parse(path: Path, kind: type[msgspec.Struct]) -> tuple[yaml.Node | None, dict[str, Any]]:
    """A file's keys, with and without their places. Raises ConfigError."""
    content = read_small_file(path)
    try:
        text = content.decode("utf-8")
        # Scalars stay text, which msgspec converts as the types say: no YAML surprises such as dates or octals.
        tree = yaml.compose(text, Loader=yaml.BaseLoader)
        data = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  constructs only text, lists and mappings
        if tree is not None and _size(tree, {}) > _MAX_NODES:
            raise _error(path, "too much to be a configuration, perhaps by aliases (`*name`) of aliases")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _error(path, str(error.problem), line) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _error(path, str(error)) from error
    except (ValueError, OverflowError) as error:  # of the library's own conversions
        raise _error(path, f"an escape or a version in it cannot be: {error}") from error
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: line 1: expected lines `key: value`; known keys: {', '.join(_keys_of(kind))}")
    _refuse_duplicates(path, tree)
    _refuse_unusable_text(path, tree)
    return tree, {} if tree is None else data


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """How many nodes it is with every alias written out; one that is within itself has no end. Raises RecursionError.

    A few lines can so become gigabytes for whoever looks at every node.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = math.inf
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    known[id(node)] = size = 1 + sum(_size(one, known) for one in inner)
    return size


def _without_empty(data: object, *, is_deep: bool) -> object:
    """A key without a value, such as a section whose lines are all comments, is as good as none."""
    if not isinstance(data, dict):
        return data
    return {
        key: _without_empty(value, is_deep=True) if is_deep else value for key, value in data.items() if value != ""
    }


def _refuse_unusable_text(path: Path, node: yaml.Node | None) -> None:
    """Escapes can write what no path, name or label can hold: NUL, and halves of surrogate pairs."""
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value or any("\ud800" <= character <= "\udfff" for character in node.value):
            line = node.start_mark.line + 1
            raise _error(path, "text with a NUL or half a surrogate pair cannot be used", line)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_unusable_text(path, item)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _refuse_unusable_text(path, name)
            _refuse_unusable_text(path, value)


def _refuse_duplicates(path: Path, node: yaml.Node | None) -> None:
    """YAML forbids two equal keys and most parsers let the last one win."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(path, item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if name.value in seen:
                raise _error(path, f"key `{name.value}` stands here twice", name.start_mark.line + 1)
            if isinstance(name, yaml.ScalarNode):
                seen.add(name.value)
            _refuse_duplicates(path, value)


def _explain(path: Path, tree: yaml.Node | None, kind: type[msgspec.Struct], problem: str) -> str:
    """Msgspec's message with the line that it is about and, for an unknown key, the likely one meant."""
    keys, unknown = _place(problem)
    if unknown:
        suggestion = _suggestion(kind, keys, unknown[0])
        keys += unknown
        problem = f"unknown key `{'.'.join(keys)}`{suggestion}"
    elif keys:
        wanted = _description(kind, keys) if "matching regex" in problem else ""
        problem = f"{'.'.join(keys)}: {f'expected {wanted}' if wanted else problem.split(' - at ')[0]}"
    return str(_error(path, problem, _line_of(tree, keys)))


def _place(problem: str) -> tuple[list[str], list[str]]:
    """The keys that msgspec's message is about, and the one below them that it does not know, if that is the matter."""
    where = re.search(r"at `\$\.?(.*?)`", problem, re.DOTALL)
    keys = [key for key in re.split(r"\.|\[.*?\]", where[1]) if key] if where else []
    unknown = re.search(r"unknown field `(.*?)`(?: - at|$)", problem, re.DOTALL)
    return keys, [unknown[1]] if unknown else []


def _suggestion(kind: type[msgspec.Struct], section: Sequence[str], key: str) -> str:
    struct = next((part for part in _type_of(kind, section) if _is_struct(part)), None)
    if struct is None:  # a key that looks like a message of msgspec's
        return ""
    known = _keys_of(struct)
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(known)}"


def _description(kind: type[msgspec.Struct], keys: Sequence[str]) -> str:
    """What a key takes, in the words of its type: a regular expression is no answer to everybody. "" without any."""
    metas = (part for part in _type_of(kind, keys) if isinstance(part, msgspec.Meta))
    return next((meta.description for meta in metas if meta.description), "")


def _type_of(kind: type[msgspec.Struct], keys: Sequence[str]) -> list[Any]:
    """The type of what stands at a key, with all that it is made of; nothing for a key that there is not.

    What is in a list or may be absent has no key of its own.
    """
    parts: list[Any] = [kind]
    for key in keys:
        struct = next((part for part in parts if _is_struct(part)), None)
        fields = () if struct is None else msgspec.structs.fields(struct)
        parts = next((list(_parts(field.type)) for field in fields if field.encode_name == key), [])
    return parts


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from _parts(inner)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _keys_of(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_encode_fields__


def _line_of(node: yaml.Node | None, keys: Sequence[str]) -> int:
    line = 1
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        for name, value in node.value:
            if name.value == key:
                line, node = name.start_mark.line + 1, value
                break
    return line
