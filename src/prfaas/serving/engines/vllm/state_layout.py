"""Places of a linear state's heads in its page, so that ranks can divide it."""

from math import prod

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.core.kv.page_layout import PagePart

_CONVOLVED = (MambaAttentionBackendEnum.GDN_ATTN, MambaAttentionBackendEnum.MAMBA2)


def state_parts(spec: MambaSpec) -> tuple[PagePart, ...]:
    """The parts of a page, each with its heads; none where vLLM's kind of state is not known.

    A page has the states one behind the other (read in 0.32: `MambaBase.bind_kv_cache`). Gated delta nets and KDA have
    a convolution's state, of all query heads, then all key heads, then all value heads, and a recurrent state by heads.
    Mamba2 has the same with its heads first, then B and C of its groups (`MambaMixer2`). Lightning attention has a
    recurrent state only. States with records of drafts behind them (RecoverSSM, ReplaySSM) are not known.
    """
    if spec.tp_replicated:
        return ()
    if spec.mamba_type is MambaAttentionBackendEnum.LINEAR and len(spec.shapes) == 1:
        return _recurrent(spec, 0, 0)
    if spec.mamba_type in _CONVOLVED and len(spec.shapes) == 2:
        convolution = _convolution(spec)
        nbytes = prod(spec.shapes[0]) * get_dtype_size(spec.dtypes[0])
        return (*convolution, *_recurrent(spec, 1, nbytes)) if convolution else ()
    return ()


def _recurrent(spec: MambaSpec, index: int, offset_bytes: int) -> tuple[PagePart, ...]:
    heads, *per_head = spec.shapes[index]
    return (_part(heads, 1, prod(per_head) * get_dtype_size(spec.dtypes[index]), offset_bytes, 0, 0),)


def _convolution(spec: MambaSpec) -> tuple[PagePart, ...]:
    """Of queries, keys and values, or of heads, B and C, which are as many and as wide as values, queries and keys.

    vLLM lays the channels of a state's row together, or the rows of a channel.
    """
    heads, value_width, key_width = spec.shapes[1]
    item_bytes = get_dtype_size(spec.dtypes[0])
    rows, channels = sorted(spec.shapes[0])
    # With speculation there is room for the drafts' rows behind those of the state (read in 0.32: `mamba_utils`).
    kept_rows = rows - spec.num_speculative_blocks
    keys, rest = divmod(channels - heads * value_width, 2 * key_width)
    if rest or keys < 1 or heads % keys:
        return ()
    queries, values = (keys, key_width), (heads, value_width)
    is_mamba2 = spec.mamba_type is MambaAttentionBackendEnum.MAMBA2
    channels_outside = spec.shapes[0] == (channels, rows)
    parts, first_channel = [], 0
    for count, width in (values, queries, queries) if is_mamba2 else (queries, queries, values):
        if channels_outside:
            channel_bytes = rows * item_bytes
            parts.append(
                _part(
                    count,
                    width,
                    kept_rows * item_bytes,
                    first_channel * channel_bytes,
                    width * channel_bytes,
                    channel_bytes,
                )
            )
        else:
            nbytes = width * item_bytes
            parts.append(
                _part(count, kept_rows, nbytes, first_channel * item_bytes, nbytes, channels * item_bytes)
            )
        first_channel += count * width
    return tuple(parts)


def _part(
    heads: int, rows: int, width_bytes: int, offset_bytes: int, head_stride_bytes: int, row_stride_bytes: int
) -> PagePart:
    stride = head_stride_bytes or width_bytes
    return PagePart(
        heads,
        rows,
        width_bytes,
        offset_bytes,
        # One token a page: it has no next one.
        0,
        head_stride_bytes=stride if heads > 1 else 0,
        row_stride_bytes=row_stride_bytes if rows > 1 else 0,
    )
