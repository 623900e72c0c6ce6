"""The loop: one block (or an unshared stack) applied to the tokens again and again.

    h_0 = e;   h_{t+1} = injection(h_t, e, block(norm(h_t + e + embedding(t))) + lora_t);   y = readout(h_1 .. h_T)

The block output, its residual stream included, is added to the decayed state (the OpenMythos form of systems.md section 2).
A token that has halted keeps its state, its block input, its key and its value from then on. In training halted tokens are
computed and masked; in evaluation they are skipped. Both give the same result.

What stands above is F, one whole loop. A solver other than Euler evaluates F several times per loop, all with the t of the
loop and with the same tokens halted; a halted token keeps its state, and the others see it as in its last evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.block import Block, KeysValues, Selection, layer_norm
from rdvit.models.depth import DepthLoRA, loop_embedding
from rdvit.models.experts import ROWS, Routing, switch_loss
from rdvit.models.injection import LTIInjection
from rdvit.models.merging import Groups, Merging, TokenMerger
from rdvit.models.readout import HaltingHead, HaltingState, SoftReadout
from rdvit.models.solver import solver_step


@dataclass
class LoopRecord:
    """What a run of the loop gives: the read-out and how it came about.

    Attributes:
        tokens_BND: The read-out.
        loops: Loops that were run; fewer than asked for where every token had halted.
        residuals_TB: Relative step size ``|h_{t+1} - h_t| / |h_t|`` of each loop and image, without gradient. Of SReT: of each
            pass of a block, stage after stage.
        states: h_1 .. h_T, if asked for.
        weights_BNT: Read-out weights of each token over the loops, of ACT or of the soft mixture; sum 1. None where the
            last state is read.
        steps_BN: Loops until each token halted (n). None without halting.
        ponder_BN: Ponder cost n + R, with gradient. None without halting.
        gates_TBNE: Gate weight of each expert for each token, without gradient; 0 for tokens that were not routed; the mean
            over a solver's evaluations. None without experts.
        balance: Mean Switch balance term over the loops, with gradient. None without experts.
        merged: Share of the tokens that had merged away at the end; what stands above is on the whole grid all the same.
    """

    tokens_BND: Tensor
    loops: int
    residuals_TB: Tensor
    states: list[Tensor] | None = None
    weights_BNT: Tensor | None = None
    steps_BN: Tensor | None = None
    ponder_BN: Tensor | None = None
    gates_TBNE: Tensor | None = None
    balance: Tensor | None = None
    merged: float = 0.0


class Carry(NamedTuple):
    """What one loop hands to the next: the state, the block input, the keys and values, all frozen for halted tokens.

    The encoded input goes with them, since tokens that merge take theirs along.
    """

    h_BND: Tensor
    e_BND: Tensor
    u_BND: Tensor
    memory: KeysValues


class Turn(NamedTuple):
    """Which loop it is, and what holds for all its evaluations."""

    t: int
    loops: int
    grid: tuple[int, ...]
    selection: Selection | None = None
    merger: TokenMerger | None = None


@dataclass
class Progress:
    """What a run of the loop has gathered so far.

    Attributes:
        h_BND: The state.
        loops: Loops that the run goes on to if nobody ends it.
        merger: What merges tokens.
        halting: Running sums of ACT.
        y_BND: The read-out of ACT without what active tokens have left.
        residuals: Of each loop, as in :class:`LoopRecord`; as many as loops were run.
        states: Of each loop, where they are kept.
        weights: Read-out weights of each loop, of ACT.
        routings: Gate weights and balance term of each loop, of experts.
    """

    h_BND: Tensor
    loops: int
    merger: TokenMerger | None = None
    halting: HaltingState | None = None
    y_BND: Tensor | float = 0.0
    residuals: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    routings: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Recurrence(nn.Module):
    """The loop with its parts, as the configuration chooses them.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, loops = config.embed_dim, config.loops
        self.blocks = nn.ModuleList(Block(config, experts=True) for _ in range(1 if config.shared_block else loops))
        self.input_norm = layer_norm(dim) if config.injection == "lti" else None
        self.injection = LTIInjection(dim) if config.injection == "lti" else None
        self.lora = DepthLoRA(dim, config.lora_rank, loops) if config.lora_rank else None
        self.halting = HaltingHead(dim, config.halting_bias) if config.halting == "act" else None
        self.soft = SoftReadout(dim) if config.readout == "soft" else None

    def forward(
        self,
        e_BND: Tensor,
        grid: tuple[int, ...],
        loops: int,
        halts_B: Tensor | None = None,
        skip: bool = False,
        keep_states: bool = False,
        merging: Merging | None = None,
    ) -> LoopRecord:
        """Run the loop.

        Args:
            e_BND: Encoded input.
            grid: Token grid of e, in C order.
            loops: Number of loops, at least 1.
            halts_B: For each image 1 if its tokens halt by ACT, 0 if they all run to the end; None switches halting off.
            skip: Leave halted tokens out of the computation (evaluation) instead of masking them (training).
            keep_states: Return the states of all loops that were run.
            merging: Merge tokens; the steps of its schedule are the loops.

        Raises:
            ModelError: If the loops are fewer than 1 or more than an unshared stack has blocks, if halting is asked of a
                model without a halting head, or merging in training, or by a schedule that goes on while tokens halt.
        """
        *_, progress = self.run(e_BND, grid, loops, halts_B, skip, keep_states, merging)
        return self.record(progress, keep_states)

    def run(
        self,
        e_BND: Tensor,
        grid: tuple[int, ...],
        loops: int,
        halts_B: Tensor | None = None,
        skip: bool = False,
        keep_states: bool = False,
        merging: Merging | None = None,
    ) -> Iterator[Progress]:
        """The loop of :meth:`forward`, with a stop after each turn, so that it can be left there.

        Yields:
            What has gathered so far, each time the same object; :meth:`record` says what the loop gives if it ends there.
        """
        self._check(loops, halts_B)
        merger = None if merging is None or not merging.rate else self._merger(merging, e_BND.shape[1], loops, halts_B)
        progress, carry = Progress(e_BND, loops, merger), None
        for t in range(loops):
            selection = _select(progress.halting, skip) if progress.halting is not None else None
            if selection is not None and selection.index_BM is not None and selection.index_BM.shape[1] == 0:
                break  # every token has halted
            before_BND = progress.h_BND
            with self._gradient(t, loops):
                carry, routing = self._run_step(Turn(t, loops, grid, selection, merger), e_BND, before_BND, carry)
                progress.h_BND = h_BND = carry.h_BND
                before_BND = before_BND if merger is None else merger.align(before_BND)
                if halts_B is not None and t == 0:
                    progress.halting = HaltingState(h_BND, self.config.halting_epsilon)
                halting = progress.halting
                if routing:
                    active_BN = None if halting is None else ~halting.halted_BN
                    gates_BME, balance = _whole(routing, selection, active_BN)
                    progress.routings.append((gates_BME if merger is None else merger.unmerge(gates_BME), balance))
                if halting is not None and halts_B is not None and self.halting is not None:
                    p_BN = self.halting(h_BND) * halts_B[:, None]
                    progress.weights.append(halting.update(p_BN, last=t == loops - 1))
                    progress.y_BND = progress.y_BND + progress.weights[-1][..., None].to(h_BND.dtype) * h_BND
            progress.residuals.append(relative_step(before_BND, h_BND, None if merger is None else merger.mass_BM))
            if keep_states or self.soft is not None:
                progress.states.append(h_BND if merger is None else merger.unmerge(h_BND))
            yield progress

    def record(self, progress: Progress, keep_states: bool = False) -> LoopRecord:
        """What the loop gives if it ends here, which is what a run of so many loops gives.

        Tokens that have not halted then give what they have left to this loop, as they do to the last one.
        """
        p, ran = progress, len(progress.residuals)
        record = LoopRecord(p.h_BND, ran, torch.stack(p.residuals), list(p.states) if keep_states else None)
        if p.halting is not None and isinstance(p.y_BND, Tensor):
            y_BND, weights = p.y_BND, p.weights
            if ran < p.loops:
                rest_BN = p.halting.rest_BN
                y_BND = y_BND + rest_BN[..., None].to(y_BND.dtype) * p.h_BND
                weights = [*weights[:-1], weights[-1] + rest_BN]
            record.tokens_BND, record.weights_BNT = y_BND, torch.stack(weights, dim=-1)
            record.steps_BN, record.ponder_BN = p.halting.steps_BN, p.halting.ponder_BN
        elif self.soft is not None:
            record.tokens_BND, record.weights_BNT = self.soft(p.states)
        if p.routings:
            record.gates_TBNE = torch.stack([gates.detach() for gates, _ in p.routings])
            balances_T = torch.stack([balance for _, balance in p.routings])
            record.balance = balances_T.sum() / (balances_T > 0).sum().clamp(min=1)  # it is 0 where nobody was active
        return record if p.merger is None or p.merger.groups is None else _unmerged(record, p.merger.groups)

    @contextmanager
    def _gradient(self, t: int, loops: int) -> Iterator[None]:
        """Loop t without gradient if it lies before the last ``backprop_loops`` (truncated back-propagation)."""
        without = 0 if self.config.backprop_loops is None else loops - self.config.backprop_loops
        with torch.set_grad_enabled(torch.is_grad_enabled() and t >= without):
            yield
        if t == without - 1:
            torch.clear_autocast_cache()  # before PyTorch 2.10 it keeps casts without gradient (pytorch/pytorch#65766)

    def _merger(self, merging: Merging, tokens: int, loops: int, halts_B: Tensor | None) -> TokenMerger:
        if self.training:
            raise ModelError("tokens are merged after training, not in it", hint="model.eval()")
        if halts_B is not None and merging.schedule != "single":
            raise ModelError(
                f"merging schedule '{merging.schedule}' goes on merging while tokens halt",
                hint="schedule single or halting none",
            )
        return TokenMerger(merging, tokens, loops)

    def _check(self, loops: int, halts_B: Tensor | None) -> None:
        if loops < 1:
            raise ModelError(f"expected at least 1 loop, found {loops}")
        if not self.config.shared_block and loops > len(self.blocks):
            raise ModelError(
                f"preset '{self.config.preset}' stacks {len(self.blocks)} different blocks and cannot run {loops} loops",
                hint="more loops than in training need a shared block, e.g. preset rdvit",
            )
        if halts_B is not None and self.halting is None:
            raise ModelError(
                "halting 'act' was asked for, but this model was built without a halting head", hint="halting none"
            )

    def _run_step(self, turn: Turn, e_BND: Tensor, h_BND: Tensor, carry: Carry | None) -> tuple[Carry, list[Routing]]:
        if self.config.checkpoint_loops and torch.is_grad_enabled():
            if turn.selection is None and turn.merger is None:
                carry = None  # a checkpoint keeps what it is given, and all tokens are new
            return checkpoint(self._step, turn, e_BND, h_BND, carry, use_reentrant=False)
        return self._step(turn, e_BND, h_BND, carry)

    def _step(self, turn: Turn, e_BND: Tensor, h_BND: Tensor, carry: Carry | None) -> tuple[Carry, list[Routing]]:
        """One step of the solver; the routing of each of its evaluations."""
        routings: list[Routing] = []

        def loop(z_BND: Tensor) -> Tensor:
            nonlocal carry
            carry, routing = self._evaluate(turn, e_BND, z_BND, carry)
            routings.extend([] if routing is None else [routing])
            return carry.h_BND

        align = {} if turn.merger is None else {"align": turn.merger.align}
        new_BND = solver_step(self.config.solver, loop, h_BND, self.config.step_size, **align)
        assert carry is not None
        if turn.selection is not None and self.config.step_size != 1:
            new_BND = turn.selection.freeze(h_BND, new_BND)  # (1 - dt) h + dt h need not be h
        return carry._replace(h_BND=new_BND), routings

    def _evaluate(self, turn: Turn, e_BND: Tensor, h_BND: Tensor, carry: Carry | None) -> tuple[Carry, Routing | None]:
        """F, one loop: block input, block, LoRA, injection; halted tokens keep all they had."""
        t, loops, grid, selection, merger = turn
        e_BND = e_BND if carry is None else carry.e_BND
        h_BMD, e_BMD = (x_BND if selection is None else selection.gather(x_BND) for x_BND in (h_BND, e_BND))
        u_BMD = self._block_input(h_BMD, e_BMD, t)
        u_BND = u_BMD if selection is None or carry is None else selection.write(carry.u_BND, u_BMD)
        block = self.blocks[0 if self.config.shared_block else t]
        v_BMD, memory, routing = block(u_BND, grid, selection, None if carry is None else carry.memory, t, loops, merger)
        if merger is not None:  # tokens may just have merged
            h_BND, e_BND, u_BND = (merger.align(x_BND) for x_BND in (h_BND, e_BND, u_BND))
            h_BMD, e_BMD = (x_BND if selection is None else selection.gather(x_BND) for x_BND in (h_BND, e_BND))
        if self.lora is not None:
            v_BMD = v_BMD + self.lora(v_BMD, t)
        if self.injection is not None:
            v_BMD = self.injection(h_BMD, e_BMD, v_BMD)
        h_BND = v_BMD if selection is None else selection.write(h_BND, v_BMD)
        return Carry(h_BND, e_BND, u_BND, memory), routing

    def _block_input(self, h_BMD: Tensor, e_BMD: Tensor, t: int) -> Tensor:
        """What the block reads in loop t: the state with the loop embedding, and the encoded input, under one norm."""
        if self.config.loop_embedding:
            h_BMD = h_BMD + loop_embedding(t, h_BMD.shape[-1], h_BMD.device).to(h_BMD.dtype)
        return h_BMD if self.input_norm is None else self.input_norm(h_BMD + e_BMD)


def _select(halting: HaltingState, skip: bool) -> Selection:
    """The tokens that go on: named by index to skip the others, or only marked."""
    halted_BN = halting.halted_BN
    if not skip:
        return Selection(halted_BN, None)
    most = int((~halted_BN).sum(1).max())  # the one synchronisation that a gather needs
    most = min(-(-most // ROWS) * ROWS, halted_BN.shape[1])
    if most == halted_BN.shape[1]:
        return Selection(halted_BN, None)
    order_BN = halted_BN.to(torch.uint8).argsort(dim=1, stable=True)  # active tokens first, in grid order
    return Selection(halted_BN, order_BN[:, :most])


def relative_step(before_BND: Tensor, after_BND: Tensor, mass_BN: Tensor | None = None) -> Tensor:
    """``|after - before| / |before|`` of each image (B,), without gradient."""
    with torch.no_grad():
        root = 1.0 if mass_BN is None else mass_BN.sqrt()[..., None]  # a token of mass s counts like s of the grid
        moved_B = (root * (after_BND - before_BND).float()).flatten(1).norm(dim=1)
        return moved_B / (root * before_BND.float()).flatten(1).norm(dim=1).clamp(min=1e-12)


def _unmerged(record: LoopRecord, groups: Groups) -> LoopRecord:
    """The record of merged tokens as one of all tokens. States and gates, whose numbers vary, were unmerged loop by loop."""
    record.merged = groups.absorbed_BR.shape[1] / groups.index_BN.shape[1]
    if record.tokens_BND.shape[1] != groups.index_BN.shape[1]:
        record.tokens_BND = groups.unmerge(record.tokens_BND)
    if record.steps_BN is not None and record.ponder_BN is not None and record.weights_BNT is not None:
        record.steps_BN, record.ponder_BN = (x_BM.gather(1, groups.index_BN) for x_BM in (record.steps_BN, record.ponder_BN))
        record.weights_BNT = groups.unmerge(record.weights_BNT)
    return record


def _whole(routings: list[Routing], selection: Selection | None, active_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate weights (B, N, E) over all tokens, 0 where a token was not active, and the balance term of the active ones.

    The mean of both over the evaluations of one loop.
    """
    active_BM = active_BN
    if active_BN is None or selection is None:
        active_BM = None
    elif selection.index_BM is not None:
        active_BM = active_BN.gather(1, selection.index_BM)
    balance = torch.stack([switch_loss(routing, active_BM) for routing in routings]).mean(0)
    gates_BME = torch.stack([routing.gates_BME for routing in routings]).mean(0)
    if active_BM is None:
        return gates_BME, balance
    gates_BME = gates_BME * active_BM[..., None]
    if selection is not None and selection.index_BM is not None and active_BN is not None:
        empty_BNE = gates_BME.new_zeros(*active_BN.shape, gates_BME.shape[-1])
        gates_BME = empty_BNE.scatter(1, selection.index_BM[..., None].expand_as(gates_BME), gates_BME)
    return gates_BME, balance
