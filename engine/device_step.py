"""A decode step as a function over tables that stay where they are on the device: what a CUDA graph can capture.

Embedding, layers, head, the choice of the next token, and the counting of lengths and positions: nothing is read on the
host and nothing comes from it. Run as it stands it is `decode.batch_step` with the choice behind it; that is what tests
compare it with on a CPU.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..cache.arena import Arena
from ..cache.packed_arena import PackedArena
from ..cache.packed_store import PackedStore
from ..cache.store import Store
from ..cache.transfer import to_device
from ..errors import BackendError
from ..models.decoder import Decoder, Layer
from ..models.products import linear
from .attention import Attention
from .attention.packed import PackedPart
from .attention.rows import Rows
from .attention.tables import UNLIMITED
from .device_sampling import DeviceSampler, Kind
from .picker import Picker
from .sequence import Sequence

if TYPE_CHECKING:
    from .fused import FusedLayer

NOBODY = -1  # the length of a row in which no sequence is


class DeviceState:
    """Everything a step reads and writes beside weights and slots, for up to n sequences; a seat is one's place in it.

    offset, length, limit: int32 `[layers, n, kv_heads]`; the first two again of packed parts, with `packed`. position:
    int32 `[n]`, true positions of the tokens that the next step feeds; token: int64 `[n]`, those tokens; chosen: what
    came out, NOT_FINITE where it was no number. ring: rotated queries `[layers, n, window + 1, heads, head_dim]` by
    position modulo window + 1: a step that is undone has then overwritten no query that the window still needs. None
    without a window.
    """

    def __init__(
        self, decoder: Decoder, rows: int, window: int | None, sampler: DeviceSampler, *, packed: bool = False
    ) -> None:
        config, device = decoder.config, decoder.device
        self.rows, self.window, self.sampler, self.device = rows, window, sampler, device
        count = 5 if packed else 3  # as `host_tables` gives them
        self.tables = torch.zeros(count, config.num_layers, rows, config.num_kv_heads, dtype=torch.int32, device=device)
        self.offset, self.length, self.limit, *self._packed = self.tables.unbind(0)
        self.tables[1::3].fill_(NOBODY)  # both lengths
        self.position = torch.zeros(rows, dtype=torch.int32, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        self.frequencies = torch.zeros(rows, config.head_dim // 2, dtype=torch.float32, device=device)
        self.attention_factor = torch.ones(rows, dtype=torch.float32, device=device)
        self.logits: Tensor | None = None  # fp32 [n, vocab], of the last step of a kind with LOGITS
        self.ring: Tensor | None = None
        if window is not None:
            shape = (config.num_layers, rows, window + 1, config.num_heads, config.head_dim)
            self.ring = torch.zeros(shape, dtype=decoder.compute_dtype, device=device)

    def put(self, row: int, tables: np.ndarray, sequence: Sequence, token: int, picker: Picker) -> None:
        """Give a seat to a sequence whose `token` the next step feeds. Waits for nothing.

        tables: of its rows, see `host_tables`.
        """
        assert sequence.rotary is not None, "decoding follows a prefill"
        self.place(row, tables)
        # a fill goes with the launch: `table[row] = number` would be copied, and wait
        self.position[row].fill_(sequence.total)
        self.token[row].fill_(token)
        self.frequencies[row] = sequence.rotary.inverse_frequencies
        self.attention_factor[row].fill_(sequence.rotary.attention_factor)
        self.sampler.put(row, picker)
        if self.ring is not None and sequence.ring is not None and self.window is not None:
            slots, queries = sequence.ring.recent(sequence.total, self.window + 1)
            self.ring[:, row].index_copy_(1, slots, queries)

    def place(self, row: int, tables: np.ndarray) -> None:
        """Say where a seat's rows are. Waits for nothing."""
        on_device = to_device(tables.ravel(), self.device, torch.int32)
        self.tables[:, :, row] = on_device.view(tables.shape)

    def take(self, row: int) -> None:
        """Leave a seat empty: the row does nothing from the next step on."""
        self.tables[1::3, :, row] = NOBODY

    def give_back(self, row: int, sequence: Sequence) -> None:
        """Write the last queries of a seat into its sequence's ring."""
        if self.ring is not None and sequence.ring is not None:
            sequence.ring.take_recent(self.ring[:, row], sequence.total)

    def layer(self, index: int, store: Store, longest: int) -> Rows:
        """One layer's rows in a store; see `Rows`."""
        return Rows(
            keys=store.keys,
            values=store.values,
            position=store.position,
            offset=self.offset[index],
            length=self.length[index],
            query_position=self.position,
            longest=longest,
        )

    def packed(self, index: int, store: PackedStore | None) -> PackedPart | None:
        """What is packed of one layer's rows. No work space depends on the rows, so that one graph serves all."""
        if store is None:
            return None
        offset, length = self._packed
        return PackedPart(store, offset[index], length[index], store.slots)


class DeviceStep:
    """The step of one decoder. hold: full rows give up a slot. Raises BackendError where a weight must be converted."""

    def __init__(self, decoder: Decoder, attention: Attention, *, window: int, hold: bool) -> None:
        self.decoder, self.attention, self.window, self.hold = decoder, attention, window, hold
        self._layers = [_fixed(decoder, layer) for layer in decoder.layers]
        self._fused: list[FusedLayer] = []
        if attention.name == "triton":
            from .fused import FusedLayer

            pairs = zip(self._layers, decoder.layers, strict=True)
            self._fused = [FusedLayer(decoder, layer, stored) for layer, stored in pairs]

    def __call__(
        self, state: DeviceState, store: Store, longest: int, kind: Kind, packed: PackedStore | None = None
    ) -> None:
        """Feed every seat's token and choose its next one. An empty seat changes nothing but its `chosen`.

        packed: of rows that have a packed part, which grow only; what leaves the window is packed between steps.
        """
        cos, sin = _angles(state)
        hidden = self.decoder.embed(state.token)  # [n, hidden]
        active = state.length[0, :, 0] >= 0
        run = self._layers_fused if self._fused else self._layers_plain
        hidden = run(state, store, longest, packed, hidden, cos, sin)
        logits = self._logits(hidden)
        if Kind.LOGITS in kind:
            assert state.logits is not None, "made before the first step of this kind"
            state.logits.copy_(logits)
        state.chosen.copy_(state.sampler.choose(logits, active, kind))
        # an id below 0 would end the process on a GPU, where the next step looks it up before the host has read it
        state.token.copy_(torch.where(active, state.chosen.clamp(min=0), state.token))
        state.position.add_(active)
        if not self.hold:  # else the exchange has raised what has grown
            state.length.add_(state.length >= 0)

    def _takes(self, tokens: int) -> bool:
        """Whether the products of so many tokens are worked by `few_products`."""
        if not self._fused:
            return False
        from .few_products import takes

        return all(fused.few for fused in self._fused) and takes(self.decoder, tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self._takes(hidden.shape[0]):
            return self.decoder.logits(hidden)
        from .few_products import logits

        return logits(self.decoder, hidden)

    def _layers_plain(
        self,
        state: DeviceState,
        store: Store,
        longest: int,
        packed: PackedStore | None,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """All layers by the decoder's own arithmetic."""
        decoder, config = self.decoder, self.decoder.config
        for index, layer in enumerate(self._layers):
            normed = decoder.attention_norm(layer, hidden)
            queries = decoder.queries(layer, normed, cos, sin)  # [heads, n, head_dim]
            shape = (config.num_kv_heads, state.rows, config.head_dim)
            keys, values = (torch.empty(shape, dtype=hidden.dtype, device=hidden.device) for _ in range(2))
            decoder.keys_values(layer, normed, cos, sin, keys, values)
            by_row = queries.transpose(0, 1)  # [n, heads, head_dim]
            if state.ring is not None and state.window is not None:
                seats = torch.arange(state.rows, device=state.device)
                state.ring[index].index_put_((seats, state.position.long() % (state.window + 1)), by_row)
            rows = state.layer(index, store, longest)
            self.attention.store_newcomers(rows, keys.transpose(0, 1), values.transpose(0, 1))
            out = self._attend(by_row, rows, index, state, packed)
            hidden = hidden + decoder.attention_output(layer, out.transpose(0, 1))
            hidden += decoder.mlp(layer, decoder.mlp_norm(layer, hidden))
        return hidden

    def _layers_fused(
        self,
        state: DeviceState,
        store: Store,
        longest: int,
        packed: PackedStore | None,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """The same in about a dozen launches a layer; in seven where the products of few tokens are worked here."""
        few = self._takes(state.rows)
        delta: Tensor | None = None
        for index, (fused, layer) in enumerate(zip(self._fused, self._layers, strict=True)):
            rows = state.layer(index, store, longest)
            ring = None if state.ring is None else state.ring[index]
            if few:  # the residuals are raised as the products are worked
                queries = fused.place_few(hidden, cos, sin, rows, ring)
                fused.add_few(hidden, self._attend(queries, rows, index, state, packed).flatten(1))
                continue
            normed = fused.add_norm(hidden, delta, mlp=False)
            queries = fused.place(normed, cos, sin, rows, ring)
            out = self._attend(queries, rows, index, state, packed)
            delta = linear(out.flatten(1), layer.o_proj, layer.o_bias, None)
            delta = fused.mlp(fused.add_norm(hidden, delta, mlp=True))
        return hidden if delta is None else hidden.add_(delta)

    def _attend(
        self, queries: Tensor, rows: Rows, index: int, state: DeviceState, packed: PackedStore | None
    ) -> Tensor:
        """Attention over rows and newcomers, `[n, heads, head_dim]`; full rows give up a slot with hold."""
        sliding, part = self.decoder.config.sliding_windows[index], state.packed(index, packed)
        if part is not None:
            assert not self.hold, "packed rows are cut between steps"
            return self.attention.attend_packed(queries, rows, part, scale=self.decoder.scale, sliding=sliding)
        out, weights = self.attention.attend_rows(
            queries, rows, scale=self.decoder.scale, sliding=sliding, weights=self.hold
        )
        if weights is not None:
            self.attention.exchange_least_attended(rows, weights, state.limit[index], window=self.window)
        return out


def undo(arena: Arena, limit: np.ndarray, position: int) -> None:
    """Take back what a step with `hold` has done to a sequence's slots: the newcomer at `position` leaves again.

    The arena's lengths are those before that step. In a full row the newcomer has changed places with the loser, which
    lies behind the row: they change back. A row that has grown is as before once its length is. Waits for nothing.
    """
    store = arena.store
    full = arena.length >= limit
    for layer in range(full.shape[0]):
        if not full[layer].any():
            continue
        lengths = arena.length[layer, full[layer]]
        spare = to_device(lengths, arena.device, torch.int64)
        first = to_device(arena.offset[layer, full[layer]], arena.device, torch.int64)
        columns = torch.arange(int(lengths.max()) + 1, device=arena.device)
        inside = columns <= spare[:, None]
        slots = first[:, None] + torch.where(inside, columns, spare[:, None])  # [rows, columns], none behind the row
        taken = first + ((store.position[slots] == position) & inside).int().argmax(1)
        behind = first + spare
        for table in (store.keys, store.values, store.position):
            loser = table.index_select(0, behind)
            table.index_copy_(0, behind, table.index_select(0, taken))
            table.index_copy_(0, taken, loser)


def host_tables(arena: Arena, limit: np.ndarray | None) -> np.ndarray:
    """int32 `[3, layers, kv_heads]` for `DeviceState.put`: offsets, lengths and limits; `[5, ...]` with the offsets and
    lengths of packed parts."""
    top = np.full_like(arena.length, UNLIMITED) if limit is None else limit
    tables = [arena.offset, arena.length, top]
    if isinstance(arena, PackedArena):
        tables += [arena.packed.offset, arena.packed.length]
    return np.stack(tables).astype(np.int32)


def _angles(state: DeviceState) -> tuple[Tensor, Tensor]:
    """Cosines and sines fp32 `[n, head_dim / 2]`, as `Rotary.cos_sin` has them, each row by its own frequencies."""
    angles = state.position.float()[:, None] * state.frequencies
    factor = state.attention_factor[:, None]
    return angles.cos() * factor, angles.sin() * factor


def _fixed(decoder: Decoder, layer: Layer) -> Layer:
    """A layer whose tensors stay where they are: with its vectors in the compute dtype, and so its matrices already; or
    with int8 matrices that are multiplied as they are stored."""
    if decoder.int8_products:
        return layer
    found = {}
    for field in fields(Layer):
        tensor = getattr(layer, field.name)
        if tensor is not None and not isinstance(tensor, Tensor):
            raise BackendError("a graph has no products with these packed weights: take the step eager")
        if isinstance(tensor, Tensor) and tensor.dtype != decoder.compute_dtype:
            if tensor.ndim > 1 and decoder.device.type != "cpu":
                raise BackendError("a graph needs matrices of one dtype: take the step eager, or set the option dtype")
            tensor = tensor.to(decoder.compute_dtype)
        found[field.name] = tensor
    return Layer(**found)
