"""The conformance suite of codecs, for this package's and yours: `check_codec(MyCodec())`.

It raises AssertionError with a message that says what is wrong. It needs no test framework, and takes a
few seconds at most. It does not check accuracy, because each codec defines its own.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from .codec import MAX_MAGNITUDE, Codec, CodecError

# Helpers of the conformance suite: sample vectors, and assertions without a test framework.


def sample(elements: int, seed: int = 0) -> torch.Tensor:
    """Return a reproducible float32 vector (elements,) over many orders of magnitude; every seventh is zero."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    normal = torch.randn(2, elements, dtype=torch.float32, generator=generator, device="cpu")
    values = normal[0] * torch.exp(2 * normal[1])
    values[::7] = 0.0
    return values


def lengths(codec: Codec) -> tuple[int, ...]:
    """Return vector lengths: no element, one, less than a block, whole blocks, a short last block."""
    step = codec.granularity
    return tuple(
        sorted({0, 1, 2, max(step - 1, 1), step, step + 1, 3 * step, 5 * step + (step + 1) // 2, 1000})
    )


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless `condition` holds. Unlike `assert`, it also works under `python -O`."""
    if not condition:
        raise AssertionError(message)


def raises(error: type[Exception], what: str, call: Callable[..., object], *args: object) -> None:
    """Require that `call(*args)` raises `error`. Other exceptions propagate."""
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"{what} did not raise {error.__name__}")


def require_vector(decoded: torch.Tensor, elements: int) -> None:
    """Require that a decoded vector is float32 (elements,), on the CPU, and within MAX_MAGNITUDE."""
    require(decoded.dtype is torch.float32, f"decoded numbers are {decoded.dtype}, not float32")
    require(decoded.shape == (elements,), f"decoded shape is {tuple(decoded.shape)}, expected ({elements},)")
    require(decoded.device.type == "cpu", f"decoded numbers are on {decoded.device}, not on the CPU")
    in_bounds = bool((decoded.abs() <= MAX_MAGNITUDE).all())
    require(in_bounds, "decoded numbers are not all finite and within MAX_MAGNITUDE")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two float32 vectors agree in every bit, including the signs of zeros."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def check_codec(codec: Codec) -> None:
    """Check every promise of `Codec`. Raise AssertionError at the first one that `codec` breaks."""
    check_identity(codec)
    for elements in lengths(codec):
        check_round_trip(codec, elements)
        check_lengths_are_exact(codec, elements)
        check_read_only_and_misaligned(codec, elements)
        check_accumulate(codec, elements)
    check_zeros(codec)
    check_parts(codec)
    check_output_buffers(codec)
    check_arguments(codec)
    check_refused_values(codec)
    check_hostile_payloads(codec)
    check_threads(codec)


def check_identity(codec: Codec) -> None:
    """Check the name and the granularity, and that a codec is a value."""
    require(isinstance(codec.name, str) and codec.name != "", "name must be a non-empty str")
    granularity = codec.granularity
    require(isinstance(granularity, int) and granularity >= 1, "granularity must be an int of at least 1")
    require(hash(codec) == hash(codec), "a codec must be hashable")
    require(codec == copy.copy(codec), "a codec must equal its copy")
    require(codec.encoded_nbytes(0) == 0, "no elements must take no bytes")
    raises(ValueError, "a negative number of elements", codec.encoded_nbytes, -1)
    require(codec.averages.granularity == granularity, "averages must be cut at the same places")
    require(codec.averages.is_sparse == codec.is_sparse, "averages of a dense codec must be dense")


def check_round_trip(codec: Codec, elements: int) -> None:
    """Check sizes, shapes and types, and that encoding and decoding are deterministic."""
    values = sample(elements)
    before = values.clone()
    payload = codec.encode(values)
    require(torch.equal(values, before), "encode changed its input")
    require(isinstance(payload, memoryview), f"encode returned {type(payload).__name__}, not a memoryview")
    nbytes = codec.encoded_nbytes(elements)
    sizes = f"payload of {elements} elements has {payload.nbytes} bytes, encoded_nbytes says {nbytes}"
    require(payload.nbytes == len(payload) == nbytes, sizes)
    # Peers compare digests of encoded bytes, so the same values must not have two encodings.
    require(bytes(codec.encode(values)) == bytes(payload), "encoding twice gave different bytes")
    decoded = codec.decode(payload, elements)
    require_vector(decoded, elements)
    require(same_bits(codec.decode(payload, elements), decoded), "decoding twice gave different numbers")


def check_lengths_are_exact(codec: Codec, elements: int) -> None:
    """Check that payloads of any other length are refused, and element counts with another payload length."""
    payload = bytes(codec.encode(sample(elements)))
    wrong = [payload + b"\0", payload[:-1]] if payload else [b"\0"]
    accumulator = sample(elements, seed=1)
    for hostile in wrong:
        what = f"{len(hostile)} bytes for {elements} elements"
        raises(CodecError, what, codec.decode, hostile, elements)
        raises(CodecError, what, codec.accumulate, hostile, accumulator, 1.0)
    require(same_bits(accumulator, sample(elements, seed=1)), "a refused payload changed the accumulator")
    # The last count would need more memory than exists, if memory were allocated before the length check. A codec
    # of less than a byte for each element may need as many bytes for one more.
    others = [n for n in (elements + 1, 2 * elements + 64) if codec.encoded_nbytes(n) != len(payload)]
    for other in (*others, 1 << 60):
        raises(CodecError, f"{len(payload)} bytes for {other} elements", codec.decode, payload, other)


def check_read_only_and_misaligned(codec: Codec, elements: int) -> None:
    """Check that bytes, bytearray and views of them decode alike, at any alignment."""
    values = sample(elements)
    payload = bytes(codec.encode(values))
    expected = codec.decode(payload, elements)
    # A payload may lie at any place in the memory of a received message.
    for offset in (0, 1, 2, 4):
        shifted = bytes(offset) + payload
        views = (memoryview(shifted)[offset:], memoryview(bytearray(shifted))[offset:])
        for view in views:
            require(
                same_bits(codec.decode(view, elements), expected), f"decode differs at byte offset {offset}"
            )
        # Filled with ones, so that a byte that the codec leaves out shows.
        target = memoryview(bytearray(b"\xff" * len(shifted)))[offset:]
        codec.encode(values, target)
        require(bytes(target) == payload, f"encode differs at byte offset {offset} of its buffer")


def check_accumulate(codec: Codec, elements: int) -> None:
    """Check accumulator + weight * decoded, within the rounding of the two operations."""
    payload = codec.encode(sample(elements))
    decoded = codec.decode(payload, elements).double()
    for weight in (1.0, 0.0, -0.5, 1234.567):
        start = sample(elements, seed=1)
        accumulator = start.clone()
        codec.accumulate(payload, accumulator, weight)
        term = decoded * weight
        # Both operations round, and may be fused.
        # Below the smallest normal number, errors are no fractions of the values.
        bound = 4 * torch.finfo(torch.float32).eps * (start.double().abs() + term.abs()) + 1e-37
        error = (accumulator.double() - (start.double() + term)).abs()
        require(bool((error <= bound).all()), f"accumulate with weight {weight} is not += weight * decoded")


def check_zeros(codec: Codec) -> None:
    """Check that exact zeros decode to exact zeros, alone and among other numbers."""
    for elements in lengths(codec):
        values = sample(elements)
        decoded = codec.decode(codec.encode(values), elements)
        require(bool((decoded[values == 0] == 0).all()), "a zero among other numbers did not stay zero")
        decoded = codec.decode(
            codec.encode(torch.zeros(elements, dtype=torch.float32, device="cpu")), elements
        )
        require(bool((decoded == 0).all()), "a vector of zeros did not stay zero")


def check_parts(codec: Codec) -> None:
    """Check that a vector in parts, cut at multiples of the granularity, decodes to the same bits as the whole."""
    step = codec.granularity
    # Long enough that a codec that works in chunks needs several, with a short last block.
    whole = sample(5 * step + step // 2 + 300_000 // step * step)
    expected = codec.decode(codec.encode(whole), whole.numel())
    for cut in (step, 3 * step, 5 * step, 5 * step + 200_000 // step * step):
        parts = [codec.decode(codec.encode(part), part.numel()) for part in (whole[:cut], whole[cut:])]
        require(
            same_bits(torch.cat(parts), expected), f"cut at element {cut}, the parts decode to other numbers"
        )


def check_output_buffers(codec: Codec) -> None:
    """Check that `out` is used and returned, and that a wrong `out` is refused."""
    elements = 3 * codec.granularity + 1
    values = sample(elements)
    payload = codec.encode(values)
    nbytes = codec.encoded_nbytes(elements)
    buffer = bytearray(b"\xff" * nbytes)
    returned = codec.encode(values, buffer)
    require(bytes(buffer) == bytes(returned) == bytes(payload), "encode into a buffer differs from encode")
    for wrong in (bytearray(nbytes - 1), bytearray(nbytes + 1), memoryview(bytes(nbytes)), bytearray()):
        raises(ValueError, "a buffer of the wrong size or kind", codec.encode, values, wrong)
    # An element before it in the same memory moves the tensor to an odd multiple of 4 bytes.
    decoded = torch.full((elements + 1,), 7.0, dtype=torch.float32, device="cpu")
    returned_out = codec.decode(payload, elements, decoded[1:])
    require(returned_out.data_ptr() == decoded[1:].data_ptr(), "decode did not return out")
    require(
        same_bits(decoded[1:], codec.decode(payload, elements)), "decode into a tensor differs from decode"
    )
    require(decoded[0].item() == 7.0, "decode wrote outside of out")


def check_arguments(codec: Codec) -> None:
    """Check that a tensor of the wrong dtype, shape, stride or length, or a bad weight, raises ValueError."""
    elements = 2 * codec.granularity
    good = sample(elements)
    payload = codec.encode(good)
    for what, wrong in {
        "float64": good.double(),
        "float16": good.half(),
        "a matrix": good.view(2, -1),
        "a scalar": torch.zeros((), dtype=torch.float32, device="cpu"),
        "every second element": sample(2 * elements)[::2],
    }.items():
        raises(ValueError, f"encoding {what}", codec.encode, wrong)
        raises(ValueError, f"decoding into {what}", codec.decode, payload, elements, wrong)
        raises(ValueError, f"accumulating on {what}", codec.accumulate, payload, wrong, 1.0)
    raises(ValueError, "decoding into a longer tensor", codec.decode, payload, elements, sample(elements + 1))
    # 1e39 is finite in Python, and infinite as float32.
    for weight in (float("nan"), float("inf"), 1e39):
        accumulator = good.clone()
        raises(ValueError, f"weight {weight}", codec.accumulate, payload, accumulator, weight)
        require(same_bits(accumulator, good), "a refused weight changed the accumulator")


def check_refused_values(codec: Codec) -> None:
    """Check that numbers that no decoder would accept are not encoded, at any index. MAX_MAGNITUDE is encoded."""
    elements = 70_000 + codec.granularity + 1
    for bad in (float("nan"), float("inf"), -float("inf"), 1e38, -1e38, MAX_MAGNITUDE * 1.001):
        for index in (0, elements // 2, elements - 1):
            values = torch.ones(elements, dtype=torch.float32, device="cpu")
            values[index] = bad
            raises(CodecError, f"encoding {bad} at element {index}", codec.encode, values)
    for extreme in (MAX_MAGNITUDE, -MAX_MAGNITUDE):
        values = sample(elements)
        values[elements // 3] = extreme
        require_vector(codec.decode(codec.encode(values), elements), elements)
    # The reciprocal of a scale as small as this may overflow to infinity.
    tiny = torch.full((elements,), 1e-42, dtype=torch.float32, device="cpu")
    tiny[1::2] = -1.1e-39
    decoded = codec.decode(codec.encode(tiny), elements)
    require(bool((decoded.abs() <= 1e-37).all()), "numbers below the smallest normal one grew, or became NaN")


def check_hostile_payloads(codec: Codec) -> None:
    """Check that arbitrary bytes decode to finite numbers, or are refused before anything is written."""
    for elements in lengths(codec):
        nbytes = codec.encoded_nbytes(elements)
        patterns = [bytes([byte]) * nbytes for byte in (0x00, 0x7F, 0x80, 0xFF)]
        generator = torch.Generator(device="cpu").manual_seed(elements)
        noise = torch.randint(0, 256, (4, nbytes), dtype=torch.uint8, generator=generator, device="cpu")
        patterns += [row.numpy().tobytes() for row in noise]
        valid = bytes(codec.encode(sample(elements)))
        for word in (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x99\x76\x96\x7e"):
            # NaN, infinity, -infinity and 1e38 in the first and in the last four bytes.
            patterns += [(word + valid[4:])[:nbytes], (valid[:-4] + word)[-nbytes:] if nbytes else b""]
        for payload in patterns:
            _finite_or_refused(codec, payload, elements)


def check_threads(codec: Codec) -> None:
    """Check that calls from several threads at once do not disturb each other."""
    elements = 20 * codec.granularity + 100_000
    vectors = [sample(elements, seed) for seed in range(4)]
    expected = [codec.decode(codec.encode(vector), elements) for vector in vectors]

    def round_trip(index: int) -> bool:
        vector = vectors[index % 4]
        return same_bits(codec.decode(codec.encode(vector), elements), expected[index % 4])

    # Codecs use scratch memory, which threads must not share.
    with ThreadPoolExecutor(4) as pool:
        require(all(pool.map(round_trip, range(24))), "threads disturb each other")


def _finite_or_refused(codec: Codec, payload: bytes, elements: int) -> None:
    before = sample(elements, seed=1)
    accumulator = before.clone()
    out = before.clone()
    try:
        codec.decode(payload, elements, out)
    except CodecError:
        require(same_bits(out, before), "decode wrote to out before it refused the payload")
        # Reducers accumulate without decoding first, so both must refuse the same payloads.
        raises(CodecError, "accumulating what decode refuses", codec.accumulate, payload, accumulator, 1.0)
        require(same_bits(accumulator, before), "a refused payload changed the accumulator")
    else:
        require_vector(out, elements)
        codec.accumulate(payload, accumulator, 1.0)
