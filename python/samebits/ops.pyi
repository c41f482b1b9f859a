# Written by `python -m samebits.stubs`; a test holds it to the schema.
"""Every op of the schema as a function."""

from typing import Any, Literal, Protocol, TypeVar

class SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

T = TypeVar("T", bound=SupportsDLPack)

__all__: list[str]

def gemm(
    x: T,
    w: T,
    bias: T | None = None,
    *,
    k_offset: int = 0,
    k_total: int | None = None,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The matrix product x w^T + bias.

    Inputs:
        x[M,K]: bf16, fp16 or fp32
        w[N,K]: bf16, fp16 or fp32
        bias[N]: bf16, fp16 or fp32, optional

    Attributes:
        k_offset (0): first column that this tensor-parallel rank holds, of `k_total`; a whole number of at least 0
        k_total (K): columns of the whole product; a whole number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[M,N]: dtype, fp32 for a partial sum

    Raises:
        ValueError: another shape, dtype, stride or range; columns that are not whole segments forming a subtree of the eight of `k_total`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gemm_dx(
    dy: T,
    w: T,
    *,
    n_offset: int = 0,
    n_total: int | None = None,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of gemm's y: the matrix product dy w.

    A gradient of `gemm`.

    Inputs:
        dy[M,N]: bf16, fp16 or fp32
        w[N,K]: bf16, fp16 or fp32

    Attributes:
        n_offset (0): first row of w that this tensor-parallel rank holds, of `n_total`; a whole number of at least 0
        n_total (N): rows of the whole w; a whole number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of dy): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[M,K]: dtype, fp32 for a partial sum

    Raises:
        ValueError: another shape, dtype, stride or range; rows of w that are not whole segments forming a subtree of the eight of `n_total`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gemm_dw(
    x: T,
    dy: T,
    mask: T | None = None,
    carry: T | None = None,
    *,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of w from that of gemm's y: the matrix product of the transpose of dy and x, added to `carry`.

    A gradient of `gemm`.

    Inputs:
        x[T,K]: bf16, fp16 or fp32
        dy[T,N]: bf16, fp16 or fp32
        mask[T]: i32; 0: padding; anything else: a token, optional
        carry[N,K]: fp32, optional

    Attributes:
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[N,K]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def rms_norm(
    x: T,
    w: T,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Each row over its root mean square, times w.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def rms_norm_backward(
    x: T,
    w: T,
    dy: T,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of rms_norm's y.

    A gradient of `rms_norm`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def rms_norm_dw(
    x: T,
    dy: T,
    mask: T | None = None,
    carry: T | None = None,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    token_offset: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """64 sums over tokens, which `fold` joins: the gradient of w from that of rms_norm's y.

    A gradient of `rms_norm`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32
        mask[R]: i32; 0: padding; anything else: a token, optional
        carry[64,N]: fp32, optional

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        token_offset (0): how many tokens of the group earlier calls have had; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[64,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def add_rms_norm(
    x: T,
    residual: T,
    w: T,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Sum = x + residual, and the rms_norm of the sum as it is stored.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        residual[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        sum[R,N]: dtype
        y[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def add_rms_norm_backward(
    sum: T,
    w: T,
    dy: T,
    dsum: T | None = None,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x and of residual from those of add_rms_norm's y and sum.

    A gradient of `add_rms_norm`.

    Inputs:
        sum[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32
        dsum[R,N]: bf16, fp16 or fp32, optional

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of sum): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def layer_norm(
    x: T,
    w: T | None = None,
    bias: T | None = None,
    *,
    eps: float = 1e-5,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Each row less its mean, over its standard deviation, times w, plus bias.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32, optional
        bias[N]: bf16, fp16 or fp32, optional

    Attributes:
        eps (1e-5): added to the variance; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def layer_norm_backward(
    x: T,
    dy: T,
    w: T | None = None,
    *,
    eps: float = 1e-5,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of layer_norm's y.

    A gradient of `layer_norm`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32
        w[N]: bf16, fp16 or fp32, optional

    Attributes:
        eps (1e-5): added to the variance; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def layer_norm_dw(
    x: T,
    dy: T,
    mask: T | None = None,
    carry: T | None = None,
    *,
    eps: float = 1e-5,
    token_offset: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """64 sums over tokens, which `fold` joins: the gradient of w from that of layer_norm's y.

    A gradient of `layer_norm`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32
        mask[R]: i32; 0: padding; anything else: a token, optional
        carry[64,N]: fp32, optional

    Attributes:
        eps (1e-5): added to the variance; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        token_offset (0): how many tokens of the group earlier calls have had; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[64,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def group_norm(
    x: T,
    w: T | None = None,
    bias: T | None = None,
    *,
    groups: int = 1,
    eps: float = 1e-5,
    silu: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Each group of channels of an image less its mean, over its standard deviation, times w, plus bias, then silu.

    Inputs:
        x[B,C,P]: bf16, fp16 or fp32
        w[C]: bf16, fp16 or fp32, optional
        bias[C]: bf16, fp16 or fp32, optional

    Attributes:
        groups (1): how many groups the channels are cut into, in their order; a whole number of at least 1
        eps (1e-5): added to the variance; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        silu (False): whether silu of the norm is taken before the last rounding; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,C,P]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; C that is not a multiple of `groups`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def group_norm_backward(
    x: T,
    dy: T,
    w: T | None = None,
    bias: T | None = None,
    *,
    groups: int = 1,
    eps: float = 1e-5,
    silu: bool = False,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T]:
    """The gradients of x, w and bias from that of group_norm's y; those of w and bias are sums over each image, which `token_sum` adds.

    A gradient of `group_norm`.

    Inputs:
        x[B,C,P]: bf16, fp16 or fp32
        dy[B,C,P]: bf16, fp16 or fp32
        w[C]: bf16, fp16 or fp32, optional
        bias[C]: bf16, fp16 or fp32, optional

    Attributes:
        groups (1): how many groups the channels are cut into, in their order; a whole number of at least 1
        eps (1e-5): added to the variance; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        silu (False): whether silu of the norm is taken before the last rounding; True or False
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[B,C,P]: dtype
        dw[B,C]: fp32
        dbias[B,C]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; C that is not a multiple of `groups`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def attention(
    q: T,
    k: T,
    v: T,
    q_pos: T,
    kv_len: T,
    sinks: T | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Attention over padded keys: sequence b has the first `kv_len[b]` of S.

    Inputs:
        q[B,T,Hq,D]: bf16, fp16 or fp32
        k[B,S,Hkv,D]: bf16, fp16 or fp32
        v[B,S,Hkv,E]: bf16, fp16 or fp32
        q_pos[B,T]: i32; 0 or more
        kv_len[B]: i32; 0 to S
        sinks[Hq]: fp32, optional

    Attributes:
        scale (1/sqrt(D)): scores are multiplied with it; read as f64; a finite number of at least 0
        causal (False): `1`: key j is visible to position p only when j <= p; True or False
        window (0): key j is visible only when j > p - window; `0` means no window; a whole number of at least 0
        chunk (0): key j is visible only when j >= p - p mod chunk; `0` means no chunks; a whole number of at least 0
        softcap (0.0): scores are bent below it by a hyperbolic tangent; read as f64; `0` means none; a finite number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        out[B,T,Hq,E]: dtype
        lse[B,T,Hq]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; Hkv = 0; Hq not a multiple of Hkv; `kv_len` outside 0..=S
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def paged_attention(
    q: T,
    k: T,
    v: T,
    page_table: T,
    q_pos: T,
    kv_len: T,
    sinks: T | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Attention over pages: key j of sequence b is row j mod Z of page `page_table[b][j / Z]`.

    Inputs:
        q[B,T,Hq,D]: bf16, fp16 or fp32
        k[P,Z,Hkv,D]: bf16, fp16 or fp32
        v[P,Z,Hkv,E]: bf16, fp16 or fp32
        page_table[B,C]: i32; 0 to P - 1 where `kv_len` reaches
        q_pos[B,T]: i32; 0 or more
        kv_len[B]: i32; 0 to C Z
        sinks[Hq]: fp32, optional

    Attributes:
        scale (1/sqrt(D)): scores are multiplied with it; read as f64; a finite number of at least 0
        causal (False): `1`: key j is visible to position p only when j <= p; True or False
        window (0): key j is visible only when j > p - window; `0` means no window; a whole number of at least 0
        chunk (0): key j is visible only when j >= p - p mod chunk; `0` means no chunks; a whole number of at least 0
        softcap (0.0): scores are bent below it by a hyperbolic tangent; read as f64; `0` means none; a finite number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        out[B,T,Hq,E]: dtype
        lse[B,T,Hq]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; Hkv = 0; Hq not a multiple of Hkv; Z = 0; `page_table` outside 0..P where in use; `kv_len` outside 0..=C Z
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def packed_attention(
    q: T,
    k: T,
    v: T,
    q_pos: T,
    q_start: T,
    k_start: T,
    sinks: T | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Attention over packed sequences: b has queries `q_start[b]..q_start[b+1]` and keys `k_start[b]..k_start[b+1]`.

    Inputs:
        q[T,Hq,D]: bf16, fp16 or fp32
        k[S,Hkv,D]: bf16, fp16 or fp32
        v[S,Hkv,E]: bf16, fp16 or fp32
        q_pos[T]: i32; 0 or more
        q_start[B+1]: i32; ascending from 0 to T
        k_start[B+1]: i32; ascending from 0 to S
        sinks[Hq]: fp32, optional

    Attributes:
        scale (1/sqrt(D)): scores are multiplied with it; read as f64; a finite number of at least 0
        causal (False): `1`: key j is visible to position p only when j <= p; True or False
        window (0): key j is visible only when j > p - window; `0` means no window; a whole number of at least 0
        chunk (0): key j is visible only when j >= p - p mod chunk; `0` means no chunks; a whole number of at least 0
        softcap (0.0): scores are bent below it by a hyperbolic tangent; read as f64; `0` means none; a finite number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        out[T,Hq,E]: dtype
        lse[T,Hq]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; Hkv = 0; Hq not a multiple of Hkv; `q_start` that does not ascend from 0 to T; `k_start` that does not ascend from 0 to S
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def attention_backward(
    q: T,
    k: T,
    v: T,
    out: T,
    lse: T,
    dout: T,
    q_pos: T,
    kv_len: T,
    mask: T | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    tf32: Literal["disabled", "enabled"] = 'disabled',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T]:
    """The gradients of q, k and v from that of attention's out; out and lse are what attention returned.

    A gradient of `attention`.

    Inputs:
        q[B,T,Hq,D]: bf16, fp16 or fp32
        k[B,S,Hkv,D]: bf16, fp16 or fp32
        v[B,S,Hkv,E]: bf16, fp16 or fp32
        out[B,T,Hq,E]: bf16, fp16 or fp32
        lse[B,T,Hq]: fp32
        dout[B,T,Hq,E]: bf16, fp16 or fp32
        q_pos[B,T]: i32; 0 or more
        kv_len[B]: i32; 0 to S
        mask[B,T]: i32; 0: padding; anything else: a token, optional

    Attributes:
        scale (1/sqrt(D)): scores are multiplied with it; read as f64; a finite number of at least 0
        causal (False): `1`: key j is visible to position p only when j <= p; True or False
        window (0): key j is visible only when j > p - window; `0` means no window; a whole number of at least 0
        chunk (0): key j is visible only when j >= p - p mod chunk; `0` means no chunks; a whole number of at least 0
        softcap (0.0): scores are bent below it by a hyperbolic tangent; read as f64; `0` means none; a finite number of at least 0
        tf32 ('disabled'): `enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16; disabled or enabled
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dq[B,T,Hq,D]: dtype
        dk[B,S,Hkv,D]: dtype
        dv[B,S,Hkv,E]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; Hkv = 0; Hq not a multiple of Hkv; `kv_len` outside 0..=S
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def index_score(
    q: T,
    k: T,
    weight: T,
    *,
    scale: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """What each key is worth to each token: the heads' scores, none below 0, weighted and added.

    Inputs:
        q[T,H,D]: bf16, fp16 or fp32
        k[S,D]: bf16, fp16 or fp32
        weight[T,H]: fp32

    Attributes:
        scale (1.0): a head's score is multiplied with it; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        score[T,S]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def conv(
    x: T,
    w: T,
    bias: T | None = None,
    *,
    groups: int = 1,
    stride_d: int = 1,
    stride_h: int = 1,
    stride_w: int = 1,
    dilation_d: int = 1,
    dilation_h: int = 1,
    dilation_w: int = 1,
    pad_front: int = 0,
    pad_back: int = 0,
    pad_top: int = 0,
    pad_bottom: int = 0,
    pad_left: int = 0,
    pad_right: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The convolution of images, plus bias: in groups of channels, each output a product over input channels and taps.

    Inputs:
        x[B,C,D,H,W]: bf16, fp16 or fp32
        w[O,I,KD,KH,KW]: bf16, fp16 or fp32
        bias[O]: bf16, fp16 or fp32, optional

    Attributes:
        groups (1): how many groups the channels are cut into, in their order; a whole number of at least 1
        stride_d (1): places from one output to the next; a whole number of at least 1
        stride_h (1): places from one output to the next; a whole number of at least 1
        stride_w (1): places from one output to the next; a whole number of at least 1
        dilation_d (1): places from one tap to the next; a whole number of at least 1
        dilation_h (1): places from one tap to the next; a whole number of at least 1
        dilation_w (1): places from one tap to the next; a whole number of at least 1
        pad_front (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_back (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_top (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_bottom (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_left (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_right (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,O,OD,OH,OW]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; an axis of an image or a window without places; a window longer than the image and its padding; padding of a whole window; O that is not a multiple of `groups`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def conv_dx(
    dy: T,
    w: T,
    offset: T | None = None,
    *,
    extra_d: int = 0,
    extra_h: int = 0,
    extra_w: int = 0,
    groups: int = 1,
    stride_d: int = 1,
    stride_h: int = 1,
    stride_w: int = 1,
    dilation_d: int = 1,
    dilation_h: int = 1,
    dilation_w: int = 1,
    pad_front: int = 0,
    pad_back: int = 0,
    pad_top: int = 0,
    pad_bottom: int = 0,
    pad_left: int = 0,
    pad_right: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of conv's y; plus offset, the transposed convolution.

    A gradient of `conv`.

    Inputs:
        dy[B,O,OD,OH,OW]: bf16, fp16 or fp32
        w[O,I,KD,KH,KW]: bf16, fp16 or fp32
        offset[C]: bf16, fp16 or fp32, optional

    Attributes:
        extra_d (0): places of x behind those that windows reach; fewer than the stride; a whole number of at least 0
        extra_h (0): places of x behind those that windows reach; fewer than the stride; a whole number of at least 0
        extra_w (0): places of x behind those that windows reach; fewer than the stride; a whole number of at least 0
        groups (1): how many groups the channels are cut into, in their order; a whole number of at least 1
        stride_d (1): places from one output to the next; a whole number of at least 1
        stride_h (1): places from one output to the next; a whole number of at least 1
        stride_w (1): places from one output to the next; a whole number of at least 1
        dilation_d (1): places from one tap to the next; a whole number of at least 1
        dilation_h (1): places from one tap to the next; a whole number of at least 1
        dilation_w (1): places from one tap to the next; a whole number of at least 1
        pad_front (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_back (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_top (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_bottom (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_left (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_right (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of dy): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[B,C,D,H,W]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; an axis of dy or a window without places; an axis of dx that padding leaves none; `extra` of a stride or more; padding of a whole window; O that is not a multiple of `groups`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def conv_dw(
    x: T,
    dy: T,
    carry: T,
    mask: T | None = None,
    *,
    groups: int = 1,
    stride_d: int = 1,
    stride_h: int = 1,
    stride_w: int = 1,
    dilation_d: int = 1,
    dilation_h: int = 1,
    dilation_w: int = 1,
    pad_front: int = 0,
    pad_back: int = 0,
    pad_top: int = 0,
    pad_bottom: int = 0,
    pad_left: int = 0,
    pad_right: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradient of w from that of conv's y, added to `carry` place after place of the images that count; and sums of dy over each image, of which `token_sum` makes the gradient of bias.

    A gradient of `conv`.

    Inputs:
        x[B,C,D,H,W]: bf16, fp16 or fp32
        dy[B,O,OD,OH,OW]: bf16, fp16 or fp32
        carry[O,I,KD,KH,KW]: fp32
        mask[B]: i32; 0: padding; anything else: a token, optional

    Attributes:
        groups (1): how many groups the channels are cut into, in their order; a whole number of at least 1
        stride_d (1): places from one output to the next; a whole number of at least 1
        stride_h (1): places from one output to the next; a whole number of at least 1
        stride_w (1): places from one output to the next; a whole number of at least 1
        dilation_d (1): places from one tap to the next; a whole number of at least 1
        dilation_h (1): places from one tap to the next; a whole number of at least 1
        dilation_w (1): places from one tap to the next; a whole number of at least 1
        pad_front (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_back (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_top (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_bottom (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_left (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        pad_right (0): zeros on this side of the image; fewer than a window has places; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[O,I,KD,KH,KW]: fp32
        dbias[B,O]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; an axis of an image or a window without places; a window longer than the image and its padding; padding of a whole window; O that is not a multiple of `groups`
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def causal_conv1d(
    x: T,
    w: T,
    bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Each channel over its last K rows, those of `state` before the first; `next` is the state for what follows.

    Inputs:
        x[B,T,C]: bf16, fp16 or fp32
        w[C,K]: bf16, fp16 or fp32
        bias[C]: bf16, fp16 or fp32, optional
        state[B,J,C]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,T,C]: dtype
        next[B,J,C]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; K = 0; J other than K - 1; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def causal_conv1d_backward(
    dy: T,
    w: T,
    dnext: T | None = None,
    len: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of x and state from those of causal_conv1d's y and next.

    A gradient of `causal_conv1d`.

    Inputs:
        dy[B,T,C]: bf16, fp16 or fp32
        w[C,K]: bf16, fp16 or fp32
        dnext[B,J,C]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of dy): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[B,T,C]: dtype
        dstate[B,J,C]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; K = 0; J other than K - 1; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def causal_conv1d_dw(
    x: T,
    dy: T,
    carry: T,
    state: T | None = None,
    mask: T | None = None,
    *,
    token_offset: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """64 sums over tokens, which `fold` joins: the gradient of w from that of causal_conv1d's y, added to `carry`.

    A gradient of `causal_conv1d`.

    Inputs:
        x[B,T,C]: bf16, fp16 or fp32
        dy[B,T,C]: bf16, fp16 or fp32
        carry[64,C,K]: fp32
        state[B,J,C]: fp32, optional
        mask[B,T]: i32; 0: padding; anything else: a token, optional

    Attributes:
        token_offset (0): how many tokens of the group earlier calls have had; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[64,C,K]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; K = 0; J other than K - 1
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def ssd_scan(
    x: T,
    dt: T,
    a_log: T,
    b: T,
    c: T,
    d: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    *,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The state-space scan of Mamba-2, position after position, from `state` to `next`, the state for what follows.

    Inputs:
        x[B,T,H,P]: bf16, fp16 or fp32
        dt[B,T,H]: bf16, fp16 or fp32
        a_log[H]: bf16, fp16 or fp32
        b[B,T,G,N]: bf16, fp16 or fp32
        c[B,T,G,N]: bf16, fp16 or fp32
        d[H]: bf16, fp16 or fp32, optional
        dt_bias[H]: bf16, fp16 or fp32, optional
        state[B,H,P,N]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        dt_min (0.0): steps are no shorter, behind their softplus; a finite number from 0 to 1e38
        dt_max (0.0): steps are no longer; `0` means no limit; a finite number from 0 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,T,H,P]: dtype
        next[B,H,P,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; G = 0; H not a multiple of G; dt_max below dt_min but not 0; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def ssd_scan_backward(
    x: T,
    dt: T,
    a_log: T,
    b: T,
    c: T,
    dy: T,
    d: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    dnext: T | None = None,
    *,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T, T, T, T, T]:
    """The gradients of ssd_scan's x, dt, b, c and state; da_log, dd and (for dt_bias) ddt are summed by `token_sum`.

    A gradient of `ssd_scan`.

    Inputs:
        x[B,T,H,P]: bf16, fp16 or fp32
        dt[B,T,H]: bf16, fp16 or fp32
        a_log[H]: bf16, fp16 or fp32
        b[B,T,G,N]: bf16, fp16 or fp32
        c[B,T,G,N]: bf16, fp16 or fp32
        dy[B,T,H,P]: bf16, fp16 or fp32
        d[H]: bf16, fp16 or fp32, optional
        dt_bias[H]: bf16, fp16 or fp32, optional
        state[B,H,P,N]: fp32, optional
        len[B]: i32; 0 to T, optional
        dnext[B,H,P,N]: fp32, optional

    Attributes:
        dt_min (0.0): steps are no shorter, behind their softplus; a finite number from 0 to 1e38
        dt_max (0.0): steps are no longer; `0` means no limit; a finite number from 0 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[B,T,H,P]: dtype
        ddt[B,T,H]: dtype
        db[B,T,G,N]: dtype
        dc[B,T,G,N]: dtype
        da_log[B,T,H]: fp32
        dd[B,T,H]: fp32
        dstate[B,H,P,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; G = 0; H not a multiple of G; dt_max below dt_min but not 0; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def selective_scan(
    x: T,
    dt: T,
    a_log: T,
    b: T,
    c: T,
    d: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The scan of Mamba, whose channels have steps and rates of their own, from `state` to `next`, the state for what follows.

    Inputs:
        x[B,T,C]: bf16, fp16 or fp32
        dt[B,T,C]: bf16, fp16 or fp32
        a_log[C,N]: bf16, fp16 or fp32
        b[B,T,N]: bf16, fp16 or fp32
        c[B,T,N]: bf16, fp16 or fp32
        d[C]: bf16, fp16 or fp32, optional
        dt_bias[C]: bf16, fp16 or fp32, optional
        state[B,C,N]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,T,C]: dtype
        next[B,C,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def selective_scan_backward(
    x: T,
    dt: T,
    a_log: T,
    b: T,
    c: T,
    dy: T,
    d: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    dnext: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T, T, T, T, T]:
    """The gradients of selective_scan's x, dt, b, c and state; da_log, dd and (for dt_bias) ddt are summed by `token_sum`.

    A gradient of `selective_scan`.

    Inputs:
        x[B,T,C]: bf16, fp16 or fp32
        dt[B,T,C]: bf16, fp16 or fp32
        a_log[C,N]: bf16, fp16 or fp32
        b[B,T,N]: bf16, fp16 or fp32
        c[B,T,N]: bf16, fp16 or fp32
        dy[B,T,C]: bf16, fp16 or fp32
        d[C]: bf16, fp16 or fp32, optional
        dt_bias[C]: bf16, fp16 or fp32, optional
        state[B,C,N]: fp32, optional
        len[B]: i32; 0 to T, optional
        dnext[B,C,N]: fp32, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[B,T,C]: dtype
        ddt[B,T,C]: dtype
        db[B,T,N]: dtype
        dc[B,T,N]: dtype
        da_log[B,C,N]: fp32
        dd[B,C]: fp32
        dstate[B,C,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def wkv7(
    r: T,
    w: T,
    k: T,
    v: T,
    a: T,
    b: T,
    state: T | None = None,
    len: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The recurrence of RWKV-7: each token decays the state by e^w, adds b times what a reads of it and k times v, and reads it by r.

    Inputs:
        r[B,T,H,D]: bf16, fp16 or fp32
        w[B,T,H,D]: bf16, fp16 or fp32
        k[B,T,H,D]: bf16, fp16 or fp32
        v[B,T,H,D]: bf16, fp16 or fp32
        a[B,T,H,D]: bf16, fp16 or fp32
        b[B,T,H,D]: bf16, fp16 or fp32
        state[B,H,D,D]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of r): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,T,H,D]: dtype
        next[B,H,D,D]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def wkv7_backward(
    r: T,
    w: T,
    k: T,
    v: T,
    a: T,
    b: T,
    dy: T,
    state: T | None = None,
    len: T | None = None,
    dnext: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T, T, T, T, T]:
    """The gradients of wkv7's inputs from those of y and next.

    A gradient of `wkv7`.

    Inputs:
        r[B,T,H,D]: bf16, fp16 or fp32
        w[B,T,H,D]: bf16, fp16 or fp32
        k[B,T,H,D]: bf16, fp16 or fp32
        v[B,T,H,D]: bf16, fp16 or fp32
        a[B,T,H,D]: bf16, fp16 or fp32
        b[B,T,H,D]: bf16, fp16 or fp32
        dy[B,T,H,D]: bf16, fp16 or fp32
        state[B,H,D,D]: fp32, optional
        len[B]: i32; 0 to T, optional
        dnext[B,H,D,D]: fp32, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of r): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dr[B,T,H,D]: dtype
        dw[B,T,H,D]: dtype
        dk[B,T,H,D]: dtype
        dv[B,T,H,D]: dtype
        da[B,T,H,D]: dtype
        db[B,T,H,D]: dtype
        dstate[B,H,D,D]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gated_delta_rule(
    q: T,
    k: T,
    v: T,
    g: T,
    beta: T,
    a_log: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    len: T | None = None,
    *,
    scale: float | None = None,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Each token decays the state by e^g, moves what k reads from it towards v by beta, and reads it by q.

    Inputs:
        q[B,T,Hk,D]: bf16, fp16 or fp32
        k[B,T,Hk,D]: bf16, fp16 or fp32
        v[B,T,Hv,E]: bf16, fp16 or fp32
        g[B,T,Hv,G]: fp32
        beta[B,T,Hv]: fp32
        a_log[Hv]: fp32, optional
        dt_bias[Hv,G]: fp32, optional
        state[B,Hv,D,E]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        scale (1/sqrt(D)): queries are multiplied with it; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[B,T,Hv,E]: dtype
        next[B,Hv,D,E]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; Hk = 0; Hv not a multiple of Hk; G other than 1 or D; dt_bias without a_log; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gated_delta_rule_backward(
    q: T,
    k: T,
    v: T,
    g: T,
    beta: T,
    dy: T,
    a_log: T | None = None,
    dt_bias: T | None = None,
    state: T | None = None,
    dnext: T | None = None,
    len: T | None = None,
    *,
    scale: float | None = None,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T, T, T, T, T]:
    """The gradients of gated_delta_rule's inputs from those of y and next; da_log and (for dt_bias) dg are summed by `token_sum`.

    A gradient of `gated_delta_rule`.

    Inputs:
        q[B,T,Hk,D]: bf16, fp16 or fp32
        k[B,T,Hk,D]: bf16, fp16 or fp32
        v[B,T,Hv,E]: bf16, fp16 or fp32
        g[B,T,Hv,G]: fp32
        beta[B,T,Hv]: fp32
        dy[B,T,Hv,E]: bf16, fp16 or fp32
        a_log[Hv]: fp32, optional
        dt_bias[Hv,G]: fp32, optional
        state[B,Hv,D,E]: fp32, optional
        dnext[B,Hv,D,E]: fp32, optional
        len[B]: i32; 0 to T, optional

    Attributes:
        scale (1/sqrt(D)): queries are multiplied with it; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of q): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dq[B,T,Hk,D]: dtype
        dk[B,T,Hk,D]: dtype
        dv[B,T,Hv,E]: dtype
        dg[B,T,Hv,G]: fp32
        dbeta[B,T,Hv]: fp32
        da_log[B,T,Hv]: fp32
        dstate[B,Hv,D,E]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; Hk = 0; Hv not a multiple of Hk; G other than 1 or D; dt_bias without a_log; `len` outside 0..=T
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def logprob(
    logits: T,
    target: T,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The log-probability of each row's target, and the log of the sum of exponentials.

    Inputs:
        logits[R,V]: bf16, fp16 or fp32
        target[R]: i32; below V; negative ones are ignored

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        logprob[R]: fp32
        lse[R]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `target` of V or more
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def logprob_backward(
    logits: T,
    target: T,
    lse: T,
    dlogprob: T,
    dlse: T | None = None,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of logits from those of logprob's outputs; lse is what logprob returned.

    A gradient of `logprob`.

    Inputs:
        logits[R,V]: bf16, fp16 or fp32
        target[R]: i32; below V; negative ones are ignored
        lse[R]: fp32
        dlogprob[R]: fp32
        dlse[R]: fp32, optional

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of logits): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dlogits[R,V]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; `target` of V or more
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def linear_logprob(
    x: T,
    w: T,
    target: T,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Logprob of the logits x w^T, which are never stored.

    Inputs:
        x[M,K]: bf16, fp16 or fp32
        w[V,K]: bf16, fp16 or fp32
        target[M]: i32; below V; negative ones are ignored

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        logprob[M]: fp32
        lse[M]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `target` of V or more
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def linear_logprob_backward(
    x: T,
    w: T,
    target: T,
    lse: T,
    dlogprob: T,
    dlse: T | None = None,
    mask: T | None = None,
    carry: T | None = None,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of x and w from those of linear_logprob's outputs; lse is what it returned; the logits and their gradients are never stored.

    A gradient of `linear_logprob`.

    Inputs:
        x[M,K]: bf16, fp16 or fp32
        w[V,K]: bf16, fp16 or fp32
        target[M]: i32; below V; negative ones are ignored
        lse[M]: fp32
        dlogprob[M]: fp32
        dlse[M]: fp32, optional
        mask[M]: i32; 0: padding; anything else: a token, optional
        carry[V,K]: fp32, optional

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[M,K]: dtype
        dw[V,K]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `target` of V or more
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def entropy(
    logits: T,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The entropy of each row's distribution, and logprob's lse.

    Inputs:
        logits[R,V]: bf16, fp16 or fp32

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        entropy[R]: fp32
        lse[R]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def entropy_backward(
    logits: T,
    entropy: T,
    lse: T,
    dentropy: T,
    dlse: T | None = None,
    *,
    temperature: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of logits from those of entropy's outputs; entropy and lse are what it returned.

    A gradient of `entropy`.

    Inputs:
        logits[R,V]: bf16, fp16 or fp32
        entropy[R]: fp32
        lse[R]: fp32
        dentropy[R]: fp32
        dlse[R]: fp32, optional

    Attributes:
        temperature (1.0): logits are multiplied with its inverse; read as f64; a finite number from 3e-39 to 1e45
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of logits): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dlogits[R,V]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def softmax(
    x: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The softmax of each row.

    Inputs:
        x[R,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def softmax_backward(
    x: T,
    dy: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of softmax's y.

    A gradient of `softmax`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def clamped_silu_mul(
    gate: T,
    up: T,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """G times sigmoid(alpha g) times up and 1, of a gate and an up within limits.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32

    Attributes:
        alpha (1.702): the factor of the gate in the sigmoid; a finite number from 1e-38 to 1e38
        limit (7.0): no gate is above it, no up above it or below its negative; a finite number from 1e-38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def silu_mul(
    gate: T,
    up: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Silu(gate) times up.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def clamped_silu_mul_backward(
    gate: T,
    up: T,
    dy: T,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of gate and up from that of clamped_silu_mul's y.

    A gradient of `clamped_silu_mul`.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32
        dy[...]: bf16, fp16 or fp32

    Attributes:
        alpha (1.702): the factor of the gate in the sigmoid; a finite number from 1e-38 to 1e38
        limit (7.0): no gate is above it, no up above it or below its negative; a finite number from 1e-38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dgate[...]: dtype
        dup[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def silu_mul_backward(
    gate: T,
    up: T,
    dy: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of gate and up from that of silu_mul's y.

    A gradient of `silu_mul`.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32
        dy[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dgate[...]: dtype
        dup[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gelu_mul(
    gate: T,
    up: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Gelu(gate), by the hyperbolic tangent, times up.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def gelu_mul_backward(
    gate: T,
    up: T,
    dy: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of gate and up from that of gelu_mul's y.

    A gradient of `gelu_mul`.

    Inputs:
        gate[...]: bf16, fp16 or fp32
        up[...]: bf16, fp16 or fp32
        dy[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dgate[...]: dtype
        dup[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def sigmoid_mul(
    gate: T,
    x: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Sigmoid(gate) times x, each gate for N / G elements side by side.

    Inputs:
        gate[R,G]: bf16, fp16 or fp32
        x[R,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; N that is not a multiple of G
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def sigmoid_mul_backward(
    gate: T,
    x: T,
    dy: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of gate and x from that of sigmoid_mul's y.

    A gradient of `sigmoid_mul`.

    Inputs:
        gate[R,G]: bf16, fp16 or fp32
        x[R,N]: bf16, fp16 or fp32
        dy[R,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of gate): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dgate[R,G]: dtype
        dx[R,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; N that is not a multiple of G
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def activate(
    x: T,
    *,
    kind: Literal["gelu", "gelu_tanh", "relu2", "xielu"] = 'gelu',
    alpha_p: float = 0.8,
    alpha_n: float = 0.8,
    beta: float = 0.5,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """An activation of x: its gelu, the square of what of it is above 0, or its xIELU.

    Inputs:
        x[...]: bf16, fp16 or fp32

    Attributes:
        kind ('gelu'): which: gelu by the error function, or by the hyperbolic tangent; the square of the positive part; xIELU; gelu, gelu_tanh, relu2 or xielu
        alpha_p (0.8): of xielu: the share of squares above 0; a finite number from -1e38 to 1e38
        alpha_n (0.8): of xielu: the share of `e^x - 1 - x` below 0; a finite number from -1e38 to 1e38
        beta (0.5): of xielu: the share of x; a finite number from -1e38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def activate_backward(
    x: T,
    dy: T,
    *,
    kind: Literal["gelu", "gelu_tanh", "relu2", "xielu"] = 'gelu',
    alpha_p: float = 0.8,
    alpha_n: float = 0.8,
    beta: float = 0.5,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of activate's y.

    A gradient of `activate`.

    Inputs:
        x[...]: bf16, fp16 or fp32
        dy[...]: bf16, fp16 or fp32

    Attributes:
        kind ('gelu'): which: gelu by the error function, or by the hyperbolic tangent; the square of the positive part; xIELU; gelu, gelu_tanh, relu2 or xielu
        alpha_p (0.8): of xielu: the share of squares above 0; a finite number from -1e38 to 1e38
        alpha_n (0.8): of xielu: the share of `e^x - 1 - x` below 0; a finite number from -1e38 to 1e38
        beta (0.5): of xielu: the share of x; a finite number from -1e38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def softcap(
    x: T,
    *,
    cap: float = 30.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Cap * tanh(x / cap).

    Inputs:
        x[...]: bf16, fp16 or fp32

    Attributes:
        cap (30.0): no output is larger; read as f64; a finite number from 1e-38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def softcap_backward(
    x: T,
    dy: T,
    *,
    cap: float = 30.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of softcap's y.

    A gradient of `softcap`.

    Inputs:
        x[...]: bf16, fp16 or fp32
        dy[...]: bf16, fp16 or fp32

    Attributes:
        cap (30.0): no output is larger; read as f64; a finite number from 1e-38 to 1e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def scale(
    x: T,
    *,
    factor: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """X times a number.

    Inputs:
        x[...]: bf16, fp16 or fp32

    Attributes:
        factor (1.0): the number; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def rope(
    x: T,
    pos: T,
    *,
    theta: float = 10000.0,
    pairing: Literal["half", "interleaved"] = 'half',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Pairs of elements of each head, turned by their position.

    Inputs:
        x[T,H,D]: bf16, fp16 or fp32
        pos[T]: i32; 0 or more

    Attributes:
        theta (10000.0): base of the frequencies; read as f64; a finite number greater than 0
        pairing ('half'): `half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1); half or interleaved
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[T,H,D]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; odd D
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def rope_backward(
    dy: T,
    pos: T,
    *,
    theta: float = 10000.0,
    pairing: Literal["half", "interleaved"] = 'half',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of rope's y: pairs turned back by their position.

    A gradient of `rope`.

    Inputs:
        dy[T,H,D]: bf16, fp16 or fp32
        pos[T]: i32; 0 or more

    Attributes:
        theta (10000.0): base of the frequencies; read as f64; a finite number greater than 0
        pairing ('half'): `half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1); half or interleaved
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of dy): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[T,H,D]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; odd D
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def norm_rope(
    x: T,
    w: T,
    pos: T,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    theta: float = 10000.0,
    pairing: Literal["half", "interleaved"] = 'half',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Rope of the rms_norm of each head.

    Inputs:
        x[T,H,D]: bf16, fp16 or fp32
        w[D]: bf16, fp16 or fp32
        pos[T]: i32; 0 or more

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        theta (10000.0): base of the frequencies; read as f64; a finite number greater than 0
        pairing ('half'): `half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1); half or interleaved
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[T,H,D]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; odd D
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def norm_rope_backward(
    x: T,
    w: T,
    dy: T,
    pos: T,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    weight_offset: bool = False,
    theta: float = 10000.0,
    pairing: Literal["half", "interleaved"] = 'half',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of x from that of norm_rope's y.

    A gradient of `norm_rope`.

    Inputs:
        x[T,H,D]: bf16, fp16 or fp32
        w[D]: bf16, fp16 or fp32
        dy[T,H,D]: bf16, fp16 or fp32
        pos[T]: i32; 0 or more

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        weight_offset (False): `1`: use w + 1 for w; True or False
        theta (10000.0): base of the frequencies; read as f64; a finite number greater than 0
        pairing ('half'): `half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1); half or interleaved
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[T,H,D]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; odd D
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def norm_rope_dw(
    x: T,
    dy: T,
    pos: T,
    mask: T | None = None,
    carry: T | None = None,
    *,
    eps: float = 1e-6,
    rounding: Literal["once", "hf"] = 'once',
    theta: float = 10000.0,
    pairing: Literal["half", "interleaved"] = 'half',
    token_offset: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """64 sums over heads of tokens, which `fold` joins: the gradient of w from that of norm_rope's y.

    A gradient of `norm_rope`.

    Inputs:
        x[T,H,D]: bf16, fp16 or fp32
        dy[T,H,D]: bf16, fp16 or fp32
        pos[T]: i32; 0 or more
        mask[T]: i32; 0: padding; anything else: a token, optional
        carry[64,D]: fp32, optional

    Attributes:
        eps (1e-6): added to the mean of the squares; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        rounding ('once'): `once`: one rounding at the end; `hf`: the normalised value is rounded to bf16 before the weight; once or hf
        theta (10000.0): base of the frequencies; read as f64; a finite number greater than 0
        pairing ('half'): `half`: (i, i + D/2) turn together; `interleaved`: (2i, 2i + 1); half or interleaved
        token_offset (0): how many tokens of the group earlier calls have had; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[64,D]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; odd D
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def add(
    a: T,
    b: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """A + b.

    Inputs:
        a[...]: bf16, fp16 or fp32
        b[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of a): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def mul(
    a: T,
    b: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """A * b.

    Inputs:
        a[...]: bf16, fp16 or fp32
        b[...]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of a): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def embedding(
    w: T,
    tokens: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The rows of w that the tokens name.

    Inputs:
        w[V,D]: bf16, fp16 or fp32
        tokens[T]: i32; 0 to V - 1

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of w): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[T,D]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; `tokens` outside 0..V
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def embedding_dw(
    dy: T,
    tokens: T,
    carry: T,
    mask: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of w from that of embedding's y, added to `carry`.

    A gradient of `embedding`.

    Inputs:
        dy[T,D]: bf16, fp16 or fp32
        tokens[T]: i32; 0 to V - 1
        carry[V,D]: fp32
        mask[T]: i32; 0: padding; anything else: a token, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dw[V,D]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `tokens` outside 0..V
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def argmax(
    x: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The index of the largest element of each row, the lowest among equals.

    Inputs:
        x[R,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        index[R]: i32

    Raises:
        ValueError: another shape, dtype, stride or range; N = 0; N beyond i32
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def topk(
    x: T,
    count: T | None = None,
    *,
    k: int = 1,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Where the `k` largest of the first `count` elements of each row stand, ascending, the lowest among equals; then -1.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        count[R]: i32; 0 to N, optional

    Attributes:
        k (1): how many are taken of a row; a whole number of at least 1
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        index[R,K]: i32

    Raises:
        ValueError: another shape, dtype, stride or range; N beyond i32; `count` outside 0..=N
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def penalize(
    logits: T,
    tokens: T,
    begin: T,
    prompt_end: T,
    end: T,
    repetition: T,
    frequency: T,
    presence: T,
    bias: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """Logits plus `bias`, then those of tokens that a text has made less likely; its tokens so far are `begin..end` of `tokens`, its output those from `prompt_end` on.

    Inputs:
        logits[R,V]: bf16, fp16 or fp32
        tokens[S]: i32; 0 to V - 1
        begin[R]: i32; 0 to S
        prompt_end[R]: i32; 0 to S
        end[R]: i32; 0 to S
        repetition[R]: fp32
        frequency[R]: fp32
        presence[R]: fp32
        bias[R,V]: fp32, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,V]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `tokens` outside 0..V; `begin` outside 0..=S; `prompt_end` outside 0..=S; `end` outside 0..=S
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def truncate(
    x: T,
    scale: T,
    top_k: T,
    top_p: T,
    min_p: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Each row times its `scale`, and -inf in the place of tokens that may not be sampled; how many may.

    Inputs:
        x[R,V]: bf16, fp16 or fp32
        scale[R]: fp32
        top_k[R]: i32; 0 or more
        top_p[R]: fp32
        min_p[R]: fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[R,V]: fp32
        kept[R]: i32

    Raises:
        ValueError: another shape, dtype, stride or range; V above 2^22
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def draw(
    x: T,
    bits: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """A token of each row, by the weights that softmax gives them and 64 random bits, the low half first.

    Inputs:
        x[R,V]: bf16, fp16 or fp32
        bits[R,2]: i32; any

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        token[R]: i32

    Raises:
        ValueError: another shape, dtype, stride or range; V above 2^22
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def route(
    logits: T,
    bias: T | None = None,
    experts: T | None = None,
    *,
    chosen: int = 1,
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = 'softmax',
    jitter: float = 0.01,
    chosen_by: Literal["scores", "logits"] = 'scores',
    groups: int = 1,
    top_groups: int = 1,
    group_worth: Literal["max", "top_two"] = 'max',
    normalise: bool = False,
    scale: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Each token's experts: their rank, -1 where not chosen, and their weight, +0 where not chosen.

    Inputs:
        logits[T,E]: bf16, fp16 or fp32
        bias[E]: bf16, fp16 or fp32, optional
        experts[T,K]: i32; in each row `chosen` of 0 to E - 1, none twice, or -1 alone, optional

    Attributes:
        chosen (1): how many experts a token has; a whole number of at least 1
        scoring ('softmax'): how logits become scores; softmax, sigmoid or sparsemixer
        jitter (0.01): for sparsemixer, how far below the chosen logit, as half a share, others count for its weight; read as f64; a finite number from 0 to 1.7014117e38
        chosen_by ('scores'): what decides the choice, beside the bias; scores or logits
        groups (1): groups of experts of one size; a whole number of at least 1
        top_groups (1): groups that experts are chosen from; a whole number of at least 1
        group_worth ('max'): what a group is worth: its best score, or the sum of its best two; max or top_two
        normalise (False): `1`: weights are divided by their sum; True or False
        scale (1.0): weights are multiplied with it; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        rank[T,E]: i32
        weight[T,E]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `groups` that do not divide E; `top_groups` that do not hold `chosen`; `top_two` of groups of one; E beyond i32; `experts` outside 0..E, or twice the same in a row
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def route_backward(
    logits: T,
    rank: T,
    dweight: T,
    *,
    chosen: int = 1,
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = 'softmax',
    jitter: float = 0.01,
    normalise: bool = False,
    scale: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The gradient of logits from that of route's weight; of an expert that was not chosen, dweight is not read.

    A gradient of `route`.

    Inputs:
        logits[T,E]: bf16, fp16 or fp32
        rank[T,E]: i32; in each row 0 to `chosen` - 1 once, and -1 elsewhere
        dweight[T,E]: fp32

    Attributes:
        chosen (1): how many experts a token has; a whole number of at least 1
        scoring ('softmax'): how logits become scores; softmax, sigmoid or sparsemixer
        jitter (0.01): for sparsemixer, how far below the chosen logit, as half a share, others count for its weight; read as f64; a finite number from 0 to 1.7014117e38
        normalise (False): `1`: weights are divided by their sum; True or False
        scale (1.0): weights are multiplied with it; read as f64, rounded to f32; a finite number from -3.4028235e38 to 3.4028235e38
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dlogits[T,E]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; E beyond i32; `rank` without each rank once in a row
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def combine(
    x: T,
    row: T,
    weight: T,
    shared: T | None = None,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """For each token the rows of x that `row` names, weighted and added, and then `shared`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        row[T,K]: i32; 0 to R - 1
        weight[T,K]: bf16, fp16 or fp32
        shared[T,N]: bf16, fp16 or fp32, optional

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[T,N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; `row` outside 0..R
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def combine_backward(
    x: T,
    row: T,
    weight: T,
    dy: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The gradients of x and weight from that of combine's y; that of shared is dy.

    A gradient of `combine`.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        row[T,K]: i32; 0 to R - 1, none twice
        weight[T,K]: bf16, fp16 or fp32
        dy[T,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        dx[R,N]: dtype
        dweight[T,K]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; more entries in `row` than R; `row` outside 0..R, or twice the same
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def token_sum(
    x: T,
    mask: T | None = None,
    carry: T | None = None,
    *,
    token_offset: int = 0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """64 sums over tokens, which `fold` joins: the gradient of a bias.

    Inputs:
        x[R,N]: bf16, fp16 or fp32
        mask[R]: i32; 0: padding; anything else: a token, optional
        carry[64,N]: fp32, optional

    Attributes:
        token_offset (0): how many tokens of the group earlier calls have had; a whole number of at least 0
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        sum[64,N]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def fold(
    x: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The sum of C rows, the upper half added to the lower until one is left.

    Inputs:
        x[C,N]: bf16, fp16 or fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of x): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        y[N]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range; C that is no power of two
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def nll(
    logprob: T,
    count: T,
    *,
    reduction: Literal["sum", "mean"] = 'sum',
    denominator: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """Minus the log-probabilities that count, summed by sequence, and the gradient of the batch's loss.

    Inputs:
        logprob[B,T]: fp32
        count[B,T]: i32; 0: padding; anything else: a token

    Attributes:
        reduction ('sum'): what a sequence is worth: the sum of its values, or their mean; sum or mean
        denominator (1.0): what the sum of all sequences of the logical batch is divided by; read as f64, rounded to f32; a finite number from 1e-30 to 1e30
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        per_sequence[B]: fp32
        dlogprob[B,T]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def policy_loss(
    logprob: T,
    old_logprob: T,
    advantage: T,
    count: T,
    reference: T | None = None,
    *,
    low: float = 0.2,
    high: float = 0.2,
    kl: Literal["none", "k1", "k3"] = 'none',
    beta: float = 0.0,
    reduction: Literal["sum", "mean"] = 'sum',
    denominator: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The clipped policy gradient loss with a KL term, summed by sequence, and the gradient of the batch's loss.

    Inputs:
        logprob[B,T]: fp32
        old_logprob[B,T]: fp32
        advantage[B]: fp32
        count[B,T]: i32; 0: padding; anything else: a token
        reference[B,T]: fp32, optional

    Attributes:
        low (0.2): ratios count as at least 1 - low; read as f64, the difference rounded to f32; a finite number from 0 to 1
        high (0.2): ratios count as at most 1 + high; read as f64, the sum rounded to f32; a finite number from 0 to 1e30
        kl ('none'): how the distance from the reference is estimated; none, k1 or k3
        beta (0.0): the weight of that; read as f64, rounded to f32; a finite number from 0 to 1e30
        reduction ('sum'): what a sequence is worth: the sum of its values, or their mean; sum or mean
        denominator (1.0): what the sum of all sequences of the logical batch is divided by; read as f64, rounded to f32; a finite number from 1e-30 to 1e30
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        per_sequence[B]: fp32
        dlogprob[B,T]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `kl` other than none without reference, and reference without it
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def batch_loss(
    per_sequence: T,
    *,
    groups: int = 1,
    denominator: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The sum of what nll or policy_loss gives for all sequences of the logical batch, over the denominator.

    Inputs:
        per_sequence[B]: fp32

    Attributes:
        groups (1): how many groups the sequences are dealt to; a whole number of at least 1
        denominator (1.0): what the sum of all sequences of the logical batch is divided by; read as f64, rounded to f32; a finite number from 1e-30 to 1e30
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        loss[1]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range; `groups` that are no power of two, or more than 65536
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def group_advantage(
    reward: T,
    *,
    eps: float = 1e-6,
    divide_by: Literal["deviation", "one"] = 'deviation',
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The reward of each of a prompt's S samples minus their mean, over their deviation.

    Inputs:
        reward[P,S]: fp32

    Attributes:
        eps (1e-6): added to the deviation; read as f64, rounded to f32; a finite number from 0 to 3.4028235e38
        divide_by ('deviation'): `one`: the difference from the mean as it is; deviation or one
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        advantage[P,S]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def square_sum(
    x: T,
    *,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: T | None = None,
) -> T:
    """The sum of the squares of each row, a block of a gradient: what clip_factor adds up.

    Inputs:
        x[R,N]: fp32

    Attributes:
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        sum[R]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def clip_factor(
    sum: T,
    *,
    max_norm: float = 1.0,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T]:
    """The norm of a gradient from the sums of squares of its blocks, and the factor that clips it.

    Inputs:
        sum[P]: fp32

    Attributes:
        max_norm (1.0): the norm that is left as it is; read as f64, rounded to f32; a finite number from 1e-30 to 1e30
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype: nothing here follows it
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        norm[1]: fp32
        factor[1]: fp32

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...

def adamw(
    w: T,
    m: T,
    v: T,
    g: T,
    factor: T | None = None,
    *,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int = 1,
    profile: Literal["ieee"] = 'ieee',
    dtype: Any = None,
    into: tuple[T, ...] | None = None,
) -> tuple[T, T, T, T]:
    """A step of AdamW on f32 weights w, moments m and v and gradient g; `rounded` is new_w for the next forward.

    Inputs:
        w[...]: fp32
        m[...]: fp32
        v[...]: fp32
        g[...]: fp32
        factor[1]: fp32, optional

    Attributes:
        lr (0.001): the learning rate; f64; a finite number from 0 to 10000
        beta1 (0.9): how much of m is kept; f64; a finite number of at least 0 and less than 1
        beta2 (0.999): how much of v is kept; f64; a finite number of at least 0 and less than 1
        eps (1e-8): added to the root of v; read as f64, rounded to f32; a finite number from 0 to 1e30
        weight_decay (0.01): times lr: the share of w that goes; f64; a finite number from 0 to 10000
        step (1): the number of the step, from 1 on; a whole number of at least 1
        profile ('ieee'): which arithmetic and order of sums; another profile is `unsupported` where a program does not have it; ieee
        dtype (that of w): of outputs that have none of their own; bf16, fp16 or fp32
        into: the tensors to write, of these shapes, in row-major order, apart from the inputs

    Returns:
        new_w[...]: fp32
        new_m[...]: fp32
        new_v[...]: fp32
        rounded[...]: dtype

    Raises:
        ValueError: another shape, dtype, stride or range
        NotImplementedError: inputs of different float dtypes; a GPU that cannot be used
        MemoryError: the workspace does not fit the budget or the system
    """
    ...
