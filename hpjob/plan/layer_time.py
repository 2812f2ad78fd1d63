"""Seconds of one decoder layer and of the output head for one microbatch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, fsum, log2

from hpjob.plan.constants import Framework
from hpjob.plan.hardware import Hardware, MeasuredLayer
from hpjob.plan.layout import Layout
from hpjob.plan.mesh_order import ep_group, exchange_link, link_of, sp_group, tp_group
from hpjob.plan.shape import Shape

_IMBALANCE = 1.08
"""Load of the fullest expert rank over the mean."""
_MERGED_BYTES = 20.0, 50.0
"""Moved for an element of the queries, forward and backward, by merging the blocks of our ring attention and by copies;
on two H200 (docs/speed.md)."""
_BESIDE_PRODUCTS = 0.3
"""Part of the collectives at the edges of a split sequence that is seen where our runtime makes products meanwhile."""
_SOFT = 4.0
"""How sharply host and device time replace each other as the longer one."""
_UNFUSED_FORWARD_BYTES = 13.0
"""Of a score: product 2, softmax 4, dropout 5, product 2."""
_UNFUSED_BACKWARD_BYTES = 19.0


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of device work and of exposed collectives."""

    forward: float
    backward_input: float
    backward_weight: float
    comm_forward: float
    comm_backward: float
    recompute: float
    """Forward work done again in the backward pass of a layer that recomputes, its collectives included."""
    host_forward: float
    """Host time to issue the forward pass."""

    def passes(self) -> tuple[float, float, float, float]:
        """Wall time of forward, input-gradient and weight-gradient pass, and of recomputation."""
        host = self.host_forward
        forward = _longer(self.forward + self.comm_forward, host)
        recomputed = self.recompute / (self.forward + self.comm_forward) * forward if self.recompute else 0.0
        device = self.backward_input + self.comm_backward
        backward = _longer(device + self.backward_weight, 2.0 * host)
        weight = backward * self.backward_weight / (device + self.backward_weight)
        return forward, backward - weight, weight, recomputed


def _longer(device: float, host: float) -> float:
    return float((device**_SOFT + host**_SOFT) ** (1 / _SOFT))


class LayerModel:
    """Prices layers of one model on one kind of hardware; results are kept."""

    def __init__(self, shape: Shape, hardware: Hardware, habits: Framework) -> None:
        self.shape = shape
        self.hardware = hardware
        self.habits = habits
        self._layers: dict[tuple[object, ...], LayerTime] = {}
        self._passes: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        self._heads: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def layer(self, layout: Layout, *, experts: bool = False) -> LayerTime:
        """Return the times of a layer with a dense MLP, or of one with experts."""
        key = (*self.key(layout), experts)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(layout, experts)
        return found

    def passes(self, layout: Layout, experts: bool) -> tuple[float, float, float, float]:
        """Return the wall times of a layer's passes; see :meth:`LayerTime.passes`."""
        key = (*self.key(layout), experts)
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = self.layer(layout, experts=experts).passes()
        return found

    def key(self, layout: Layout) -> tuple[object, ...]:
        """What of a layout decides the time of a layer."""
        return (
            layout.tokens,
            layout.seq,
            layout.tp,
            layout.sp,
            layout.ep,
            layout.sequence_mode,
            layout.tp_sharded,
            self.habits.gradient_traffic(layout.zero),
            self._summed(layout),
            layout.recompute,
            layout.precision,
            layout.flash,
            layout.fp8,
        )

    def _layer(self, layout: Layout, experts: bool) -> LayerTime:
        attention = self._attention(layout)
        linear_f, linear_i, linear_w = self._linears(layout, experts)
        passes = self.hardware.traffic(layout.tokens * self._traffic_bytes(layout, experts))
        comm_f, comm_b = self._collectives(layout, experts, attention)
        forward, backward_i = linear_f + attention[0] + passes, linear_i + attention[1] + 1.9 * passes
        if found := self._measured(layout):
            backward = backward_i + linear_w
            forward, backward_i, linear_w = (
                found.forward,
                *(found.backward * part / backward for part in (backward_i, linear_w)),
            )
        recompute = 0.0
        if layout.recompute == "full":
            recompute = forward + comm_f
        elif layout.recompute == "selective":
            recompute = attention[0] if self.habits.selective == "attention" else (forward + comm_f) / 2
        return LayerTime(
            forward=forward,
            backward_input=backward_i,
            backward_weight=linear_w,
            comm_forward=comm_f,
            comm_backward=comm_b,
            recompute=recompute,
            host_forward=self._host(layout.tp, experts),
        )

    def _summed(self, layout: Layout) -> float:
        """Part of the microbatches that add their gradients to a sum; without a buffer the first ones need none."""
        if self.habits.gradients == "buffer":
            return 1.0
        return {1: 0.0, 2: 0.5}.get(layout.num_microbatches, 1.0)

    def _measured(self, layout: Layout) -> MeasuredLayer | None:
        if not self.hardware.measured_layers:
            return None
        s, a = self.shape, layout
        key = (s.hidden, s.ffn, a.tokens, a.seq, a.tp, a.sp, a.ep, a.sequence_mode, a.precision)
        return self.hardware.measured_layers.get(key)

    def _host(self, tp: int, experts: bool) -> float:
        """Seconds to issue a forward pass; ranks of a tp group also wait for the slowest of them."""
        whole = self.habits.layer_cpu_ms * 1e-3 * self.hardware.fit.host
        return whole * (1.0 + 0.08 * log2(tp)) * (1.5 if experts else 1.0)

    def _product(self, layout: Layout, m: float, n: float, k: float, batch: float = 1) -> float:
        hw = self.hardware
        if layout.precision == "fp32":
            return hw.product(m, n, k, batch=batch, peak=hw.peak_single)
        # 8-bit products gain less than their peak: casts and scaling stay.
        return hw.product(m, n, k, batch=batch, peak=hw.peak_fp8 * 0.8 if layout.fp8 else None)

    def _linears(self, layout: Layout, experts: bool) -> tuple[float, float, float]:
        """Forward, input-gradient and weight-gradient seconds of all linear layers."""
        s, tp, tokens = self.shape, layout.tp, layout.tokens
        sizes = [(float(tokens), out, inner, 1.0) for out, inner in s.local_attention_products(tp)]
        up = 2 if s.gated else 1
        if experts:
            local = s.num_experts / layout.ep
            # Groups are padded to the tiles of the grouped product.
            rows = 64.0 * ceil(tokens * s.experts_per_token / local * _IMBALANCE / tp / 64)
            sizes += [(rows, up * s.ffn, s.hidden, local), (rows, s.hidden, s.ffn, local)]
            if s.shared_experts:
                width = s.shared_experts * s.ffn // tp
                sizes += [(float(tokens), up * width, s.hidden, 1.0), (float(tokens), s.hidden, width, 1.0)]
        else:
            width = (s.dense_ffn if s.num_experts and s.dense_ffn else s.ffn) // tp
            sizes += [(float(tokens), up * width, s.hidden, 1.0), (float(tokens), s.hidden, width, 1.0)]
        forward = fsum(self._product(layout, m, n, k, b) for m, n, k, b in sizes)
        inputs = fsum(self._product(layout, m, k, n, b) for m, n, k, b in sizes)
        weights = fsum(self._product(layout, n, k, m, b) for m, n, k, b in sizes)
        params = fsum(n * k * b for _, n, k, b in sizes)
        moved = self.habits.gradient_traffic(layout.zero)
        weights += self.hardware.traffic(params * moved * self._summed(layout) * layout.element_bytes / 2)
        return forward, inputs, weights

    def _attention(self, layout: Layout) -> tuple[float, float]:
        """Forward and backward seconds of the attention core."""
        s, hw, seq = self.shape, self.hardware, layout.seq
        shards = layout.tp
        width = (s.q_width + s.value_width) / shards
        flops = 2.0 * layout.tokens * seq * width
        if layout.flash:
            dim = s.q_width / s.heads
            is_cudnn = self.habits.attention == "cudnn" and hw.gpu.cudnn != hw.gpu.flash2
            # Measured on the kernel itself, that one needs no correction and longer rows to reach its peak.
            factor, half_speed = (1.0, 590.0) if is_cudnn else (hw.fit.attention, 300.0)
            shape_factor = factor * min(1.0, (dim / 128) ** 0.25) * seq / (seq + half_speed)
            speed = (hw.peak_half if layout.precision != "fp32" else hw.peak_single) * shape_factor
            causal = flops / 2
            kernels = {"flash1": hw.gpu.flash1, "cudnn": hw.gpu.cudnn}
            forward, backward = kernels.get(self.habits.attention, hw.gpu.flash2)
            return causal / (speed * forward) + 6e-6, 2.5 * causal / (speed * backward) + 1.2e-5
        heads = s.heads / shards
        batch = layout.tokens / seq * heads
        dim = s.head_dim
        products = self._product(layout, seq, seq, dim, batch) + self._product(layout, seq, dim, seq, batch)
        scores = layout.tokens * seq * heads
        dropout = 1.0 if self.habits.dropout else 0.6
        forward = hw.traffic(scores * _UNFUSED_FORWARD_BYTES * dropout * hw.fit.scores)
        backward = hw.traffic(scores * _UNFUSED_BACKWARD_BYTES * dropout * hw.fit.scores)
        return products + forward, 2 * products + backward

    def _traffic_bytes(self, layout: Layout, experts: bool) -> float:
        """Bytes that the element-wise kernels of a forward pass move for one token."""
        s, e, level = self.shape, layout.element_bytes, self.habits.fused
        norm_tp = layout.tp if layout.sharded_norms else 1
        hidden = {"eager": 14.0 if not s.rms_norm else 40.0, "fused": 10.0, "compiled": 7.0}[level]
        inner = 2.0 * s.q_width
        if s.rotary:
            inner += (s.q_width + s.kv_width) * (11.0 if level == "eager" else 3.0)
        activation = (5.0 if level == "eager" else 3.0) if s.gated else 2.0
        width = float(s.dense_ffn or s.ffn) if not experts else 0.0
        if experts:
            width = s.ffn * (s.experts_per_token + s.shared_experts)
            # Tokens are copied to their experts and back.
            hidden += 6.0 * s.experts_per_token / layout.tp * norm_tp
        return e * (hidden * s.hidden / norm_tp + (inner + activation * width) / layout.tp)

    def _collectives(self, layout: Layout, experts: bool, attention: tuple[float, float]) -> tuple[float, float]:
        """Exposed seconds of tp, sp and ep collectives in forward and backward pass."""
        s, tp, sp = self.shape, layout.tp, layout.sp
        e, hw = layout.element_bytes, self.hardware
        forward = backward = 0.0
        if tp > 1:
            link = link_of(hw, layout, tp_group(layout))
            one_way = link.ring(tp, layout.tokens * s.hidden * e)
            exposed = 1.0 - self.habits.tp_overlap
            is_beside = layout.sharded_norms and self.habits.is_own and self.habits.fused == "compiled"
            if is_beside and not link.crosses_nodes and hw.island_kind in {"nvlink", "xgmi"}:
                exposed *= _BESIDE_PRODUCTS
            forward += 4 * one_way * exposed
            # Elsewhere the sharded inputs of the two column-parallel products are gathered again; our runtime keeps
            # them, or gathers once for the block that begins and the one that ends.
            again = layout.sharded_norms and not self.habits.is_own
            backward += (5 if again else 4) * one_way * exposed
            if layout.sharded_norms and self.habits.is_own:
                # Gathering along the sequence copies what arrived into its place, and so does scattering.
                copy = hw.traffic(2.0 * layout.tokens * s.hidden * e) * exposed
                forward, backward = forward + 4 * copy, backward + 4 * copy
        if sp > 1:
            ring_f, ring_b = self._sequence_axis(layout, attention)
            forward, backward = forward + ring_f, backward + ring_b
        if experts and layout.ep > 1:
            link = exchange_link(hw, layout, ep_group(layout))
            size = layout.tokens * s.hidden * e * s.experts_per_token / tp
            exchange = (layout.ep - 1) / layout.ep * size / link.bandwidth * _IMBALANCE + 4 * link.latency
            forward, backward = forward + 2 * exchange, backward + 2 * exchange
        return forward, backward

    def _sequence_axis(self, layout: Layout, attention: tuple[float, float]) -> tuple[float, float]:
        s, sp, tp, e = self.shape, layout.sp, layout.tp, layout.element_bytes
        kv = 2.0 * layout.tokens * s.kv_width * e / tp
        if layout.sequence_mode == "all_to_all":
            link = exchange_link(self.hardware, layout, sp_group(layout))
            size = 2.0 * layout.tokens * s.q_width * e / tp + kv
            once = (sp - 1) / sp * size / link.bandwidth + 4 * link.latency
            return once, once
        link = link_of(self.hardware, layout, sp_group(layout))
        rounds = (sp - 1) * link.send(kv)
        # A round hides behind the attention of the block that is there; the first one cannot.
        hidden_f, hidden_b = attention[0] * (sp - 1) / sp, attention[1] * (sp - 1) / sp
        latency = (sp - 1) * link.latency
        forward, backward = max(rounds - hidden_f, 0.0) + latency, latency
        if not self.habits.is_own:
            return forward, backward + max(2 * rounds - hidden_b, 0.0)
        # Part of the rank's own block is computed while the last ones come home. Sums travel in fp32.
        home = link.send(kv * 4.0 / e)
        backward += max(2 * rounds + (sp - 2) * home - attention[1], 0.0)
        merged = [self.hardware.traffic(layout.tokens * s.q_width / tp * moved) for moved in _MERGED_BYTES]
        return forward + merged[0], backward + merged[1]

    def head(self, layout: Layout) -> tuple[float, float, float]:
        """Forward, input-gradient and weight-gradient seconds of output head and loss."""
        key = (layout.tokens, layout.tp, layout.precision, layout.fp8)
        found = self._heads.get(key)
        if found is None:
            unit = self.habits.vocabulary_multiple
            n, h, tokens = float(-(-self.shape.vocab // (layout.tp * unit)) * unit), self.shape.hidden, layout.tokens
            loss = self.hardware.traffic(3.0 * self.habits.logits_bytes * tokens * n) / 2
            found = (
                self._product(layout, tokens, n, h) + loss,
                self._product(layout, tokens, h, n) + loss,
                self._product(layout, n, h, tokens),
            )
            self._heads[key] = found
        return found
