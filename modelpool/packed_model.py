"""A loaded model behind one call: a pack of tokens in, logits of chosen tokens out.

Contract: `PackedModel.wrap` refuses, with the reason, every model whose attention the plug-in would
not honour. It asserts that the plug-in took effect, allows only known layer types, limits the
length of models whose rotary embedding depends on their neighbours' positions, compares a short
packed forward of the tuned model with its ordinary one, and checks the sliding windows, which so
short a forward need not reach. After that `forward` can be trusted.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modelpool.attention.kv_view import KVLayer, KVView
from modelpool.attention.packed import OpaqueView, run_packed
from modelpool.checkpoint.architecture import ignored_window, max_positions, refusal
from modelpool.config import KeptWeights
from modelpool.errors import UnsupportedAttention, UnsupportedModelError
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.experts import quantise_experts
from modelpool.fast.lean_norm import replace_norms
from modelpool.fast.linear import let_go_of_file, pack_linears, parameter_count
from modelpool.fast.model_shape import ModelShape
from modelpool.fast.quantised import QuantisedLinear, Stored, quantise_linears, roundings
from modelpool.fast.thread_choice import ThreadChoice
from modelpool.fast.tuning import PLAIN, Tuning
from modelpool.forward import Forward, ForwardOutput, HiddenLayers, SizedForward
from modelpool.mixers.registry import moving_layer
from modelpool.outline import use_packed_attention
from modelpool.probe import (
    MOST_DIFFERENCE,
    ProbeView,
    allowed_difference,
    check_parity,
    probed,
)
from modelpool.recurrent import RecurrentLayer, StateKey

logger = logging.getLogger(__name__)

_Watch = Callable[[int, float], AbstractContextManager[None]]
_Pack = Sequence[tuple[int, int]]  # by row: first position and the one after the last

# Two texts, together and alone: tokens have other places in the packs than in the texts.
_PROBE_TOKENS = 9
# Allowed difference of logits, as a share of their spread, by the form of quantised weights.
_MOST_DIFFERENCE: Mapping[KeptWeights, float] = {"int8": MOST_DIFFERENCE, "int4": 0.5}
_OF_ROUTERS = 0.3  # added if there are routers: a small difference may choose another expert
_PROBE_PACKS: tuple[_Pack, ...] = (((0, 6), (0, 5)), ((6, 6), (5, 9)), ((6, 9), (9, 9)))
_ONE_TOKEN: tuple[_Pack, ...] = (((0, 1), (0, 0)),)


class PackedModel:
    """A `transformers` causal language model that runs on packs of tokens."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        vocab_size: int,
        max_positions: int,
        kv_layers: Mapping[int, KVLayer],
        tuning: Tuning = PLAIN,
        recurrent_layers: Mapping[StateKey, RecurrentLayer] | None = None,
    ) -> None:
        """Keep the parts; by default a forward has the CPU threads that torch is set to now."""
        self.name = name
        self.model = model
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.kv_layers = kv_layers
        self.recurrent_layers = recurrent_layers or {}
        self.threads: int = tuning.threads or torch.get_num_threads()
        self.thread_choice: ThreadChoice | None = None  # None: it always has all its threads
        self.bits_depend_on: str | None = None  # besides a token's own text: see `bit_trial`
        self.attention = tuning.attention
        self.attend = tuning.attention.load()
        self.device: torch.device = _input_device(model)
        self._is_spread = len({parameter.device for parameter in model.parameters()}) > 1
        # Entered around each forward, to measure its time: with the number of tokens in the pack,
        # and of the pairs of query and slot that attention computes.
        self.watch: _Watch = lambda *_: nullcontext()
        # A faster forward with the same logits: to the bit, or up to rounding for drafters.
        self.shortcut: Forward | None = None
        # The model's description, if a direct forward made from it gave the model's bits.
        self.shape: ModelShape | None = None
        # The same for CUDA: it copies a pack by itself, and may pad it.
        self.sized: SizedForward | None = None
        self.dtype: torch.dtype = model.dtype
        self.parameter_count = parameter_count(model)
        self.layer_devices = frozenset(
            {layer.device for layer in kv_layers.values()}
            | {layer.device for layer in self.recurrent_layers.values()}
        )
        self._count_kv()

    @property
    def is_portable(self) -> bool:
        """True if whole passes are in the C library: no CPU and no number of threads matters."""
        return bool(getattr(self.shortcut, "is_portable", False))

    @property
    def computed_by(self) -> str:
        """Backend that determines the bits of its logits."""
        if self.is_portable:
            return "C library"
        return f"torch {torch.__version__} on {self.device}"

    def _count_kv(self) -> None:
        self.kv_bytes_per_token = sum(
            layer.elements_per_token * layer.dtype.itemsize for layer in self.kv_layers.values()
        )

    @classmethod
    def wrap(
        cls,
        name: str,
        model: PreTrainedModel,
        vocab_size: int,
        tuning: Tuning = PLAIN,
        compare: bool = True,
    ) -> "PackedModel":
        """Check `model`, switch its attention to the plug-in, and tune it.

        Args:
            name: name of the member.
            model: model as transformers loaded it.
            vocab_size: ids that texts may have; logits beyond it are padding and are cut off.
            tuning: applied before the model is compared with its ordinary forward.
            compare: False if that was done before, by `modelpool.fast.agreement`.

        Raises:
            UnsupportedModelError: with the reason why packed attention would not be exact.
            torch.OutOfMemoryError: there is no room for a short forward.
        """
        field = f"pool.models[{name}]"
        _refuse(model, vocab_size, field)
        model.train(False)
        device = _input_device(model)
        rows = _probe_rows(device, vocab_size)
        probe = ProbeView(device, _PROBE_TOKENS, rows=len(rows))
        try:
            with torch.inference_mode():
                alone = [
                    model(input_ids=row[None], use_cache=False).logits[0]
                    for row in (rows if compare else ())
                ]
                use_packed_attention(model)
                _tune(model, tuning)
                longest = max_positions(model.config)
                outputs = alone[0].shape[-1] if compare else vocab_size
                packed = cls(name, model, outputs, longest, {}, tuning)
                packs = _PROBE_PACKS if compare else _ONE_TOKEN  # which shows layers and states
                got = torch.cat([packed._probe(probe, rows, pack) for pack in packs])
        except UnsupportedAttention as error:
            raise UnsupportedModelError(field, str(error)) from error
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too
        except (RuntimeError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(field, f"a trial forward failed: {error}") from error
        if compare:
            expected = torch.cat([_picked(alone, pack) for pack in _PROBE_PACKS])
            _check(field, model, probe, expected, got)
        return cls(
            name,
            model,
            vocab_size,
            packed.max_positions,
            probe.layers(),
            tuning,
            probe.recurrent,
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        """Run one pass over a pack.

        Args:
            tokens: [T] int64 on the host or the model's device.
            positions: positions of `tokens`, in the same form.
            view: where keys and values of this pack go, and what each token may attend to.
            logit_index: [n] int64, like these; the tokens of the pack whose logits are wanted.
            hidden: the hidden states that are wanted of all tokens.
        """
        with (
            self.watch(len(tokens), self.attend.attended(view)),
            self._threads_for(len(tokens)),
        ):
            if self.sized is not None:
                return self.sized(tokens, positions, view, logit_index, hidden)
            if self.device.type != "cpu":
                tokens, positions, logit_index = (
                    one.to(self.device, non_blocking=True)
                    for one in (tokens, positions, logit_index)
                )
            run = self.shortcut or self._forward
            return run(tokens, positions, view, logit_index, hidden)

    def _threads_for(self, tokens: int) -> AbstractContextManager[None]:
        choice = self.thread_choice
        if choice is None:
            return cpu_threads(self.threads)
        return choice.chosen(tokens)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in tokens to which packs are padded, rising; empty if packs run unpadded."""
        return () if self.sized is None else self.sized.sizes

    def prepare(
        self,
        arena: Callable[[int], tuple[Tensor, Tensor]],
        block_slots: int,
        hidden: HiddenLayers,
    ) -> None:
        """Prepare passes over keys and values to which nothing has been written yet.

        `arena` returns those of a layer by its number, [slots, ...], in blocks of `block_slots`
        slots.
        """
        if self.sized is not None:
            with torch.inference_mode():
                self.sized.prepare(lambda layer: arena(layer.number), block_slots, hidden)

    def pack_weights(self, every: bool = False, compare: bool = True) -> int:
        """Pack its linear layers where that pays, or `every` one; return the number of them.

        `Tuning.pack_weights` does the same in `wrap`; `compare` is as there.

        Raises:
            UnsupportedModelError: its logits would change.
        """
        field, parts = f"pool.models[{self.name}]", ((0, 6), (6, _PROBE_TOKENS))
        with torch.inference_mode():
            expected = probed(self.forward, self, parts)[0] if compare else None
            packed = pack_linears(self.model, every)
            if packed and expected is not None:
                check_parity(field, expected, probed(self.forward, self, parts)[0])
        return packed

    def quantise_weights(
        self,
        stored: Mapping[str, Stored] | None = None,
        only_stored: bool = False,
        weights: KeptWeights = "int8",
        in_int8: Collection[str] = (),
    ) -> None:
        """Keep its linear layers in int8 or int4, as `quantise_linears` does.

        Raises:
            UnsupportedModelError: its logits would change too much.
        """
        field, parts = f"pool.models[{self.name}]", ((0, 6), (6, _PROBE_TOKENS))
        with torch.inference_mode():
            expected, _ = probed(self.forward, self, parts)
            routed = quantise(self.name, self.model, stored, only_stored, weights, in_int8)
            let_go_of_file(self.model.parameters())
            try:
                got, _ = probed(self.forward, self, parts)
            except (RuntimeError, TypeError, AttributeError) as failed:  # such as reading a weight
                reason = f"weights: {weights}: a trial forward failed: {failed}"
                raise UnsupportedModelError(field, reason) from failed
        allowed = _MOST_DIFFERENCE[weights] + (_OF_ROUTERS if routed else 0.0)
        check_parity(field, expected, got, allowed, f"weights: {weights}")

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        """Store keys and values in `dtype` from now on; on the CPU, whose attention reads any."""
        self.kv_layers = {at: replace(one, dtype=dtype) for at, one in self.kv_layers.items()}
        self._count_kv()

    def check_hidden(self, layers: HiddenLayers) -> None:
        """Check that the model can return these hidden states.

        Raises `UnsupportedModelError` if not: with a drafter that reads them, every request would
        fail at its next token.
        """
        probe = ProbeView(self.device, 1, self.kv_layers)
        probe.begin(0, 1)
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            count = self.model.config.get_text_config().num_hidden_layers
            if layers[-1] > count:
                raise IndexError(f"it has {count} layers")
            with torch.inference_mode():
                self.forward(first, first, probe, first, layers)
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            reason = f"it has no hidden states of {list(layers)}, which a drafter reads: {error}"
            raise UnsupportedModelError(f"pool.models[{self.name}]", reason) from error

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        if self._is_spread:  # the head may be on any of the devices
            logit_index = logit_index.cpu()
        asked = {"output_hidden_states": list(hidden)} if hidden else {}
        opaque = OpaqueView(view, self.attend)
        output = run_packed(self.model, tokens, positions, opaque, logit_index, **asked)
        logits: Tensor = output.logits[0, :, : self.vocab_size]
        if not hidden:
            return ForwardOutput(logits)
        states = [output.hidden_states[index][0].to(logits.device) for index in hidden]
        return ForwardOutput(logits, torch.stack(states, dim=1))

    def _probe(self, view: ProbeView, rows: Sequence[Tensor], pack: _Pack) -> Tensor:
        view.begin_pack(pack)
        device = rows[0].device
        positions = torch.cat([torch.arange(*span, device=device) for span in pack])
        index = torch.arange(len(positions), device=device)
        return self.forward(_picked(rows, pack), positions, view, index).logits


def quantise(
    name: str,
    model: PreTrainedModel,
    stored: Mapping[str, Stored] | None = None,
    only_stored: bool = False,
    weights: KeptWeights = "int8",
    in_int8: Collection[str] = (),
) -> int:
    """Quantise linear layers and experts; return the number of modules of experts.

    See `quantise_linears`; `name` is for the log.
    """
    left = quantise_linears(model, stored, only_stored, weights, in_int8)
    routed = 0 if only_stored else quantise_experts(model, weights == "int4", in_int8, stored)
    for kept, errors in roundings(model).items():
        error = f"mean relative error {mean(errors):.2g}"
        logger.info("%s: %d layers rounded to %s, %s", name, len(errors), kept, error)
    if left:
        logger.warning("%s: %d layers stay as they are, such as %s", name, len(left), left[0])
    return routed


def _check(
    field: str, model: PreTrainedModel, probe: ProbeView, expected: Tensor, got: Tensor
) -> None:
    """Raise `UnsupportedModelError` if packed attention is not exact for the model.

    `probe` has seen the forwards that gave `got`; `expected` are the ordinary forward's logits.
    """
    allowed = allowed_difference(expected.dtype, is_recurrent=bool(probe.recurrent))
    if any(isinstance(one, QuantisedLinear) for one in model.modules()):
        allowed = MOST_DIFFERENCE  # the least rounding may change a level
    check_parity(field, expected, got, allowed)
    width = model.config.get_text_config().hidden_size
    moving = moving_layer(model, width) if probe.recurrent else None
    if moving is not None:
        said = "on this machine a token's rounding depends on what is beside it"
        raise UnsupportedModelError(field, f"layer {moving}: {said}")
    reason = ignored_window(model.config, probe.windows)
    if reason is not None:
        raise UnsupportedModelError(field, reason)


def _probe_rows(device: torch.device, vocab_size: int) -> list[Tensor]:
    """Return the tokens of two texts, [2][tokens]."""
    tokens = torch.arange(2 * _PROBE_TOKENS, device=device)
    return list(((tokens * 7919 + 11) % vocab_size).view(2, _PROBE_TOKENS))


def _picked(rows: Sequence[Tensor], pack: _Pack) -> Tensor:
    """Return the part of each row at the positions that a pack has of it."""
    return torch.cat([row[slice(*span)] for row, span in zip(rows, pack, strict=True)])


def _refuse(model: PreTrainedModel, vocab_size: int, field: str) -> None:
    """Raise `UnsupportedModelError` for a fault that can be found without a forward."""
    reason = refusal(model.config)
    if reason is not None:
        raise UnsupportedModelError(field, reason)
    if _output_rows(model) < vocab_size:
        raise UnsupportedModelError(field, "it has fewer output ids than the tokenizer")


def _input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of the embedding; a quantised one is on the CPU, like its model."""
    weight = next(model.get_input_embeddings().parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def _output_rows(model: PreTrainedModel) -> int:
    """Return the number of ids for which the model has logits."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, QuantisedLinear):
        return head.out_features
    return int(head.weight.shape[0]) if head is not None else 0


def _tune(model: PreTrainedModel, tuning: Tuning) -> None:
    if tuning.lean:
        replace_norms(model)
    if tuning.pack_weights:
        pack_linears(model)
