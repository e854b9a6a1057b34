"""Small models that hold one trap each, filled from an explicit generator; no engine and no data here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 13  # no world of 2, 3 or 4 divides it
LENGTH = 6

Builder = Callable[[], nn.Module]


def build(builder: Builder, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a model whose every parameter comes from ``seed``, norms included: a reset would otherwise go unseen."""
    model = builder().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = max(parameter.shape[-1], 1) ** -0.5 if parameter.ndim > 1 else 0.5
            drawn = torch.empty(parameter.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
            parameter.copy_(drawn * bound + (1 if parameter.ndim == 1 else 0))
    return model


class Mlp(nn.Module):
    """Linear layers with tanh between; the smoothness keeps rounding from becoming a kink."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=bias) for n, m in pairwise(widths))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            rows = torch.tanh(layer(rows))
        output: torch.Tensor = self.layers[-1](rows)
        return output


class Pair(nn.Module):
    """Two linears that a tensor parallel plan can split by columns and rows."""

    def __init__(self, width: int, mult: int = 4) -> None:
        super().__init__()
        self.inward = nn.Linear(width, mult * width)
        self.outward = nn.Linear(mult * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outward(torch.tanh(self.inward(rows)))
        return output


def stack(width: int, mults: tuple[int, ...] = (3, 4, 3)) -> nn.Module:
    """Chain pairs; a multiplier of 3 gives worlds of 2 and 4 uneven shards."""
    return nn.Sequential(*(Pair(width, mult) for mult in mults))


class Rooted(nn.Module):
    """A linear of the root's own, before and beside a stack of pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.pairs = stack(width)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.pairs(torch.tanh(self.entry(rows))) + self.shift
        return output


class Block(nn.Module):
    """Pre-normed causal attention of two heads and a feed-forward part, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.feed = Pair(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: torch.Tensor = x + self.feed(self.norm(x))
        return output


class Attention(nn.Module):
    """No bias on the keys: softmax ignores it, so its gradient would be nothing but rounding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Transformer(nn.Module):
    """A decoder; ``vocabulary`` rows rarely divide, and a tied head uses the embedding a second time."""

    def __init__(
        self, *, blocks: int = 2, width: int = 8, vocabulary: int = VOCABULARY, tied: bool = False
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


class ChunkedHead(nn.Module):
    """Embedding, body, norm and head; the forward can stop before the head, which then runs alone, chunk by chunk."""

    def __init__(self, *, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.body = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, to_the_head: bool = False) -> torch.Tensor:
        trunk: torch.Tensor = self.norm(torch.tanh(self.body(self.embed(tokens))))
        return self.head(trunk) if to_the_head else trunk


class NoInputs(nn.Module):
    """A forward without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self) -> torch.Tensor:
        return self.weight @ self.weight


class Twice(nn.Module):
    """The inner unit runs twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outer(torch.tanh(self.inner(torch.tanh(self.inner(rows)))))
        return output


class Fork(nn.Module):
    """Two branches side by side, both returned."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.left(rows)), torch.tanh(self.right(rows))


class Choice(nn.Module):
    """``which`` picks the branch that runs; the other one gets no gradient."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.exit = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        output: torch.Tensor = self.exit(torch.tanh(self.branches[which](torch.tanh(self.entry(rows)))))
        return output


class Adapted(nn.Module):
    """Frozen linears with trainable low-rank adapters, and a frozen unit that nothing trains."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=False):
            rows = torch.tanh(frozen(rows) + up(down(rows)))
        output: torch.Tensor = self.frozen[2](rows)
        return output


class Mixed(nn.Module):
    """Frozen and trainable parameters in one unit, and one whose weight never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.idle = nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)
        self.last.weight.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.tanh(self.first(rows)))
        return output


class Crumbs(nn.Module):
    """Parameters smaller than any world: one element, a row, and a matrix of ``num_rows``, which may be none."""

    def __init__(self, num_rows: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.row = nn.Parameter(torch.empty(1, 3))
        self.few = nn.Parameter(torch.empty(num_rows, 3))
        self.linear = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.tanh(rows @ self.few.T).sum(1, keepdim=True)
        output: torch.Tensor = self.linear(rows * self.row) * self.scale + summed
        return output


class Normed(nn.Module):
    """Batch statistics: buffers that the forward changes, differently on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("offset", torch.arange(3.0), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.norm(torch.tanh(self.first(rows)))) + self.offset
        return output


@dataclass
class Scores:
    """An output or input that is neither tensor nor container known to torch."""

    main: torch.Tensor
    label: str
    aside: torch.Tensor | None = None


class Wrapping(nn.Module):
    """A unit that gives its result in another shape: ``kind`` names a container."""

    def __init__(self, kind: str, width: int = 5) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> object:
        left, right = torch.tanh(self.left(rows)), torch.tanh(self.right(rows))
        match self.kind:
            case "tuple":
                return left, (right, "a word", None)
            case "dict":
                return {"left": left, "right": [right], "count": 3}
            case "dataclass":
                return Scores(main=left, label="a word", aside=right)
        raise ValueError(self.kind)


class Unwrapping(nn.Module):
    """A root over a wrapping unit, whose output it opens and feeds to a last unit."""

    def __init__(self, kind: str, *, returns: str | None = None) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.inner = Wrapping(kind)
        self.outer: nn.Module = nn.Linear(5, 5) if returns is None else Wrapping(returns)

    def forward(self, rows: torch.Tensor) -> object:
        left, right = tensors_of(self.inner(torch.tanh(self.entry(rows))))
        return self.outer(left * right)


class Passing(nn.Module):
    """A unit that may hand its input on unchanged, beside one that works."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.gate = Gate(width)
        self.exit = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, weighed = self.gate(torch.tanh(self.entry(rows)))
        output: torch.Tensor = self.exit(hidden + weighed)
        return output


class Gate(nn.Module):
    """Returns its very input and a function of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, torch.tanh(rows * self.weight)


class Vision(nn.Module):
    """A child is used through a method that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.projector = nn.Linear(6, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.projector(self.encoder.encode(images))
        return output


class Encoder(nn.Module):
    """Patches to features, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 6, kernel_size=3, stride=3)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = torch.tanh(self.patches(images)).flatten(2).transpose(1, 2)
        return features

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.encode(images)


def tensors_of(value: object) -> list[torch.Tensor]:
    """List the tensors of an output of whatever shape, in order."""
    match value:
        case torch.Tensor():
            return [value]
        case dict():
            return [t for item in value.values() for t in tensors_of(item)]
        case list() | tuple():
            return [t for item in value for t in tensors_of(item)]
        case Scores():
            return tensors_of([value.main, value.aside])
    return []


MLP: Builder = partial(Mlp, 5, 7, 6, 3)
TRANSFORMER: Builder = Transformer
TIED: Builder = partial(Transformer, tied=True)
