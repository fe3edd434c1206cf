"""State of layers that fold the whole past into a fixed size: Gated DeltaNet, Kimi Delta Attention."""

from dataclasses import dataclass

from prfaas.kvmodel.spans import check_span


@dataclass(frozen=True, slots=True)
class LinearState:
    """`layers` layers with `conv_bytes` (last inputs of the convolution) and `recurrent_bytes` each."""

    layers: int
    conv_bytes: int
    recurrent_bytes: int

    @classmethod
    def gated_delta_net(
        cls,
        layers: int,
        *,
        key_heads: int,
        value_heads: int,
        key_head_size: int,
        value_head_size: int,
        conv_kernel: int,
        conv_dtype_bytes: int = 2,
        state_dtype_bytes: int = 4,
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × (2·keys + values), state value_heads × value_size × key_size.

        Shapes as in vLLM 0.32 `MambaStateShapeCalculator.gated_delta_net_state_shape`, without speculation.
        """
        conv_width = 2 * key_heads * key_head_size + value_heads * value_head_size
        return cls(
            layers=layers,
            conv_bytes=(conv_kernel - 1) * conv_width * conv_dtype_bytes,
            recurrent_bytes=value_heads * value_head_size * key_head_size * state_dtype_bytes,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.conv_bytes + self.recurrent_bytes

    def bytes_at(self, tokens: int) -> int:
        """Bytes of all layers' state, at any length but 0."""
        return self.layers * self.state_bytes if tokens > 0 else 0

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes of the state after `num_tokens` tokens: it moves once, whole, whatever the other side holds.

        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        return self.bytes_at(num_tokens)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.layers} linear state, {self.state_bytes} B each at any length"
