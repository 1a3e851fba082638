"""What a kernel is called, what kind of work it does, and what its figures look like. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from gpu_hpc_exporter.model import Category, Pattern
from gpu_hpc_exporter.text import bounded

MAX_NAME: Final = 16_384
"""Characters of a demangled name that are looked at: what tells kernels apart comes early."""
UNNAMED: Final = "unnamed"
OTHER: Final = "other"
"""All kernels of a job without a series of their own; a kernel of that name gets brackets."""


def signature(name: str) -> str:
    """A stable name of a kernel for a label, at most 128 bytes, from its demangled or plain name.

    Return type, namespaces, template arguments and parameters are dropped; the innermost functor of the template
    arguments stays in brackets, since it tells what a generic kernel does: `vectorized_elementwise_kernel[MulFunctor]`.
    Numbers at the end of generated names are dropped too. A signature's signature is itself.
    """
    bare, functor = _parts(name[:MAX_NAME])
    bare = _folded(bare)
    functor = _folded(functor)
    found = bounded(f"{bare}[{functor}]" if functor and functor != bare else bare) or UNNAMED
    return f"{OTHER}[]" if found == OTHER else found


def name_within(mangled: str) -> str:
    """The function's name within a mangled one that nobody could demangle; the text itself where there is none.

    `_ZN2at6native13reduce_kernelI…` → `reduce_kernel`.
    """
    found, position = "", _PREFIX.match(mangled)
    place = position.end() if position else len(mangled)
    while length := _LENGTH.match(mangled, place):
        end = length.end() + int(length[0])
        found, place = mangled[length.end() : end] or found, end
    return found or mangled


_PREFIX: Final = re.compile(r"_ZN?[rVK]*")
_LENGTH: Final = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


@lru_cache(maxsize=4096)
def category(kernel: str) -> Category:
    """What kind of work a kernel with this signature does; by words in its name, the most telling first.

    A name that torch.compile made lists all that is fused: how it begins is what tells.
    """
    return next((kind for kind, pattern in _CATEGORIES if pattern.search(kernel)), "other")


_WORDS: Final[tuple[tuple[Category, str], ...]] = (
    # Inductor's kinds: foreach, persistent_reduction, pointwise, reduction, split_scan, unknown; and of old. Its
    # templates (tem) are what their names say.
    ("generated", r"^triton_(?:for|per|poi|red|spl|unk|fused)_"),
    (
        "communication",
        (
            r"nccl|rccl|nvshmem|mscclpp|(?:(?<![a-z])all|(?-i:All))_?(?:reduce|gather|to_?all)|reduce_?scatter|sendrecv|"
            r"cross_device|one_shot|two_shot|deepep|multimem"
        ),
    ),
    ("attention", r"attention|attn|flash_(?:fwd|bwd)|flash_?infer|fmha|sdpa|(?:^|_)mha|mla_|paged_"),
    (
        "optimizer",
        (
            r"(?<![a-z])(?:n|r|cpu|fused)?adam|(?-i:Adam)|(?:^|_|\[)sgd|adagrad|rmsprop|optimizer|multi_?tensor_?apply|"
            r"(?:^|_)(?:lamb|lion)_"
        ),
    ),
    (
        "convolution",
        r"convol(?:ution|ve)|(?:(?<![a-z])(?:de|dw|sp|group|nchw|nhwc)?conv|(?-i:Conv))(?:_|[1-3]d|$)|fprop|dgrad|wgrad|winograd|im2col|col2im",
    ),
    (
        "gemm",
        r"^triton_tem_\w*mm(?:_|$)|gemm|gemv|matmul|nvjet|cijk_|xmma|cublas|cutlass|splitk|(?:^|_)mma(?:_|$)|(?:^|_)dot(?:_|$)",
    ),
    ("copy", r"copy|memcpy|catarray|transpose|(?:^|_)concat|permute"),
    ("generated", r"triton|fused_kernel|nvfuser|(?:^|_)fusion|inductor|(?:^|_)xla_"),
    (
        "reduction",
        r"reduc|softmax|norm(?!al(?:_|$))|logsumexp|argmax|argmin|cumsum|scan|(?:^|_|\[)(?:sum|mean)(?:_|ops|$)|welford",
    ),
    ("elementwise", r"elementwise|element_wise|pointwise|(?:^|_)fill|unary|binary|functor|activation|gelu|silu"),
)
_CATEGORIES: Final = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _WORDS)

# What counts as a functor: something that a generic kernel runs for each element or tile.
_FUNCTOR: Final = re.compile(
    r"(?i:functor)|Ops?$|_op$|[kK]ernel(?:_cuda|_impl|Impl)?$|_impl$|Impl$|cutlass|Gemm|Conv|Fmha|Attention"
)
_NO_NAME: Final = frozenset(
    {"operator", "const", "volatile", "unsigned", "signed", "long", "short", "auto", "decltype"}
)
_ANONYMOUS: Final = "(anonymous namespace)::"
_TAIL: Final = re.compile(r"(?:[._](?:\d+(?:de|[dec])?)++|[&*:])++", re.ASCII)
"""Numbers that compilers append: `_12345`, `.7`, and Triton's `_0d1d2de`; without a second try at any of them, which
would take for ever: anybody may name a kernel."""
_PIECE: Final = re.compile(r"[<>(){} ,]|[^<>(){} ,]+")


def _folded(name: str) -> str:
    plain = name.lstrip("_")
    tail = deque(_TAIL.finditer(plain), maxlen=1)  # looking for one at the end would begin anew at each
    return (plain[: tail[0].start()] if tail and tail[0].end() == len(plain) else plain) or plain


def _last(name: str) -> str:
    """The last component of a qualified name, without what points or refers to it, and without ABI tags (Numba's)."""
    return name.rstrip("&*:").rpartition("::")[2].partition("[abi:")[0]


def _parts(name: str) -> tuple[str, str]:
    """The bare name of the outermost function, and that of the innermost functor in its template arguments."""
    if name.isidentifier():
        return name, ""
    found = _Parts()
    for piece in _PIECE.findall(name.replace(_ANONYMOUS, "")):
        if not found.take(piece):
            break
    return _last(found.bare), found.functor


@dataclass(slots=True)
class _Parts:
    """What was found so far. angle: depth in template arguments; skipped: depth in parameters or a lambda therein."""

    bare: str = ""
    functor: str = ""
    functor_depth: int = 0
    angle: int = 0
    skipped: int = 0
    is_new_word: bool = False

    def take(self, piece: str) -> bool:
        """Whether the next piece matters."""
        if self.skipped:
            self.skipped += {"(": 1, "{": 1, ")": -1, "}": -1}.get(piece, 0)
        elif piece in "({":
            if self.bare and not self.angle:
                return False
            self.skipped = 1
        elif piece in "<>":
            self.angle = max(0, self.angle + (1 if piece == "<" else -1))
        elif piece == " ":
            self.is_new_word = self.is_new_word or not self.angle
        elif piece not in ",)}":
            self._take_word(piece)
        return True

    def _take_word(self, word: str) -> None:
        """What follows a blank is another word; what follows template arguments goes on with a qualified name."""
        if not self.angle:
            self.bare = word if self.is_new_word else self.bare + word
            self.is_new_word = False
        elif self.angle > self.functor_depth and (last := _last(word)) not in _NO_NAME and _FUNCTOR.search(last):
            self.functor, self.functor_depth = last, self.angle


class Runs(NamedTuple):
    """Executions of equal name, grid and block in one process, and the nanoseconds that they took in all."""

    executions: int
    ns: int

    def since(self, before: Runs) -> Runs:
        """What came after."""
        return Runs(self.executions - before.executions, self.ns - before.ns)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a kernel did in some minutes. `traced_s`: how long it was watched, in seconds of each process together.

    launches: outside of graphs; executions: all, which took `seconds` in all. steady: executions in groups of equal
    name, grid and block that ran often enough to be compared with themselves; deviation: the square root of their mean
    squared distance from their group's mean, in seconds. slower: `slowdown` of the group in which it is largest;
    is_shared: whether other jobs hold the GPU.
    """

    traced_s: float
    launches: int
    executions: int
    seconds: float
    steady: int
    deviation: float
    slower: float = 0.0
    is_shared: bool = False


MIN_GROUP: Final = 100
"""Executions that a group needs for its spread to tell anything, or its mean to be what is usual."""
_MIN_RECENT: Final = 10
_MANY_PER_S: Final = 1_000
_SHORT_S: Final = 50e-6
_FEW_PER_S: Final = 50
_LONG_S: Final = 1e-3
_MIN_STEADY_SHARE: Final = 0.5
_CONTENDED: Final = 5.0


def slowdown(minute: Runs, hour: Runs) -> float:
    """By how much a group's mean duration of the last minute exceeds that of the last hour, which includes the minute.

    0 where nothing can be told: fewer than 10 executions in the minute are chance, and fewer than 100 before it do not
    say what is usual. Where less than an hour is known, `hour` is what is known.
    """
    if minute.executions < _MIN_RECENT or hour.executions - minute.executions < MIN_GROUP or hour.ns <= 0:
        return 0.0
    return (minute.ns / minute.executions) / (hour.ns / hour.executions)


def pattern(seen: Behaviour) -> Pattern | None:
    """The one pattern that a kernel shows, if any (diagnosis.md section 3); the first of these that holds.

    `contended` comes first: it has its cause outside of the kernel, and makes one that is neither look long or jittery.
    """
    if seen.traced_s <= 0 or seen.executions <= 0 or not math.isfinite(seen.seconds):
        return None
    if seen.is_shared and seen.slower >= _CONTENDED:
        return "contended"
    mean_s = seen.seconds / seen.executions
    if seen.launches / seen.traced_s >= _MANY_PER_S and mean_s < _SHORT_S:
        return "many_short"
    if mean_s >= _LONG_S and seen.executions / seen.traced_s < _FEW_PER_S:
        return "few_long"
    if seen.steady >= max(MIN_GROUP, _MIN_STEADY_SHARE * seen.executions) and seen.deviation > mean_s:
        return "jittery"
    return None
