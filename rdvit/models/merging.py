"""Token merging at inference, without retraining (ToMe, arXiv:2210.09461, from its mathematics; systems.md sections 13, 14).

Similar tokens are averaged after an attention, and from there on one token stands for several: its mass is their number,
``log mass`` joins the logits of its key (proportional attention), and means are weighted by mass. At the end every token
of the grid takes the value of the one that stands for it, so length and order come back; what was averaged does not.

Where the same block runs again and again, repeated merging is ruinous and one merge at the first step is not (MergeOver,
arXiv:2608.13141): that is the schedule ``single``. The others are there to compare.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rdvit.errors import ConfigError, ModelError
from rdvit.models.attention import add_tokens, gather_tokens

_log = logging.getLogger("rdvit")

SIMILARITIES = 2**21
"""So many similarities of token pairs are in memory at once: 8 MiB."""

Schedule = Literal["single", "constant", "linear", "exponential"]


@dataclass(frozen=True)
class Merging:
    """How much is merged, and when.

    Attributes:
        rate: Share of a stage's tokens, at least 0 and below 1; 0 is no merging. At most half can merge in one step.
        schedule: ``single``: all in the first step. ``constant`` and ``linear``: the same number over all steps, spread
            evenly or falling to 0. ``exponential``: ``rate * alpha**step`` of the stage's tokens in each step.
        alpha: Of ``exponential``.

    Raises:
        ConfigError: If the rate is not in [0, 1).
    """

    rate: float
    schedule: Schedule = "single"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ConfigError(
                f"expected a merging rate of at least 0 and below 1, the share of tokens to merge away, found {self.rate:g}"
            )

    def wanted(self, tokens: int, step: int, steps: int) -> int:
        """Tokens that step 0 .. steps - 1 of a stage that began with ``tokens`` should merge away, by the schedule alone."""
        total = self.rate * tokens
        if self.schedule == "single":
            share = 1.0 if step == 0 else 0.0
        elif self.schedule == "exponential":
            share = self.alpha**step
        elif self.schedule == "constant" or steps == 1:
            share = 1 / steps
        else:
            share = 2 / steps * (1 - step / (steps - 1))
        return math.floor(total * share + 1e-6)


def safe_count(tokens: int, wanted: int, divisor: int = 1) -> int:
    """How many of ``tokens`` may merge at once: what is left is a multiple of ``divisor``, and at most half go.

    Rounded up to reach a multiple where half of the tokens allow it: of 784 in groups of 8, 196 become 200.

    Raises:
        ModelError: If the tokens themselves are no multiple.
    """
    if tokens % divisor:
        raise ModelError(f"expected a number of tokens that {divisor} divides, found {tokens}")
    if wanted <= 0:
        return 0
    least = -(-(tokens - tokens // 2) // divisor) * divisor
    return tokens - max((tokens - wanted) // divisor * divisor, least)


@dataclass(frozen=True, eq=False)
class Groups:
    """N tokens in M groups, in the order of their keepers: the way there and back.

    Attributes:
        index_BN: Group of each token.
        keeper_BM: The token whose place the group takes.
        absorbed_BR: The other tokens, R = N - M.
        weight_BN: Mass of each token, float32.
        mass_BM: Mass of each group, the sum of its tokens', float32.
    """

    index_BN: Tensor
    keeper_BM: Tensor
    absorbed_BR: Tensor
    weight_BN: Tensor
    mass_BM: Tensor

    def merge(self, x_BND: Tensor) -> Tensor:
        """Means (B, M, D) over the groups, weighted by mass; a token alone keeps its value bit for bit."""
        kept_BMD = gather_tokens(x_BND, self.keeper_BM)
        weight_BM = self.weight_BN.gather(1, self.keeper_BM)
        into_BR = self.index_BN.gather(1, self.absorbed_BR)
        absorbed_BRD = gather_tokens(x_BND, self.absorbed_BR) * self.weight_BN.gather(1, self.absorbed_BR)[..., None]
        sums_BMD = add_tokens(kept_BMD * weight_BM[..., None], into_BR, absorbed_BRD)
        means_BMD = (sums_BMD / self.mass_BM[..., None]).to(x_BND.dtype)
        return torch.where((self.mass_BM > weight_BM)[..., None], means_BMD, kept_BMD)

    def unmerge(self, x_BMD: Tensor) -> Tensor:
        """The value of its group for each token, (B, N, D)."""
        return gather_tokens(x_BMD, self.index_BN)

    def then(self, later: Groups) -> Groups:
        """This merge and one of its result as one: unmerging it is unmerging both, last in, first out."""
        absorbed_BR = torch.cat([self.absorbed_BR, self.keeper_BM.gather(1, later.absorbed_BR)], dim=1)
        return Groups(
            later.index_BN.gather(1, self.index_BN),
            self.keeper_BM.gather(1, later.keeper_BM),
            absorbed_BR,
            self.weight_BN,
            later.mass_BM,
        )


@torch.no_grad()
def match(keys_BHMK: Tensor, mass_BM: Tensor, count: int) -> Groups:
    """Bipartite soft matching: each token of A finds the most similar one of B, and the ``count`` most similar pairs merge.

    A holds every second token, from the first, B the others. Similarity is the cosine of the keys' mean over the heads,
    masses left out. Several tokens of A may join one of B. What is left stays in its order.

    Args:
        keys_BHMK: Keys of the tokens.
        mass_BM: Mass of each.
        count: Tokens that merge away, at most half.
    """
    best_BA, partner_BA = most_similar(F.normalize(keys_BHMK.float().mean(1), dim=-1, eps=1e-6))
    merged_BR = best_BA.argsort(dim=1, descending=True, stable=True)[:, :count]
    absorbed_BR, into_BR = 2 * merged_BR, 2 * partner_BA.gather(1, merged_BR) + 1
    gone_BM = torch.zeros_like(mass_BM, dtype=torch.bool).scatter(1, absorbed_BR, True)
    place_BM = (~gone_BM).cumsum(1) - 1
    index_BM = place_BM.scatter(1, absorbed_BR, place_BM.gather(1, into_BR))
    keeper_BL = gone_BM.to(torch.uint8).argsort(dim=1, stable=True)[:, : mass_BM.shape[1] - count]
    mass_BL = mass_BM.gather(1, keeper_BL).scatter_add(1, index_BM.gather(1, absorbed_BR), mass_BM.gather(1, absorbed_BR))
    return Groups(index_BM, keeper_BL, absorbed_BR, mass_BM, mass_BL)


def most_similar(metric_BMK: Tensor) -> tuple[Tensor, Tensor]:
    """For every second token, from the first: its largest product with one of the others, and with which, both (B, A).

    Rows are taken a few at a time: all products at once would need more memory than the merge saves.
    """
    first_BAK, other_BKL = metric_BMK[:, ::2], metric_BMK[:, 1::2].mT
    rows = max(1, SIMILARITIES // (len(metric_BMK) * other_BKL.shape[2]))
    with torch.autocast(metric_BMK.device.type, enabled=False):
        found = [(rows_BRK @ other_BKL).max(-1) for rows_BRK in first_BAK.split(rows, dim=1)]
    return torch.cat([values for values, _ in found], dim=1), torch.cat([indices for _, indices in found], dim=1)


class TokenMerger:
    """Merges the tokens of one stage in one run, step by step, and knows the way back to the grid.

    Args:
        merging: How much, and when.
        tokens: Tokens of the stage's grid.
        steps: Steps that the stage runs.
        divisor: What must divide the number of tokens that are left.

    Attributes:
        groups: The tokens of the grid in those that are left; None before the first merge.
    """

    def __init__(self, merging: Merging, tokens: int, steps: int, divisor: int = 1) -> None:
        self.merging, self.tokens, self.steps, self.divisor = merging, tokens, steps, divisor
        self.groups: Groups | None = None
        self._latest: Groups | None = None
        self._next_step = 0

    def after_attention(self, keys_BHMK: Tensor, step: int) -> Groups | None:
        """The merge that is due after the attention of a step, asked for once in a step; None where nothing is."""
        if step < self._next_step:
            return None
        self._next_step = step + 1
        left = keys_BHMK.shape[2]
        wanted = self.merging.wanted(self.tokens, step, self.steps)
        count = safe_count(left, wanted, self.divisor)
        if count < wanted:
            _say(self.merging.rate, "at most half of the tokens can merge at once")
        elif count > wanted:
            _say(self.merging.rate, f"rounded up to what leaves a multiple of {self.divisor} tokens")
        if not count:
            return None
        mass_BM = self.mass_BM if self.mass_BM is not None else keys_BHMK.new_ones(len(keys_BHMK), left, dtype=torch.float32)
        self._latest = match(keys_BHMK, mass_BM, count)
        self.groups = self._latest if self.groups is None else self.groups.then(self._latest)
        return self._latest

    def align(self, x_BND: Tensor) -> Tensor:
        """Tokens as they lay before the latest merge, merged alike; those that are merged already as they are."""
        if self._latest is None or x_BND.shape[1] == self._latest.mass_BM.shape[1]:
            return x_BND
        return self._latest.merge(x_BND)

    def unmerge(self, x_BMD: Tensor) -> Tensor:
        """Tokens back on the grid, (B, N, D)."""
        return x_BMD if self.groups is None else self.groups.unmerge(x_BMD)

    @property
    def merged(self) -> int:
        """How many tokens have merged away."""
        return 0 if self.groups is None else self.groups.absorbed_BR.shape[1]

    @property
    def mass_BM(self) -> Tensor | None:
        """Mass of the tokens that are left; None before the first merge."""
        return None if self.groups is None else self.groups.mass_BM


@lru_cache(maxsize=64)  # once, not for every image
def _say(rate: float, reason: str) -> None:
    _log.info("token merging at %g is adjusted: %s", rate, reason)
